/* rf_embedding_bag_measure: schedules in turns on the user's batches. */
#include "families/embedding_bag/embedding_bag.h"
#include "gpu/tune/timer.h"
#include "families/embedding_bag/check_embedding_bag.h"

typedef struct run_context {
    const rf__cuda_device *device;
    const rf_embedding_bag_measurement *work;
    const rf_cuda_stream *stream;
} run_context;

static rf_status run(void *context, int64_t schedule, int64_t batch) {
    const run_context *in = context;
    const rf_embedding_bag_params *params = &in->work->batches[batch];
    if (in->work->prepare != NULL) RF_CHECK(in->work->prepare(in->work->context, params, in->stream));
    return rf__embedding_bag_run(in->device, params, &in->work->schedules[schedule], in->stream->stream);
}

rf_status rf_embedding_bag_measure(const rf_embedding_bag_measurement *work, const rf_cuda_stream *stream) {
    const rf__cuda_device *device = NULL;
    RF_FAIL_IF(work->n_batches <= 0 || work->n_schedules < 0 || work->rounds < 0, RF_ERR_VALUE,
               "measure: needs at least one batch, and rounds of 0 or more");
    for (int64_t b = 0; b < work->n_batches; b++) RF_CHECK(rf__check_embedding_bag(&work->batches[b]));
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    rf_embedding_bag_params empty = work->batches[0];
    empty.bags = 0;
    run_context context = {device, work, stream};
    const rf__timing timing = {.run = run,
                               .context = &context,
                               .n_variants = work->n_schedules,
                               .n_batches = work->n_batches,
                               .rounds = work->rounds,
                               .seconds = work->seconds};
    RF_CHECK(rf__cuda_enter(device));
    RF_CHECK(rf__cuda_leave_with(rf__time(device, stream->stream, &timing)));
    return rf__embedding_bag_run(device, &empty, NULL, stream->stream); /* raises their errors */
}
