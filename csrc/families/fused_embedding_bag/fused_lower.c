/* The fused embedding bags lowered: mapping on the device, counters, staged tables, other tables. */
#include "families/fused_embedding_bag/fused_lower.h"

#include <stddef.h>

#include "core/validate.h"

static rf__fused_variant variant_of(const rf__fused_problem *problem) {
    const rf_fused_embedding_bag_params *params = problem->params;
    return (rf__fused_variant){.classes = problem->classes,
                               .index_type = (int32_t)params->index_type,
                               .offset_type = (int32_t)params->offset_type,
                               .output_dtype = (int32_t)params->output_dtype,
                               .wide_positions =
                                   params->lookups > INT32_MAX / 2, /* lanes count beyond bags */
                               .wide_rows = problem->wide_rows,
                               .weighted = params->sample_weights != NULL,
                               .check = params->check_bounds,
                               .timed = problem->cycles != 0,
                               .callers_mapping = problem->callers_mapping};
}

/* The ratio by which a block guesses its tile while it waits for its task. */
static uint32_t tiles_a_task(const rf__fused_mapping *mapping) {
    if (mapping->n_tiles == 0 || mapping->n_tiles >= mapping->n_tasks) return 0;
    return (uint32_t)((((uint64_t)mapping->n_tiles << 32) + (uint64_t)mapping->n_tasks - 1) /
                      (uint64_t)mapping->n_tasks);
}

/* Returns the arguments except for those from the partition. */
static rf_fused_args args_of(const rf__fused_problem *problem) {
    const rf_fused_embedding_bag_params *params = problem->params;
    const int64_t index_bytes = params->index_type == RF_INT64 ? 8 : 4;
    const int64_t lead = (int64_t)((uintptr_t)params->indices % (uint64_t)(4 * index_bytes)) / index_bytes;
    return (rf_fused_args){
        .indices = (uintptr_t)params->indices - (uint64_t)(lead * index_bytes),
        .offsets = (uintptr_t)params->offsets,
        .sample_weights = params->sample_weights == NULL ? 0 : (uintptr_t)(params->sample_weights - lead),
        .output = (uintptr_t)params->output,
        .output_pitch = (uint32_t)(rf__elements_bytes(params->output_dtype, params->output_stride)),
        .end = lead + params->lookups,
        .lead = (int32_t)lead,
        .bags = (int32_t)params->bags,
        .n_features = (int32_t)params->n_features,
        .cycles = problem->cycles};
}

/* The mapping is the upload: partial sums of tasks that share bags come first in the workspace, then a
 * counter for each group of them. */
static rf_status mapping_lower(const rf__fused_mapping *mapping, rf_fused_args *args,
                               rf__launches *launches) {
    args->limit = mapping->n_tiles;
    args->n_groups = mapping->n_groups;
    args->n_partials = mapping->partials;
    args->tiles_a_task = tiles_a_task(mapping);
    args->tasks = sizeof *mapping;
    args->lanes = args->tasks + (uint64_t)mapping->n_tasks * sizeof(rf_fused_task);
    args->semaphores = RF__FUSED_PARTIAL_BYTES * (uint64_t)mapping->partials;
    const int64_t counters = (int64_t)sizeof(uint32_t) * mapping->n_groups;
    launches->workspace_bytes = (int64_t)args->semaphores + counters;
    return rf__launches_fill(launches, args->semaphores, true, counters);
}

/* A kernel writes the mapping to the workspace. */
static rf_status device_map_lower(const rf__gpu *gpu, const rf__fused_problem *problem, rf_fused_args *args,
                                  rf__launches *launches, int32_t *n_tasks) {
    rf__fused_device_mapping device_mapping;
    RF_CHECK(rf__fused_map_lower(gpu, problem->map_table, problem->params, launches, &device_mapping));
    args->limit = INT32_MAX;
    args->n_tasks = device_mapping.n_tasks;
    args->tasks = device_mapping.tasks;
    args->lanes = device_mapping.lanes;
    *n_tasks = device_mapping.most_tasks;
    return RF_OK;
}

