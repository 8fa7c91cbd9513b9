/* Bad contents that a kernel finds: written by the device, raised by a later call on the host.
 *
 * Each table (embedding_bag, pin_rows) and each set of tables (fused_embedding_bag) has a place of its own for one
 * record, so that a call raises what earlier calls with the same tables left, and no other's. The first offender claims
 * the place (atomicCAS of the number of records raised so far to one more) and alone writes the record: its fields,
 * then __threadfence_system(), then ready = 1. The row counts as zero and the kernel goes on. Raising takes the record
 * and adds one to the number raised: from then on the place takes the next record, also of work that was in a stream
 * before. Nothing is put into a stream for it, so nothing that is found meanwhile is lost.
 */
#ifndef RECFUSE_CUDA_ERROR_H
#define RECFUSE_CUDA_ERROR_H

#include <stddef.h>
#include <stdint.h>

#include "cuda/driver/abi.h"
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

/* Layout shared with device/common.cuh. */
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
    uint32_t raised;        /* records that the host has taken from here; written by it alone */
    uint32_t unused;
} rf__cuda_error_record;

_Static_assert(offsetof(rf__cuda_error_record, position) == 16, "layout shared with the kernels");
_Static_assert(sizeof(rf__cuda_error_record) == 64, "layout shared with the kernels");

enum { RF__CUDA_ERROR_PLACES = 4096 };

/* The places of one device. Their memory is never moved: a captured CUDA graph has its address. */
typedef struct rf__cuda_errors {
    rf__cu_pointer claimed;           /* uint32_t [PLACES] on the device */
    rf__cu_pointer records_on_device; /* rf__cuda_error_record [PLACES], in the device's address space */
    rf__cuda_error_record *records;   /* the same memory, pinned, for the host */
    uint64_t *keys;                   /* [PLACES] whose each is, 0: nobody's; atomic */
} rf__cuda_errors;

struct rf__cuda_device;
struct rf__cuda_driver;

/* Makes the places, zeroed, in the current context. */
rf_status rf__cuda_errors_new(const struct rf__cuda_driver *driver, rf__cuda_errors *errors);
/* Frees what there is of them. */
void rf__cuda_errors_free(const struct rf__cuda_driver *driver, rf__cuda_errors *errors);

/* A place: the two addresses that kernels get, and the host's view. */
typedef struct rf__cuda_error_place {
    rf__cu_pointer claimed, record_on_device;
    rf__cuda_error_record *record;
} rf__cuda_error_place;

/* The place of a table at `weight` (of a fused call: the first one), told from others there by `shape`: rows, or what
 * else does. The same for ever. Where thousands are in use already, some share theirs. Takes no lock. */
rf__cuda_error_place rf__cuda_error_place_of(const struct rf__cuda_device *device, const void *weight,
                                             uint64_t shape);

/* Raises what a kernel has recorded in `place`, once: RF_ERR_INDEX or RF_ERR_VALUE with its message. RF_OK when there
 * is nothing, or when `stream` is capturing. Costs one read of host memory when there is nothing. */
rf_status rf__cuda_pending_error(const struct rf__cuda_device *device, const rf__cuda_error_place *place,
                                 void *stream);

#endif
