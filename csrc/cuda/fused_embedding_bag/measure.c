/* rf__fused_measure: sets of schedules on the user's batches, timed by events of the device; or inside the kernel,
 * block by block, with the candidates of all sets in one kernel (Pan et al., RecFlex, SC'24, section IV-A2). */
#include "cuda/fused_embedding_bag/fused.h"

#include <inttypes.h>
#include <stdlib.h>

#include "cuda/driver/memory.h"
#include "cuda/tune/timer.h"
#include "base/validate.h"

static const rf_fused_schedule *set_of(const rf__fused_measurement *work, int64_t set) {
    return work->schedules + set * work->batches[0].n_features;
}

/* Device memory that grows; what it was before is lost. */
typedef struct scratch {
    rf__cu_pointer memory;
    int64_t bytes;
} scratch;

static rf_status scratch_grow(const rf__cuda_device *device, scratch *have, int64_t bytes) {
    rf_status status = RF_OK;
    if (bytes <= have->bytes) return RF_OK;
    rf__cuda_memory_free(device, have->memory);
    *have = (scratch){0, 0};
    RF__CUDA_TRY(device->driver->cuMemAlloc_v2(&have->memory, (size_t)bytes));
    have->bytes = bytes;
out:
    return status;
}

typedef struct set_run {
    const rf__cuda_store *store;
    const rf__fused_measurement *work;
    scratch workspace;
} set_run;

/* Runs a set once on a batch, by the mapping that its expectations give. */
static rf_status run_set(void *context, int64_t set, int64_t batch) {
    set_run *in = context;
    const rf_fused_embedding_bag_params *params = &in->work->batches[batch];
    const rf_fused_plan plan = {.schedules = set_of(in->work, set), .warps = in->work->warps};
    rf_status status = RF_OK;
    rf__fused_ready ready = {0};
    RF_TRY(rf__fused_prepare(in->store, params, &plan, &ready));
    RF_TRY(scratch_grow(in->store->device, &in->workspace, ready.workspace_bytes));
    RF_TRY(rf__fused_launch(in->store->device, &ready, params, (void *)(uintptr_t)in->workspace.memory, 0,
                            in->store->stream));
out:
    rf__fused_release(&ready);
    return status;
}

static rf_status measure_sets(const rf__cuda_store *store, const rf__fused_measurement *work,
                              double *seconds) {
    set_run context = {.store = store, .work = work};
    const rf__timing timing = {.run = run_set,
                               .context = &context,
                               .n_variants = work->n_sets,
                               .n_batches = work->n_batches,
                               .rounds = work->rounds,
                               .seconds = seconds};
    const rf_status status = rf__time(store->device, store->stream, &timing);
    (void)store->device->driver->cuStreamSynchronize(store->stream);
    rf__cuda_memory_free(store->device, context.workspace.memory);
    return status;
}

/* What timing blocks needs: one kernel, and for each set and batch a mapping on the device. */
typedef struct timed_sets {
    rf__fused_classes classes; /* of all sets */
    rf__fused_feature *features; /* [n_sets, n_features] */
    rf__fused_ready common; /* holds the description that all of them work by */
    rf__fused_ready *ready; /* [n_sets, n_batches] */
    scratch workspace, cycles; /* cycles: [n_sets, n_features] */
    uint64_t *found; /* the same on the host */
} timed_sets;

static rf_status set_prepare(const rf__cuda_device *device, const rf__fused_measurement *work, int64_t set,
                             int64_t b, timed_sets *sets) {
    rf_status status = RF_OK;
    const int64_t n_features = work->batches[0].n_features;
    rf__fused_ready *ready = &sets->ready[set * work->n_batches + b];
    rf__fused_mapping *mapping = NULL;
    int64_t rows = 0;
    const rf__fused_mappable what = {sets->features + set * n_features, n_features, &sets->classes, 0};
    const rf__fused_batch batch = {.bags = work->batches[b].bags,
                                   .offsets = work->host_offsets[b],
                                   .offset_type = work->batches[b].offset_type};
    *ready = sets->common;
    RF_TRY(rf__fused_map(&what, &batch, device->gpu.sms, RF__FUSED_BLOCKS, &mapping, &rows));
    ready->mapping = *mapping;
    ready->workspace_bytes = rf__fused_workspace(mapping);
    RF_TRY(rf__cuda_upload(device, mapping, (size_t)rows * sizeof *mapping, &ready->mapping_on_device));
    RF_TRY(scratch_grow(device, &sets->workspace, ready->workspace_bytes));
out:
    free(mapping);
    return status;
}

