/* gpu/device/common.cuh for kernels compiled for the host, as functions of a single thread
 * (tests/c/torch/kernels.cu). */
#ifndef RECFUSE_COMMON_CUH
#define RECFUSE_COMMON_CUH

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmath>

#define _Static_assert static_assert /* for headers in C */
#include "gpu/device/error_word.h"

#define RF_INLINE static inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

struct host_index {
    unsigned x;
};
static thread_local host_index blockIdx, threadIdx;

template <int BYTES> struct alignas(BYTES) rf_bytes {
    rf_u16 part[BYTES / 2];
};

/* An address that is not aligned ends the process, as on a device. */
template <int BYTES> RF_INLINE rf_bytes<BYTES> rf_load(const rf_bytes<BYTES> *from) {
    rf_bytes<BYTES> to;
    if ((uintptr_t)from % BYTES != 0) {
        fprintf(stderr, "a load of %d bytes at %p\n", BYTES, (const void *)from);
        abort();
    }
    memcpy(&to, from, BYTES);
    return to;
}

RF_INLINE void rf_wait_for_previous_kernel() {} /* kernels run one after another */

RF_INLINE float __int_as_float(int bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

struct rf_offender {
    rf_argument argument;
    rf_i64 position, bag, value, limit, lookups;
};

template <rf_operator OPERATOR> void rf_report(const rf_error_word &errors, const rf_offender &found) {
    if (*errors.claimed != errors.record->raised) return;
    *errors.claimed = errors.record->raised + 1;
    *errors.record = {RF_ERROR_READY,
                      (rf_u32)found.argument,
                      OPERATOR,
                      -1,
                      found.position,
                      found.bag,
                      found.value,
                      found.limit,
                      found.lookups,
                      errors.record->raised,
                      0};
}

#endif
