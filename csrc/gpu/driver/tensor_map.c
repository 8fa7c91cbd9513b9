#include "gpu/driver/tensor_map.h"

#include <inttypes.h>
#include <string.h>

#include "core/row_format.h"

enum { GRAIN = 16, MOST_BOX = 256, CACHED_MAPS = 16 };

/* This thread's last maps. A map is a function of its params only, and stays valid if the memory is
 * freed or written. So a cached map is never stale, and layers called again with the same memory avoid the driver's
 * work. */
static _Thread_local struct {
    rf__tensor_map_params params; /* data NULL: empty; without padding, so compared bytewise */
    rf__cu_tensor_map map;
} cached[CACHED_MAPS];
static _Thread_local uint32_t oldest; /* the oldest */

static rf_status dimension_check(const rf__tensor_map_params *params, int32_t i) {
    static const int64_t most_size = INT64_C(1) << 32, most_pitch = INT64_C(1) << 40;
    const int64_t size = params->sizes[i], pitch = params->pitches[i], box = params->box[i];
    RF_FAIL_IF(size < 1 || size > most_size, RF_ERR_VALUE,
               "tensor map: dimension %d has %" PRId64 " elements; expected 1 to 2^32", (int)i, size);
    RF_FAIL_IF(box < 1 || box > MOST_BOX, RF_ERR_VALUE,
               "tensor map: the box has %" PRId64 " elements of dimension %d; expected 1 to %d", box, (int)i,
               MOST_BOX);
    RF_FAIL_IF(i > 0 && (pitch < GRAIN || pitch >= most_pitch || pitch % GRAIN != 0), RF_ERR_VALUE,
               "tensor map: dimension %d has a pitch of %" PRId64
               " bytes; expected a multiple of %d, and less than 2^40",
               (int)i, pitch, GRAIN);
    const int64_t width = rf__elements_bytes(params->dtype, box);
    RF_FAIL_IF(
        i == 0 && (width % GRAIN != 0 || (params->swizzle != 0 && width > params->swizzle)), RF_ERR_VALUE,
        "tensor map: the box is %" PRId64
        " bytes wide; expected a multiple of %d, and at most the swizzle of %d bytes if there is a swizzle",
        width, GRAIN, (int)params->swizzle);
    return RF_OK;
}

static rf_status encode(const rf__cuda_driver *driver, const rf__tensor_map_params *params,
                        rf__cu_tensor_map *map) {
    static const rf__cu_tensor_type types[] = {[RF_FLOAT32] = RF__CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                                               [RF_FLOAT16] = RF__CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                                               [RF_BFLOAT16] = RF__CU_TENSOR_MAP_DATA_TYPE_BFLOAT16};
    static const int32_t swizzles[] = {[RF__CU_TENSOR_MAP_SWIZZLE_NONE] = 0,
                                       [RF__CU_TENSOR_MAP_SWIZZLE_32B] = 32,
                                       [RF__CU_TENSOR_MAP_SWIZZLE_64B] = 64,
                                       [RF__CU_TENSOR_MAP_SWIZZLE_128B] = 128};
    enum { MOST_RANK = RF__TENSOR_MAP_MOST_DIMENSIONS, SWIZZLES = sizeof swizzles / sizeof swizzles[0] };
    uint64_t sizes[MOST_RANK] = {0}, pitches[MOST_RANK] = {0};
    uint32_t box[MOST_RANK] = {0}, steps[MOST_RANK] = {1, 1, 1, 1, 1};
    rf__cu_tensor_swizzle swizzle = 0;
    RF_FAIL_IF((uint32_t)params->dtype >= sizeof types / sizeof types[0], RF_ERR_TYPE,
               "tensor map: dtype is %d; expected RF_FLOAT32, RF_FLOAT16 or RF_BFLOAT16", (int)params->dtype);
    RF_FAIL_IF(params->dimensions < 1 || params->dimensions > MOST_RANK, RF_ERR_VALUE,
               "tensor map: rank is %d; expected 1 to %d", (int)params->dimensions, MOST_RANK);
    RF_FAIL_IF(params->data == NULL || (uintptr_t)params->data % GRAIN != 0, RF_ERR_VALUE,
               "tensor map: data is at %p; expected an address aligned to %d bytes", params->data, GRAIN);
    while (swizzle < SWIZZLES && swizzles[swizzle] != params->swizzle) swizzle++;
    RF_FAIL_IF(swizzle == SWIZZLES, RF_ERR_VALUE,
               "tensor map: swizzle is %d bytes; expected 0, 32, 64 or 128", (int)params->swizzle);
    for (int32_t i = 0; i < params->dimensions; i++) {
        RF_CHECK(dimension_check(params, i));
        sizes[i] = (uint64_t)params->sizes[i];
        box[i] = (uint32_t)params->box[i];
        if (i > 0) pitches[i - 1] = (uint64_t)params->pitches[i];
    }
    /* L2 prefetches no further than a box is wide: other columns may be needed long after they have been
     * evicted. */
    const bool narrow = rf__elements_bytes(params->dtype, box[0]) <= 128;
    return RF__CUDA_CALL(driver->cuTensorMapEncodeTiled(
        map, types[params->dtype], (unsigned int)params->dimensions, (void *)(uintptr_t)params->data, sizes,
        pitches, box, steps, RF__CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
        narrow ? RF__CU_TENSOR_MAP_L2_PROMOTION_L2_128B : RF__CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        RF__CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
}

rf_status rf__tensor_map_encode(const rf__cuda_driver *driver, const rf__tensor_map_params *params,
                                rf__cu_tensor_map *map) {
    for (uint32_t i = 0; i < CACHED_MAPS && params->data != NULL; i++) {
        if (cached[i].params.data != params->data || memcmp(&cached[i].params, params, sizeof *params) != 0)
            continue;
        *map = cached[i].map;
        return RF_OK;
    }
    RF_CHECK(encode(driver, params, map));
    cached[oldest].params = *params;
    cached[oldest].map = *map;
    oldest = (oldest + 1) % CACHED_MAPS;
    return RF_OK;
}
