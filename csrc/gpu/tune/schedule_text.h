/* Schedules as structs of int32_t and as text, "station=register distance=8": one list of fields serves both.
 *
 * A family names its fields once, and lists them with RF__SCHEDULE_FIELD. A field that is 0 is left to a
 * default. */
#ifndef RECFUSE_CUDA_TUNE_SCHEDULE_H
#define RECFUSE_CUDA_TUNE_SCHEDULE_H

#include <stddef.h>

#include "core/status.h"

typedef struct rf__schedule_field {
    const char *name;
    size_t offset; /* of the field in the struct */
    int32_t least, most;
    bool power_of_two;
    const char *const *words; /* [most + 1] of the values from `least`; NULL: the value is a number */
} rf__schedule_field;

#define RF__SCHEDULE_FIELD(type, name, least, most, power_of_two, words) \
    {#name, offsetof(type, name), least, most, power_of_two, words}

typedef struct rf__schedule_fields {
    const rf__schedule_field *fields; /* [count], in the order in which they are printed */
    int32_t count;
} rf__schedule_fields;

/* Reads fields in any order, separated by spaces, into `schedule`, a struct of zeros; NULL and "": no fields.
 * RF_ERR_VALUE: a field that is unknown or repeated, or a value that is not allowed. */
rf_status rf__schedule_parse(rf__schedule_fields fields, const char *text, void *schedule);

/* Writes the fields that are not 0 to text [bytes], truncated if it is too short. */
void rf__schedule_print(rf__schedule_fields fields, const void *schedule, char *text, size_t bytes);

/* RF_ERR_VALUE: a field that is not 0 is out of its bounds; from C they may hold anything. */
rf_status rf__schedule_check(rf__schedule_fields fields, const void *schedule);

#endif
