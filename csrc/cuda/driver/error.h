/* Error words on the host: see device/error_word.h. */
#ifndef RECFUSE_CUDA_ERROR_H
#define RECFUSE_CUDA_ERROR_H

#include <stdint.h>

#include "cuda/driver/abi.h"
#include "device/error_word.h"
#include "recfuse.h"

enum { RF__CUDA_ERROR_PLACES = 4096 };

/* The places of one device. Their memory is never moved: a captured CUDA graph has its address. */
typedef struct rf__cuda_errors {
    rf__cu_pointer claimed;           /* uint32_t [PLACES] on the device */
    rf__cu_pointer records_on_device; /* rf_error_record [PLACES], in the device's address space */
    rf_error_record *records;   /* the same memory, pinned, for the host */
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
    rf_error_record *record;
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
