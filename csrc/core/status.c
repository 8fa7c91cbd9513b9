/* Status codes, their texts, and the message of the last failure on each thread. */
#include "core/status.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last_error[4096];

static const struct {
    const char *python, *text;
} statuses[] = {
#define RF__STATUS_ROW(code, python, text) [code] = {python, text},
    RF_STATUS_LIST(RF__STATUS_ROW)
#undef RF__STATUS_ROW
};

static bool is_status(rf_status status) { return (size_t)status < sizeof statuses / sizeof statuses[0]; }

const char *rf_status_text(rf_status status) {
    return is_status(status) ? statuses[status].text : "an unknown status";
}

const char *rf_status_python(rf_status status) {
    return is_status(status) ? statuses[status].python : statuses[RF_ERR_INTERNAL].python;
}

const char *rf_last_error(void) { return last_error; }

const char *rf_version(void) { return RECFUSE_VERSION; }

/* Returns the bytes of the UTF-8 character at the start of `text`; 0: it is invalid or truncated. */
static size_t character_bytes(const unsigned char *text) {
    const unsigned char first = text[0];
    const size_t bytes = first < 0x80   ? 1
                         : first < 0xc2 ? 0
                         : first < 0xe0 ? 2
                         : first < 0xf0 ? 3
                         : first < 0xf5 ? 4
                                        : 0;
    for (size_t i = 1; i < bytes; i++) {
        if ((text[i] & 0xc0) != 0x80) return 0;
    }
    const bool overlong = (first == 0xe0 && text[1] < 0xa0) || (first == 0xf0 && text[1] < 0x90);
    const bool beyond = (first == 0xed && text[1] > 0x9f) || (first == 0xf4 && text[1] > 0x8f);
    return overlong || beyond ? 0 : bytes;
}

/* A message may contain a path in any encoding, and end within a character. Replaces invalid UTF-8 by
 * question marks, so that every binding can show it. */
static void make_utf8(char *text) {
    while (*text != '\0') {
        const size_t bytes = character_bytes((const unsigned char *)text);
        if (bytes == 0) *text = '?';
        text += bytes > 0 ? bytes : 1;
    }
}

rf_status rf__fail(rf_status status, const char *format, ...) {
    char message[sizeof last_error]; /* the previous message may be an argument */
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    make_utf8(message);
    memcpy(last_error, message, strlen(message) + 1);
    return status;
}