static rf_status add(const rf__fused_problem *problem, const rf__kernel_launch *launch,
                     const rf__fused_variant *variant, const rf_fused_args *args, rf__launches *launches) {
    const bool on_device = problem->map_table != NULL;
    static const size_t of_workspace[] = {offsetof(rf_fused_args, partials),
                                          offsetof(rf_fused_args, semaphores)};
    static const size_t of_mapping[] = {offsetof(rf_fused_args, tasks), offsetof(rf_fused_args, lanes)};
    RF_CHECK(rf__launches_add(launches, launch, variant, sizeof *variant, args, sizeof *args));
    rf__launches_bind_upload(launches, RF__FUSED_UPLOAD_FEATURES, offsetof(rf_fused_args, features));
    for (int i = 0; i < 2; i++) {
        rf__launches_bind_workspace(launches, of_workspace[i]);
        if (on_device)
            rf__launches_bind_workspace(launches, of_mapping[i]);
        else
            rf__launches_bind_upload(launches, RF__FUSED_UPLOAD_PARTITION, of_mapping[i]);
    }
    if (on_device) rf__launches_bind_workspace(launches, offsetof(rf_fused_args, n_tasks));
    rf__launches_bind_errors(launches, offsetof(rf_fused_args, errors));
    return RF_OK;
}

/* Comes first, and lets the kernel of the other tables begin at once: see staged/staged.cu. */
static rf_status staged_lower(const rf__fused_problem *problem, rf_fused_args args, rf__launches *launches) {
    rf__fused_variant variant = variant_of(problem);
    rf__kernel_launch launch = {.grid = {(uint32_t)problem->staged.lists}, .overlap = RF__OVERLAP_NEVER};
    rf__fused_staged_kernel_choose(&variant, &launch);
    rf__fused_traffic_add(problem->traffic, problem->params, problem->staged_share, &launch);
    args.limit = problem->staged.depth;
    args.tasks = (uint64_t)(rf__fused_rows(&problem->mapping) + 1) * sizeof(rf__fused_mapping);
    return add(problem, &launch, &variant, &args, launches);
}

static rf_status pool_lower(const rf__gpu *gpu, const rf__fused_problem *problem, const rf_fused_args *args,
                            int32_t n_tasks, rf__launches *launches) {
    const bool with_staged = problem->staged.depth > 0;
    rf__fused_variant variant = variant_of(problem);
    /* No overlap if the cycles of its blocks are counted, because they would include the wait. */
    rf__kernel_launch launch = {.grid = {(uint32_t)n_tasks},
                                .overlap = problem->cycles == 0 || with_staged ? RF__OVERLAP_ALWAYS
                                                                               : RF__OVERLAP_NEVER};
    variant.with_staged = with_staged;
    rf__fused_kernel_choose(gpu, problem->warps, &variant, &launch);
    rf__fused_traffic_add(problem->traffic, problem->params, 1 - problem->staged_share, &launch);
    return add(problem, &launch, &variant, args, launches);
}

void rf__fused_owner_set(const rf_fused_embedding_bag_params *params, rf__launches *launches) {
    launches->owner = params->n_buffers > 0 ? params->buffers[0].data : NULL;
    launches->shape = (uint64_t)params->n_features << 32 | (uint64_t)params->output_dim;
    launches->checks = params->check_bounds;
}

rf_status rf__fused_lower(const rf__gpu *gpu, const rf__fused_problem *problem, rf__launches *launches) {
    rf_fused_args args = args_of(problem);
    int32_t n_tasks = problem->mapping.n_tasks; /* 0 if all tables are staged */
    rf__fused_owner_set(problem->params, launches);
    if (problem->map_table != NULL)
        RF_CHECK(device_map_lower(gpu, problem, &args, launches, &n_tasks));
    else
        RF_CHECK(mapping_lower(&problem->mapping, &args, launches));
    if (problem->staged.depth > 0) RF_CHECK(staged_lower(problem, args, launches));
    return n_tasks > 0 ? pool_lower(gpu, problem, &args, n_tasks, launches) : RF_OK;
}

rf_status rf__fused_lower_any(const rf__gpu *gpu, const rf__fused_problem *problem, rf__launches *launches) {
    rf__fused_problem any = *problem;
    any.mapping = (rf__fused_mapping){.n_tasks = 1};
    RF_CHECK(rf__fused_lower(gpu, &any, launches));
    any.staged = (rf__fused_staged){.depth = 1, .lists = 1};
    const bool may_stage = problem->classes->has_staged && problem->cycles == 0 &&
                           rf__fused_can_stage(gpu, problem->params->lookups);
    return may_stage ? rf__fused_lower(gpu, &any, launches) : RF_OK;
}