/* Once over all batches by all sets. */
static rf_status run_round(const rf__cuda_store *store, const rf__fused_measurement *work,
                           const timed_sets *sets) {
    const uint64_t set_bytes = sizeof(uint64_t) * (uint64_t)work->batches[0].n_features;
    for (int64_t i = 0; i < work->n_sets * work->n_batches; i++) {
        const uint64_t set = (uint64_t)(i / work->n_batches);
        RF_CHECK(rf__fused_launch(store->device, &sets->ready[i], &work->batches[i % work->n_batches],
                                  (void *)(uintptr_t)sets->workspace.memory,
                                  sets->cycles.memory + set * set_bytes, store->stream));
    }
    return RF_OK;
}

static rf_status measure_blocks(const rf__cuda_store *store, const rf__fused_measurement *work,
                                double *cycles) {
    const rf__cuda_device *device = store->device;
    const rf__cuda_driver *driver = device->driver;
    const rf_fused_embedding_bag_params *first = &work->batches[0];
    const int64_t all = work->n_sets * first->n_features, n_ready = work->n_sets * work->n_batches;
    const rf_fused_plan plan = {.schedules = work->schedules, .warps = work->warps};
    rf_status status = RF_OK;
    timed_sets *sets = calloc(1, sizeof *sets);
    RF_FAIL_IF(sets == NULL, RF_ERR_MEMORY, "no memory to time schedules");
    sets->features = calloc((size_t)all + 1, sizeof *sets->features);
    sets->found = calloc((size_t)all + 1, sizeof *sets->found);
    sets->ready = calloc((size_t)n_ready + 1, sizeof *sets->ready);
    if (sets->features == NULL || sets->found == NULL || sets->ready == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory to time %" PRId64 " schedules", all);
        goto out;
    }
    RF_TRY(rf__fused_features(first, work->schedules, work->n_sets, &sets->classes, sets->features));
    RF_TRY(rf__fused_prepare_timed(store, first, &plan, &sets->classes, &sets->common));
    for (int64_t i = 0; i < n_ready; i++)
        RF_TRY(set_prepare(device, work, i / work->n_batches, i % work->n_batches, sets));
    RF_TRY(scratch_grow(device, &sets->cycles, (all + 1) * (int64_t)sizeof *sets->found));
    RF_TRY(run_round(store, work, sets)); /* does not count */
    RF__CUDA_TRY(driver->cuMemsetD32Async(sets->cycles.memory, 0, (size_t)(2 * all), store->stream));
    for (int64_t round = 0; round < work->rounds; round++) RF_TRY(run_round(store, work, sets));
    RF__CUDA_TRY(driver->cuMemcpyDtoHAsync_v2(sets->found, sets->cycles.memory,
                                              (size_t)all * sizeof *sets->found, store->stream));
    RF__CUDA_TRY(driver->cuStreamSynchronize(store->stream));
    for (int64_t i = 0; i < all; i++) cycles[i] = (double)sets->found[i];
out:
    (void)driver->cuStreamSynchronize(store->stream);
    for (int64_t i = 0; sets->ready != NULL && i < n_ready; i++)
        rf__cuda_memory_free(device, sets->ready[i].mapping_on_device);
    rf__cuda_memory_free(device, sets->workspace.memory);
    rf__cuda_memory_free(device, sets->cycles.memory);
    rf__fused_release(&sets->common);
    free(sets->ready);
    free(sets->found);
    free(sets->features);
    free(sets);
    return status;
}

rf_status rf__fused_measure(const rf__fused_measurement *work, bool timed, double *result,
                            const rf_cuda_stream *stream) {
    rf_status status = RF_OK;
    const rf__cuda_device *device = NULL;
    rf__cuda_store store;
    rf__cu_capture_mode mode = RF__CU_STREAM_CAPTURE_MODE_RELAXED; /* others may capture streams meanwhile */
    RF_FAIL_IF(work->n_batches <= 0 || work->n_sets <= 0 || work->rounds < 0, RF_ERR_VALUE,
               "measure: needs a batch, a set of schedules, and rounds of 0 or more");
    RF_TRY(rf__check_fused_warps(work->warps));
    for (int64_t b = 0; b < work->n_batches; b++) {
        RF_TRY(rf__check_fused_call(&work->batches[b]));
        RF_TRY(rf__check_fused_features(&work->batches[b]));
        RF_FAIL_IF(work->batches[b].bags <= 0, RF_ERR_VALUE, "measure: a batch has no bags");
    }
    RF_TRY(rf__cuda_device_get(stream->device, &device));
    RF_TRY(rf__cuda_store_of(device, stream->stream, NULL, &store));
    RF_TRY(rf__cuda_enter(device));
    mode = rf__cuda_capture_mode(device->driver, mode);
    status = timed ? measure_blocks(&store, work, result) : measure_sets(&store, work, result);
    if (status == RF_OK) status = rf__fused_pending(device, &work->batches[0], stream->stream);
    (void)rf__cuda_capture_mode(device->driver, mode);
    rf__cuda_leave();
    rf__fused_forget(&store); /* there is one for each set */
out:
    return status;
}
