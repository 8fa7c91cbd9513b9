#include "gpu/tune/timer.h"

static rf_status run(const rf__timing *timing, int64_t variant) {
    for (int64_t b = 0; b < timing->n_batches; b++) RF_CHECK(timing->run(timing->context, variant, b));
    return RF_OK;
}

rf_status rf__time(const rf__cuda_device *device, void *stream, const rf__timing *timing) {
    const rf__cuda_driver *driver = device->driver;
    rf_status status = RF_OK;
    rf__cu_event from = NULL, to = NULL;
    RF__CUDA_TRY(driver->cuEventCreate(&from, RF__CU_EVENT_DEFAULT));
    RF__CUDA_TRY(driver->cuEventCreate(&to, RF__CU_EVENT_DEFAULT));
    for (int64_t v = 0; v < timing->n_variants; v++) RF_TRY(run(timing, v));
    for (int64_t round = 0; round < timing->rounds; round++) {
        for (int64_t i = 0; i < timing->n_variants; i++) {
            const int64_t v = (i + round) % timing->n_variants;
            float milliseconds = 0;
            RF__CUDA_TRY(driver->cuEventRecord(from, stream));
            RF_TRY(run(timing, v));
            RF__CUDA_TRY(driver->cuEventRecord(to, stream));
            RF__CUDA_TRY(driver->cuEventSynchronize(to));
            RF__CUDA_TRY(driver->cuEventElapsedTime(&milliseconds, from, to));
            timing->seconds[v * timing->rounds + round] = 1e-3 * milliseconds / (double)timing->n_batches;
        }
    }
out:
    if (to != NULL) (void)driver->cuEventDestroy_v2(to);
    if (from != NULL) (void)driver->cuEventDestroy_v2(from);
    return status;
}
