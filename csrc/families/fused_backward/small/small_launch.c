/* Launches of small features' kernels. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "families/fused_backward/small/small.h"

enum { LISTS, ROWS };
static const rf__kernel_source sources[] = {
    {"families/fused_backward/small/lists.cu", "rf_small_lists"},
    {"families/fused_backward/small/small_rows.cu", "rf_small_rows"},
};
typedef struct small_variant {
    int32_t kernel; /* number of its source */
    int32_t index_type, offset_type;
    int32_t staged, epilogue, grad_dtype, weight_dtype, round;
    int32_t dynamic_shared;
} small_variant;

static rf_status describe(const void *key, rf__kernel_options *options) {
    const small_variant *variant = key;
    options->dynamic_shared = variant->dynamic_shared;
    if (variant->kernel == LISTS) {
        snprintf(options->defines, sizeof options->defines, "-DRF_INDEX=%s -DRF_OFFSET=%s",
                 rf__kernel_integer(variant->index_type), rf__kernel_integer(variant->offset_type));
    } else {
        snprintf(options->defines, sizeof options->defines,
                 "-DRF_STAGED=%d -DRF_EPILOGUE=%d -DRF_GRAD_DTYPE=%d -DRF_WEIGHT_DTYPE=%d -DRF_ROUND=%d",
                 (int)variant->staged, (int)variant->epilogue, (int)variant->grad_dtype,
                 (int)variant->weight_dtype, (int)variant->round);
    }
    return RF_OK;
}

static rf_small_args rows_args(const rf__backward_problem *problem, const rf_small_lists_args *lists) {
    const rf_fused_backward_params *call = &problem->call;
    rf_small_args args = {.grad = (uintptr_t)call->grad,
                          .list = lists->list,
                          .starts = lists->starts,
                          .factors = lists->factors,
                          .output_dim = call->output_dim,
                          .bags = (int32_t)call->bags,
                          .by_frequency = call->scale_grad_by_freq,
                          .epilogue = problem->epilogue_args};
    memcpy(args.matrices, problem->matrices, (size_t)problem->n_matrices * sizeof *problem->matrices);
    return args;
}

static rf_status rows_lower(const rf__backward_problem *problem, const rf__backward_small_plan *plan,
                            const rf_small_lists_args *lists, bool staged, uint64_t tasks,
                            rf__launches *launches) {
    const int32_t count = staged ? plan->n_staged : plan->n_gathered;
    const double fraction = count / (double)(plan->n_staged + plan->n_gathered); /* approximate traffic */
    const rf__backward_traffic *total = &plan->traffic;
    const rf__backward_traffic traffic = {.columns = total->columns * fraction,
                                          .lookup_elements = total->lookup_elements * fraction,
                                          .rows = total->rows * fraction,
                                          .row_elements = total->row_elements * fraction};
    const small_variant variant = {.kernel = ROWS,
                                   .staged = staged,
                                   .epilogue = problem->epilogue,
                                   .grad_dtype = (int32_t)problem->call.grad_dtype,
                                   .weight_dtype = (int32_t)problem->dtype,
                                   .round = rf__backward_rounds(problem),
                                   .dynamic_shared = staged ? plan->most_staged_shared : 0};
    rf__kernel_launch launch = {.source = &sources[ROWS],
                                .describe = describe,
                                .grid = {(uint32_t)count},
                                .block = {(uint32_t)RF_SMALL_THREADS(staged, problem->epilogue)},
                                .shared_bytes = staged ? (uint32_t)plan->staged_shared : 0,
                                .overlap = RF__OVERLAP_ALWAYS,
                                .read_bytes = (int64_t)(total->lookups * fraction) * (int64_t)sizeof(rf_u16)};
    rf_small_args args = rows_args(problem, lists);
    if (count == 0) return RF_OK;
    args.tasks = tasks + (staged ? 0 : (uint64_t)plan->n_staged * sizeof(rf_small_task));
    rf__backward_traffic_add(problem, &traffic, &launch);
    RF_CHECK(rf__launches_add(launches, &launch, &variant, sizeof variant, &args, sizeof args));
    rf__launches_bind_upload(launches, 0, offsetof(rf_small_args, tasks));
    rf__launches_bind_workspace(launches, offsetof(rf_small_args, list));
    rf__launches_bind_workspace(launches, offsetof(rf_small_args, starts));
    if (args.factors != 0) rf__launches_bind_workspace(launches, offsetof(rf_small_args, factors));
    return RF_OK;
}

rf_status rf__backward_small_lower(const rf__backward_problem *problem, const rf__backward_small_plan *plan,
                                   int64_t upload_at, int64_t workspace_at, rf__launches *launches) {
    const rf_fused_backward_params *call = &problem->call;
    const uint64_t tasks = (uint64_t)(upload_at + plan->tasks_at);
    if (plan->n_features == 0) return RF_OK;
    const rf_small_lists_args lists = {.indices = (uintptr_t)call->indices,
                                       .offsets = (uintptr_t)call->offsets,
                                       .tasks = (uint64_t)upload_at,
                                       .list = (uint64_t)(workspace_at + plan->list_at),
                                       .starts = (uint64_t)workspace_at,
                                       .factors =
                                           plan->any_mean ? (uint64_t)(workspace_at + plan->factors_at) : 0,
                                       .lookups = call->lookups,
                                       .bags = (int32_t)call->bags,
                                       .shared_bytes = plan->lists_shared};
    const small_variant variant = {.kernel = LISTS,
                                   .index_type = (int32_t)call->index_type,
                                   .offset_type = (int32_t)call->offset_type,
                                   .dynamic_shared = plan->lists_shared};
    const rf__kernel_launch launch = {
        .source = &sources[LISTS],
        .describe = describe,
        .grid = {(uint32_t)plan->n_lists},
        .block = {RF_SMALL_LISTS_BLOCK},
        .shared_bytes = (uint32_t)plan->lists_shared,
        .overlap = RF__OVERLAP_ALWAYS,
        .read_bytes = (int64_t)plan->traffic.lookups * (call->index_type == RF_INT64 ? 8 : 4) +
                      (plan->n_features * call->bags + 1) * (call->offset_type == RF_INT64 ? 8 : 4),
        .written_bytes = plan->list_at + (int64_t)plan->traffic.lookups * (int64_t)sizeof(rf_u16)};
    RF_CHECK(rf__launches_add(launches, &launch, &variant, sizeof variant, &lists, sizeof lists));
    rf__launches_bind_upload(launches, 0, offsetof(rf_small_lists_args, tasks));
    rf__launches_bind_workspace(launches, offsetof(rf_small_lists_args, list));
    rf__launches_bind_workspace(launches, offsetof(rf_small_lists_args, starts));
    if (plan->any_mean) rf__launches_bind_workspace(launches, offsetof(rf_small_lists_args, factors));
    RF_CHECK(rows_lower(problem, plan, &lists, true, tasks, launches));
    return rows_lower(problem, plan, &lists, false, tasks, launches);
}
