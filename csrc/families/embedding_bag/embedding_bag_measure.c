/* rf_embedding_bag_measure: schedules in turns on the user's batches. */
#include "families/embedding_bag/embedding_bag.h"
#include "gpu/tune/timer.h"
#include "families/embedding_bag/check_embedding_bag.h"

typedef struct run_context {
    const rf__cuda_device *device;
    const rf_embedding_bag_measurement *measurement;
    const rf_cuda_stream *stream;
} run_context;

static rf_status run(void *context, int64_t schedule, int64_t batch) {
    const run_context *in = context;
    const rf_embedding_bag_params *params = &in->measurement->batches[batch];
    if (in->measurement->prepare != NULL)
        RF_CHECK(in->measurement->prepare(in->measurement->context, params, in->stream));
    return rf__embedding_bag_run(in->device, params, &in->measurement->schedules[schedule],
                                 in->stream->stream);
}

rf_status rf_embedding_bag_measure(const rf_embedding_bag_measurement *measurement,
                                   const rf_cuda_stream *stream) {
    const rf__cuda_device *device = NULL;
    RF_FAIL_IF(measurement->n_batches <= 0 || measurement->n_schedules < 0 || measurement->rounds < 0,
               RF_ERR_VALUE, "measure: needs at least one batch, and rounds of 0 or more");
    for (int64_t b = 0; b < measurement->n_batches; b++)
        RF_CHECK(rf__check_embedding_bag(&measurement->batches[b]));
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    rf_embedding_bag_params errors_only = measurement->batches[0];
    errors_only.bags = 0;
    run_context context = {device, measurement, stream};
    const rf__timing timing = {.run = run,
                               .context = &context,
                               .n_variants = measurement->n_schedules,
                               .n_batches = measurement->n_batches,
                               .rounds = measurement->rounds,
                               .seconds = measurement->seconds};
    RF_CHECK(rf__cuda_enter(device));
    RF_CHECK(rf__cuda_leave_with(rf__time(device, stream->stream, &timing)));
    return rf__embedding_bag_run(device, &errors_only, NULL, stream->stream); /* raises their errors */
}
