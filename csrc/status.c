/* Status codes, their texts, and the message of the last failure on each thread. */
#include "status.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

static _Thread_local char last_error[4096];

static const struct {
    const char *python, *text;
} statuses[] = {
#define RF__STATUS_ROW(code, python, text) [code] = {python, text},
    RF_STATUS_LIST(RF__STATUS_ROW)
#undef RF__STATUS_ROW
};

static bool status_known(rf_status status) { return (size_t)status < sizeof statuses / sizeof statuses[0]; }

const char *rf_status_text(rf_status status) {
    return status_known(status) ? statuses[status].text : "an unknown status";
}

const char *rf_status_python(rf_status status) {
    return status_known(status) ? statuses[status].python : statuses[RF_ERR_INTERNAL].python;
}

const char *rf_last_error(void) { return last_error; }

const char *rf_version(void) { return RECFUSE_VERSION; }

rf_status rf__fail(rf_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return status;
}
