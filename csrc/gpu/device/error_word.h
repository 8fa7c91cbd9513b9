/* Invalid contents that a kernel finds: the record that the device writes and a later call on the host
 * raises.
 *
 * Each table and each set of tables has its own word with one record, so that a call raises the errors of
 * earlier calls with the same tables only. The first offender claims the word (atomicCAS from the number of
 * records raised so far to one more) and alone writes the record: its fields, then __threadfence_system(),
 * then `ready`. The row counts as zero and the kernel continues. Raising takes the record and increments
 * the number raised: from then on the word takes the next record, also of earlier work in a stream. This
 * needs no operation in a stream, so no concurrent error is lost.
 *
 * Included as "gpu/device/error_word.h" by host C and by kernels. A family lists its operators, and
 * the arguments whose contents they check: families.h.
 */
#ifndef RECFUSE_CUDA_DEVICE_ERROR_WORD_H
#define RECFUSE_CUDA_DEVICE_ERROR_WORD_H

#include "gpu/device/types.h"

/* Operators, by their names in messages. */
typedef enum rf_operator {
#define RF__CHECKED_OPERATOR(name) RF_OPERATOR_##name,
#include "families.h"
} rf_operator;

/* The rule of the elements of an argument. */
typedef enum rf_rule {
    RF_RULE_INDEX,  /* in [0, limit) */
    RF_RULE_OFFSET, /* 0 at position 0, else in [limit, lookups], with the previous offset as limit */
    RF_RULE_RANGE,  /* in [limit, lookups] */
} rf_rule;

/* The owner of an element of an argument, which messages name. */
typedef enum rf_owner {
    RF_OWNER_BAG, /* `bag` of `feature`, where there are such */
    RF_OWNER_LIST, /* a tensor of a list, by its number in `feature` */
    RF_OWNER_COLUMN, /* the column in `feature`, and the sample in `bag` */
} rf_owner;

/* Arguments that several families check, as families.h has it. */
#define RF_ARGUMENT_LIST(X)                                                         \
    X(indices, "indices", INDEX, BAG, "rows of its table", "its table has no rows") \
    X(offsets, "offsets", OFFSET, BAG, "", "")

typedef enum rf_argument {
    RF_ARGUMENT_none,
#define RF__CHECKED_ARGUMENT(name, text, rule, owner, counted, none) RF_ARGUMENT_##name,
    RF_ARGUMENT_LIST(RF__CHECKED_ARGUMENT)
#include "families.h"
} rf_argument;

/* States of a record: empty, written. */
enum { RF_ERROR_NONE, RF_ERROR_READY };

typedef struct rf_error_record {
    rf_u32 ready; /* RF_ERROR_... */
    rf_u32 argument; /* rf_argument */
    rf_u32 operator_number; /* rf_operator */
    rf_i32 feature; /* -1: the operator has no features; else see rf_owner */
    rf_i64 position; /* in the argument; -1: unknown */
    rf_i64 bag; /* -1: the argument has no bags */
    rf_i64 value; /* the value at that position */
    rf_i64 limit; /* see rf_rule */
    rf_i64 lookups; /* number of indices */
    rf_u32 raised; /* records that the host has taken; only the host writes it */
    rf_u32 unused;
} rf_error_record;
RF_SIZE_IS(rf_error_record, 64);

/* The argument of kernels: both are addresses of the device. */
typedef struct rf_error_word {
    rf_u32 *claimed;
    rf_error_record *record; /* in pinned memory of the host */
} rf_error_word;
RF_SIZE_IS(rf_error_word, 16);

#endif
