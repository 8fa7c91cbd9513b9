/* rf__fused_measure: sets of schedules on the user's batches, timed by events of the device; or inside the
 * kernel, block by block, with the candidates of all sets in one kernel (Pan et al., RecFlex, SC'24, section
 * IV-A2). */
#include "families/fused_embedding_bag/fused.h"

#include <inttypes.h>
#include <stdlib.h>

#include "gpu/driver/memory.h"
#include "gpu/tune/timer.h"
#include "families/fused_embedding_bag/check_fused.h"

static const rf_fused_schedule *set_of(const rf__fused_measurement *measurement, int64_t set) {
    return measurement->schedules + set * measurement->batches[0].n_features;
}

/* Device memory that grows and loses its contents then. */
typedef struct scratch {
    rf__cu_pointer memory;
    int64_t bytes;
} scratch;

static rf_status scratch_grow(const rf__cuda_device *device, scratch *have, int64_t bytes) {
    rf_status status = RF_OK;
    if (bytes <= have->bytes) return RF_OK;
    rf__cuda_memory_free(device->driver, have->memory);
    *have = (scratch){0, 0};
    RF__CUDA_TRY(device->driver->cuMemAlloc_v2(&have->memory, (size_t)bytes));
    have->bytes = bytes;
out:
    return status;
}

/* Lowers a batch and runs it, without a look at earlier errors. */
static rf_status run(const rf__cuda_store *store, const rf__fused_problem *problem, const uint64_t *uploads,
                     scratch *workspace) {
    const rf__cuda_device *device = store->device;
    rf_status status = RF_OK;
    rf__launches launches;
    rf__launches_init(&launches, "fused_embedding_bag");
    RF_TRY(rf__fused_lower(&device->gpu, problem, &launches));
    RF_TRY(scratch_grow(device, workspace, launches.workspace_bytes));
    RF_TRY(rf__launches_run_in(device, &launches, uploads, workspace->memory, store->stream));
out:
    rf__launches_free(&launches);
    return status;
}

typedef struct set_run {
    const rf__cuda_store *store;
    const rf__fused_measurement *measurement;
    scratch workspace;
} set_run;

/* Runs a set once on a batch, by the mapping that its expectations give. */
static rf_status run_set(void *context, int64_t set, int64_t batch) {
    set_run *in = context;
    const rf_fused_plan plan = {.schedules = set_of(in->measurement, set), .warps = in->measurement->warps};
    rf__fused_prepared prepared;
    rf_status status = rf__fused_prepare(in->store, &in->measurement->batches[batch], &plan, &prepared);
    if (status == RF_OK) status = run(in->store, &prepared.problem, prepared.uploads, &in->workspace);
    rf__fused_release(&prepared);
    return status;
}

static rf_status measure_sets(const rf__cuda_store *store, const rf__fused_measurement *measurement,
                              double *seconds) {
    set_run context = {.store = store, .measurement = measurement};
    const rf__timing timing = {.run = run_set,
                               .context = &context,
                               .n_variants = measurement->n_sets,
                               .n_batches = measurement->n_batches,
                               .rounds = measurement->rounds,
                               .seconds = seconds};
    const rf_status status = rf__time(store->device, store->stream, &timing);
    (void)store->device->driver->cuStreamSynchronize(store->stream);
    rf__cuda_memory_free(store->device->driver, context.workspace.memory);
    return status;
}

/* A batch as a set maps it; `mapping`: all of it, on the device. */
typedef struct timed_batch {
    rf__fused_problem problem;
    rf__cu_pointer mapping;
} timed_batch;

/* Timing blocks needs one kernel for all sets, and a mapping for each set and batch. */
typedef struct timed_sets {
    rf__fused_classes classes; /* of all sets */
    rf__fused_feature *features; /* [n_sets, n_features] */
    rf__fused_prepared common; /* the features that all of them pool */
    timed_batch *batches; /* [n_sets, n_batches] */
    scratch workspace, cycles; /* cycles: [n_sets, n_features] */
    uint64_t *host_cycles; /* the same on the host */
} timed_sets;

static rf_status set_prepare(const rf__cuda_device *device, const rf__fused_measurement *measurement,
                             int64_t set, int64_t b, timed_sets *sets) {
    rf_status status = RF_OK;
    const int64_t n_features = measurement->batches[0].n_features;
    timed_batch *timed = &sets->batches[set * measurement->n_batches + b];
    rf__fused_mapping *mapping = NULL;
    int64_t rows = 0;
    const rf__fused_mappable input = {sets->features + set * n_features, n_features, &sets->classes, 0};
    const rf__fused_batch batch = {.bags = measurement->batches[b].bags,
                                   .offsets = measurement->host_offsets[b],
                                   .offset_type = measurement->batches[b].offset_type};
    timed->problem = sets->common.problem;
    timed->problem.params = &measurement->batches[b];
    timed->problem.cycles = sets->cycles.memory + (uint64_t)(set * n_features) * sizeof *sets->host_cycles;
    RF_TRY(rf__fused_map(&input, &batch, device->gpu.sms, RF__FUSED_BLOCKS, &mapping, &rows));
    timed->problem.mapping = *mapping;
    RF_TRY(rf__cuda_upload(device->driver, mapping, (size_t)rows * sizeof *mapping, &timed->mapping));
out:
    free(mapping);
    return status;
}

