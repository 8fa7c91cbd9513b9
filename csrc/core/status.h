/* Errors of recfuse's C code: a function returns a status, and the detail goes to a message of this thread.
 *
 *     rf_status status = RF_OK;
 *     void *scratch = NULL;
 *     RF_TRY(rf__scratch_new(&scratch));
 *     ...
 * out:
 *     free(scratch);
 *     return status;
 */
#ifndef RECFUSE_STATUS_H
#define RECFUSE_STATUS_H

#include "recfuse.h"

#define RF__PRINTF(text, first) __attribute__((format(printf, text, first)))

/* An internal function that recfuse._C calls: the library exports it, with no promise to others. */
#define RF__SHARED RF_API

/* Keeps the message for rf_last_error (valid UTF-8 of at most 4,095 bytes) and returns `status`, which is not
 * RF_OK. Arguments may be the last message. */
RF__SHARED rf_status rf__fail(rf_status status, const char *format, ...) RF__PRINTF(2, 3);

/* Fails if the condition is true: for checks of arguments, before the function holds resources that `out:`
 * would free.
 *     RF_FAIL_IF(params->rows < 0, RF_ERR_VALUE, "rows is %" PRId64 "; expected 0 or more", params->rows);
 */
#define RF_FAIL_IF(condition, code, ...)                     \
    do {                                                     \
        if (condition) return rf__fail((code), __VA_ARGS__); \
    } while (0)

/* Calls, and returns the status of a failure; only while the function holds no resources. */
#define RF_CHECK(call)                      \
    do {                                    \
        const rf_status failed = (call);    \
        if (failed != RF_OK) return failed; \
    } while (0)

/* Calls; on failure keeps its status in the variable `status` and jumps to the label `out`. */
#define RF_TRY(call)                   \
    do {                               \
        status = (call);               \
        if (status != RF_OK) goto out; \
    } while (0)

#endif
