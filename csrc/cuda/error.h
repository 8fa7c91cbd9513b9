/* Bad contents that a kernel finds: written by the device, raised by a later call on the host.
 *
 * The first offender claims `claimed` (atomicCAS from 0 to 1) and alone writes the record: its fields,
 * then __threadfence_system(), then ready = 1. The row counts as zero and the kernel goes on.
 */
#ifndef RECFUSE_CUDA_ERROR_H
#define RECFUSE_CUDA_ERROR_H

#include <stddef.h>
#include <stdint.h>

#include "cuda/abi.h"
#include "recfuse.h"

enum {
    RF__CUDA_BAD_INDEX = 1,  /* an index outside [0, limit), limit being the rows of the table */
    RF__CUDA_BAD_OFFSET =
        2, /* offsets[0] not 0, or one outside [limit, lookups], limit being the one before */
};

/* Names of operators in messages; the number is that of the line. */
#define RF__CUDA_OPERATOR_LIST(X) \
    X(embedding_bag)              \
    X(pin_rows)                   \
    X(fused_embedding_bag)

enum {
#define RF__CUDA_OPERATOR(name) RF__CUDA_OPERATOR_##name,
    RF__CUDA_OPERATOR_LIST(RF__CUDA_OPERATOR)
#undef RF__CUDA_OPERATOR
};

/* Layout shared with kernels/common.cuh. */
typedef struct rf__cuda_error_record {
    uint32_t ready;         /* 1: the rest is written */
    uint32_t kind;          /* RF__CUDA_BAD_... */
    uint32_t operator_name; /* RF__CUDA_OPERATOR_... */
    int32_t feature;        /* -1: the operator has none */
    int64_t position;       /* in indices or offsets */
    int64_t bag;            /* -1: the operator has none, and `position` is in its rows */
    int64_t value;          /* what was found there */
    int64_t limit;          /* see kind */
    int64_t lookups;        /* number of indices */
} rf__cuda_error_record;

_Static_assert(offsetof(rf__cuda_error_record, position) == 16, "layout shared with the kernels");
_Static_assert(sizeof(rf__cuda_error_record) == 56, "layout shared with the kernels");

/* The error word of one device. */
typedef struct rf__cuda_errors {
    rf__cu_pointer claimed;          /* uint32_t on the device */
    rf__cu_pointer record_on_device; /* rf__cuda_error_record *, in the device's address space */
    rf__cuda_error_record *record;   /* the same memory, pinned, for the host */
} rf__cuda_errors;

struct rf__cuda_device;
struct rf__cuda_driver;

/* Makes the words, zeroed, in the current context. */
rf_status rf__cuda_errors_new(const struct rf__cuda_driver *driver, rf__cuda_errors *errors);
/* Frees what there is of them. */
void rf__cuda_errors_free(const struct rf__cuda_driver *driver, rf__cuda_errors *errors);

/* Raises what a kernel of this device has recorded, once: RF_ERR_INDEX or RF_ERR_VALUE with its message;
 * the words are made ready for the next error by work on `stream`. RF_OK when there is nothing, or when
 * `stream` is capturing. Costs one read of host memory when there is nothing. */
rf_status rf__cuda_pending_error(const struct rf__cuda_device *device, void *stream);

#endif
