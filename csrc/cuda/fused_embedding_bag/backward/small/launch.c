/* The launches of small features' kernels. */
#include <stdio.h>
#include <string.h>

#include "cuda/fused_embedding_bag/backward/small/small.h"

enum { LISTS, ROWS };
static const rf__kernel_source sources[] = {
    {"fused_embedding_bag/backward/small/lists.cu", "rf_small_lists"},
    {"fused_embedding_bag/backward/small/staged.cu", "rf_small_rows"},
};
typedef struct small_variant {
    int32_t kernel; /* which of them */
    int32_t index_type, offset_type;
    int32_t staged, emit, grad_dtype, weight_dtype, round;
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
                 "-DRF_STAGED=%d -DRF_EMIT=%d -DRF_GRAD_DTYPE=%d -DRF_WEIGHT_DTYPE=%d -DRF_ROUND=%d",
                 (int)variant->staged, (int)variant->emit, (int)variant->grad_dtype,
                 (int)variant->weight_dtype, (int)variant->round);
    }
    return RF_OK;
}

static rf_status launch(const rf__backward_small_call *call, const small_variant *variant,
                        rf__launch_config *config, const void *args) {
    const rf__kernel *kernel = NULL;
    RF_CHECK(
        rf__jit_kernel(call->device, &sources[variant->kernel], variant, sizeof *variant, describe, &kernel));
    config->function = kernel->function;
    return rf__launch(call->device, config, args);
}

static rf_small_args rows_args(const rf__backward_small_call *call, const rf_small_lists_args *lists) {
    rf_small_args args = {.grad = (uintptr_t)call->grad,
                          .list = lists->list,
                          .starts = lists->starts,
                          .factors = lists->factors,
                          .output_dim = call->output_dim,
                          .bags = (int32_t)call->bags,
                          .by_frequency = call->by_frequency,
                          .emit = call->emit_args};
    memcpy(args.matrices, call->matrices, (size_t)call->n_matrices * sizeof *call->matrices);
    return args;
}

/* What specialises staged.cu. */
static small_variant rows_variant(const rf__backward_small_call *call, int32_t staged) {
    return (small_variant){.kernel = ROWS,
                           .staged = staged,
                           .emit = call->emit,
                           .grad_dtype = call->grad_dtype,
                           .weight_dtype = call->weight_dtype,
                           .round = call->round};
}

static rf_status rows_launch(const rf__backward_small_call *call, const rf__backward_small_plan *plan,
                             const rf_small_lists_args *lists, uint64_t tasks, rf__launch_config *config) {
    rf_small_args args = rows_args(call, lists);
    for (int32_t staged = 1; staged >= 0; staged--) {
        const int32_t count = staged ? plan->n_staged : plan->n_gathered;
        small_variant variant = rows_variant(call, staged);
        variant.dynamic_shared = staged ? plan->most_staged_shared : 0;
        args.tasks = tasks + (staged ? 0 : (uint64_t)plan->n_staged * sizeof(rf_small_task));
        config->grid[0] = (uint32_t)count;
        config->block[0] = (uint32_t)RF_SMALL_THREADS(staged, call->emit);
        config->shared_bytes = staged ? (uint32_t)plan->staged_shared : 0;
        if (count > 0) RF_CHECK(launch(call, &variant, config, &args));
    }
    return RF_OK;
}

rf_status rf__backward_small_launch(const rf__backward_small_call *call, const rf__backward_small_plan *plan,
                                    uint64_t description, uint64_t workspace, void *stream) {
    if (plan->n_features == 0) return RF_OK;
    const rf_small_lists_args lists = {.indices = (uintptr_t)call->indices,
                                       .offsets = (uintptr_t)call->offsets,
                                       .tasks = description,
                                       .list = workspace + (uint64_t)plan->list_at,
                                       .starts = workspace,
                                       .factors = plan->any_mean ? workspace + (uint64_t)plan->factors_at : 0,
                                       .lookups = call->lookups,
                                       .bags = (int32_t)call->bags,
                                       .shared_bytes = plan->lists_shared};
    const small_variant variant = {.kernel = LISTS,
                                   .index_type = call->index_type,
                                   .offset_type = call->offset_type,
                                   .dynamic_shared = plan->lists_shared};
    rf__launch_config config = {.grid = {(uint32_t)plan->n_lists},
                                .block = {RF_SMALL_LISTS_BLOCK},
                                .shared_bytes = (uint32_t)plan->lists_shared,
                                .programmatic = true,
                                .stream = stream};
    RF_CHECK(launch(call, &variant, &config, &lists));
    return rows_launch(call, plan, &lists, description + (uint64_t)plan->tasks_at, &config);
}

rf_status rf__backward_small_compile(const rf__backward_small_call *call, const char *arch) {
    const small_variant lists = {
        .kernel = LISTS, .index_type = call->index_type, .offset_type = call->offset_type};
    const small_variant rows[] = {rows_variant(call, 0), rows_variant(call, 1)};
    RF_CHECK(rf__jit_compile_each(&sources[LISTS], &lists, sizeof lists, 1, describe, arch));
    return rf__jit_compile_each(&sources[ROWS], rows, sizeof rows[0], 2, describe, arch);
}
