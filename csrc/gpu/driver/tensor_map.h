/* Tensor maps: descriptions of copies of boxes between global and shared memory (TMA, compute capability 9.0
 * and more). */
#ifndef RECFUSE_CUDA_DRIVER_TENSOR_MAP_H
#define RECFUSE_CUDA_DRIVER_TENSOR_MAP_H

#include "gpu/driver/driver.h"

enum { RF__TENSOR_MAP_MOST_DIMENSIONS = 5 };

/* A tensor on the device and the boxes to copy. The innermost dimension comes first. */
typedef struct rf__tensor_map_params {
    const void *data; /* aligned to 16 bytes */
    rf_dtype dtype;
    int32_t dimensions; /* 1 ... 5 */
    int64_t sizes[RF__TENSOR_MAP_MOST_DIMENSIONS]; /* elements, 1 ... 2^32 */
    /* Bytes from one index of the dimension to the next: multiples of 16 below 2^40; [0] is not read. */
    int64_t pitches[RF__TENSOR_MAP_MOST_DIMENSIONS];
    int32_t
        box[RF__TENSOR_MAP_MOST_DIMENSIONS]; /* elements, 1 ... 256; box[0] takes a multiple of 16 bytes */
    /* Bytes in shared memory into which box[0] fits, 32, 64 or 128, whose 16-byte pieces are permuted from
     * row to row, so that columns have no bank conflicts; 0: not permuted. */
    int32_t swizzle;
} rf__tensor_map_params;

/* Writes the map, on the host, without stream operations. A thread's last maps are cached. Elements of a box
 * outside of the tensor are zeros. RF_ERR_VALUE, RF_ERR_TYPE: a limit above, with the value; RF_ERR_CUDA: the
 * driver refuses. */
rf_status rf__tensor_map_encode(const rf__cuda_driver *driver, const rf__tensor_map_params *params,
                                rf__cu_tensor_map *map);

#endif