/* Once over all batches by all sets. */
static rf_status run_round(const rf__cuda_store *store, const rf__fused_measurement *measurement,
                           timed_sets *sets) {
    for (int64_t i = 0; i < measurement->n_sets * measurement->n_batches; i++) {
        uint64_t uploads[RF__MOST_UPLOADS] = {0};
        uploads[RF__FUSED_UPLOAD_FEATURES] = sets->common.features.upload;
        uploads[RF__FUSED_UPLOAD_PARTITION] = sets->batches[i].mapping;
        RF_CHECK(run(store, &sets->batches[i].problem, uploads, &sets->workspace));
    }
    return RF_OK;
}

static rf_status measure_blocks(const rf__cuda_store *store, const rf__fused_measurement *measurement,
                                double *cycles) {
    const rf__cuda_device *device = store->device;
    const rf__cuda_driver *driver = device->driver;
    const rf_fused_embedding_bag_params *first = &measurement->batches[0];
    const int64_t n_counters = measurement->n_sets * first->n_features,
                  n_batches = measurement->n_sets * measurement->n_batches;
    const rf_fused_plan plan = {.schedules = measurement->schedules, .warps = measurement->warps};
    rf_status status = RF_OK;
    timed_sets *sets = calloc(1, sizeof *sets);
    RF_FAIL_IF(sets == NULL, RF_ERR_MEMORY, "no memory to time schedules");
    sets->features = calloc((size_t)n_counters + 1, sizeof *sets->features);
    sets->host_cycles = calloc((size_t)n_counters + 1, sizeof *sets->host_cycles);
    sets->batches = calloc((size_t)n_batches + 1, sizeof *sets->batches);
    if (sets->features == NULL || sets->host_cycles == NULL || sets->batches == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory to time %" PRId64 " schedules", n_counters);
        goto out;
    }
    RF_TRY(rf__fused_features(first, measurement->schedules, measurement->n_sets, &sets->classes,
                              sets->features));
    RF_TRY(rf__fused_prepare_features(store, first, &plan, &sets->common));
    RF_TRY(rf__fused_class_list_of(&sets->classes, &sets->common.problem.classes));
    RF_TRY(scratch_grow(device, &sets->cycles, (n_counters + 1) * (int64_t)sizeof *sets->host_cycles));
    for (int64_t i = 0; i < n_batches; i++)
        RF_TRY(
            set_prepare(device, measurement, i / measurement->n_batches, i % measurement->n_batches, sets));
    RF_TRY(run_round(store, measurement, sets)); /* does not count */
    RF__CUDA_TRY(driver->cuMemsetD32Async(sets->cycles.memory, 0, (size_t)(2 * n_counters), store->stream));
    for (int64_t round = 0; round < measurement->rounds; round++) RF_TRY(run_round(store, measurement, sets));
    RF__CUDA_TRY(driver->cuMemcpyDtoHAsync_v2(sets->host_cycles, sets->cycles.memory,
                                              (size_t)n_counters * sizeof *sets->host_cycles, store->stream));
    RF__CUDA_TRY(driver->cuStreamSynchronize(store->stream));
    for (int64_t i = 0; i < n_counters; i++) cycles[i] = (double)sets->host_cycles[i];
out:
    (void)driver->cuStreamSynchronize(store->stream);
    for (int64_t i = 0; sets->batches != NULL && i < n_batches; i++)
        rf__cuda_memory_free(device->driver, sets->batches[i].mapping);
    rf__cuda_memory_free(device->driver, sets->workspace.memory);
    rf__cuda_memory_free(device->driver, sets->cycles.memory);
    rf__fused_release(&sets->common);
    free(sets->batches);
    free(sets->host_cycles);
    free(sets->features);
    free(sets);
    return status;
}

/* Raises errors that the batches left. */
static rf_status pending(const rf__cuda_device *device, const rf__fused_measurement *measurement,
                         void *stream) {
    rf__launches no_launches;
    rf__launches_init(&no_launches, "fused_embedding_bag");
    rf__fused_owner_set(&measurement->batches[0], &no_launches);
    return rf__launches_pending(device, &no_launches, stream);
}

rf_status rf__fused_measure(const rf__fused_measurement *measurement, bool timed, double *result,
                            const rf_cuda_stream *stream) {
    rf_status status = RF_OK;
    const rf__cuda_device *device = NULL;
    rf__cuda_store store;
    rf__cu_capture_mode mode =
        RF__CU_STREAM_CAPTURE_MODE_RELAXED; /* other threads may be capturing streams */
    RF_FAIL_IF(measurement->n_batches <= 0 || measurement->n_sets <= 0 || measurement->rounds < 0,
               RF_ERR_VALUE, "measure: needs a batch, a set of schedules, and rounds of 0 or more");
    RF_TRY(rf__check_fused_warps(measurement->warps));
    for (int64_t b = 0; b < measurement->n_batches; b++) {
        RF_TRY(rf__check_fused_call(&measurement->batches[b]));
        RF_TRY(rf__check_fused_features(&measurement->batches[b]));
        RF_FAIL_IF(measurement->batches[b].bags <= 0, RF_ERR_VALUE, "measure: a batch has no bags");
    }
    RF_TRY(rf__cuda_device_get(stream->device, &device));
    RF_TRY(rf__cuda_store_of(device, stream->stream, NULL, &store));
    RF_TRY(rf__cuda_enter(device));
    mode = rf__cuda_capture_mode(device->driver, mode);
    status = timed ? measure_blocks(&store, measurement, result) : measure_sets(&store, measurement, result);
    if (status == RF_OK) status = pending(device, measurement, stream->stream);
    (void)rf__cuda_capture_mode(device->driver, mode);
    rf__cuda_leave();
    rf__description_forget(&store); /* each set has one */
out:
    return status;
}
