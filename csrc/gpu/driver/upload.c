#include "gpu/driver/upload.h"

rf_status rf__cuda_upload(const rf__cuda_driver *driver, const void *from, size_t bytes,
                          rf__cu_pointer *memory) {
    rf_status status = RF_OK;
    rf__cu_stream stream = NULL;
    *memory = 0;
    if (bytes == 0) return RF_OK;
    const rf__cu_capture_mode mode = rf__cuda_capture_mode(driver, RF__CU_STREAM_CAPTURE_MODE_RELAXED);
    RF__CUDA_TRY(driver->cuMemAlloc_v2(memory, bytes));
    /* Its own stream, because the default stream must not be used while others are captured. */
    RF__CUDA_TRY(driver->cuStreamCreate(&stream, RF__CU_STREAM_NON_BLOCKING));
    RF__CUDA_TRY(driver->cuMemcpyHtoDAsync_v2(*memory, from, bytes, stream));
    RF__CUDA_TRY(driver->cuStreamSynchronize(stream));
out:
    if (stream != NULL) (void)driver->cuStreamDestroy_v2(stream);
    if (status != RF_OK) {
        rf__cuda_memory_free(driver, *memory);
        *memory = 0;
    }
    (void)rf__cuda_capture_mode(driver, mode);
    return status;
}

void rf__cuda_memory_free(const rf__cuda_driver *driver, rf__cu_pointer memory) {
    if (memory == 0) return;
    const rf__cu_capture_mode mode = rf__cuda_capture_mode(driver, RF__CU_STREAM_CAPTURE_MODE_RELAXED);
    (void)driver->cuMemFree_v2(memory);
    (void)rf__cuda_capture_mode(driver, mode);
}
