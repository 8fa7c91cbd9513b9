/* rf_embedding_bag_measure: schedules in turns on the user's batches, timed by events of the device. */
#include "cuda/embedding_bag/embedding_bag.h"
#include "cuda/pin_rows/pin_rows.h"
#include "base/validate.h"

/* Runs a schedule once on every batch. */
static rf_status run(const rf__cuda_device *device, const rf_embedding_bag_measurement *work,
                     int64_t schedule, void *stream) {
    rf_status status = RF_OK;
    for (int64_t b = 0; b < work->n_batches; b++) {
        const rf_embedding_bag_params *batch = &work->batches[b];
        if (work->pinned_rows != NULL) {
            const int64_t bytes = rf__dtype_bytes(batch->dtype);
            const rf_pin_rows_params pin = {.weight = batch->weight,
                                            .rows = batch->rows,
                                            .row_bytes = batch->dim * bytes,
                                            .row_pitch = batch->weight_stride * bytes,
                                            .hot_rows = work->pinned_rows,
                                            .n_hot_rows = work->n_pinned,
                                            .index_type = work->pinned_type};
            RF_TRY(rf__pin_rows_launch(device, &pin, true, stream));
        }
        RF_TRY(rf__embedding_bag_launch(device, batch, &work->schedules[schedule], stream));
    }
out:
    return status;
}

static rf_status measure(const rf__cuda_device *device, const rf_embedding_bag_measurement *work,
                         void *stream, rf__cu_event from, rf__cu_event to) {
    const rf__cuda_driver *driver = device->driver;
    rf_status status = RF_OK;
    for (int64_t s = 0; s < work->n_schedules; s++) RF_TRY(run(device, work, s, stream));
    for (int64_t round = 0; round < work->rounds; round++) {
        for (int64_t turn = 0; turn < work->n_schedules; turn++) {
            const int64_t s = (turn + round) % work->n_schedules;
            float milliseconds = 0;
            RF__CUDA_TRY(driver->cuEventRecord(from, stream));
            RF_TRY(run(device, work, s, stream));
            RF__CUDA_TRY(driver->cuEventRecord(to, stream));
            RF__CUDA_TRY(driver->cuEventSynchronize(to));
            RF__CUDA_TRY(driver->cuEventElapsedTime(&milliseconds, from, to));
            work->seconds[s * work->rounds + round] = 1e-3 * milliseconds / (double)work->n_batches;
        }
    }
out:
    return status;
}

rf_status rf_embedding_bag_measure(const rf_embedding_bag_measurement *work, const rf_cuda_stream *stream) {
    rf_status status = RF_OK;
    bool entered = false;
    const rf__cuda_device *device = NULL;
    rf__cu_event from = NULL, to = NULL;
    if (work->n_batches <= 0 || work->n_schedules < 0 || work->rounds < 0) {
        return rf__fail(RF_ERR_VALUE, "measure: needs at least one batch, and rounds of 0 or more");
    }
    for (int64_t b = 0; b < work->n_batches; b++) RF_TRY(rf__check_embedding_bag(&work->batches[b]));
    RF_TRY(rf__cuda_device_get(stream->device, &device));
    RF_TRY(rf__cuda_enter(device));
    entered = true;
    RF__CUDA_TRY(device->driver->cuEventCreate(&from, RF__CU_EVENT_DEFAULT));
    RF__CUDA_TRY(device->driver->cuEventCreate(&to, RF__CU_EVENT_DEFAULT));
    RF_TRY(measure(device, work, stream->stream, from, to));
out:
    if (to != NULL) (void)device->driver->cuEventDestroy_v2(to);
    if (from != NULL) (void)device->driver->cuEventDestroy_v2(from);
    if (entered) rf__cuda_leave();
    if (status == RF_OK && device != NULL)
        status = rf__embedding_bag_pending(device, &work->batches[0], stream->stream);
    return status;
}
