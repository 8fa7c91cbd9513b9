/* Kernels of training compiled ahead: batches of all sizes that decide variants, lowered for the GPU of an architecture. */
#include <stdlib.h>
#include <string.h>

#include "core/validate.h"
#include "families/fused_backward/lowering.h"

enum { ALIGNED = 256 /* an address of which the alignment alone is read */ };
static const char operator_name[] = "fused_embedding_bag_training_compile";

/* Kernels that are compiled: many batches take the same. */
typedef struct compiled_kernels {
    const rf__gpu *gpu;
    struct compiled_kernel {
        const rf__kernel_source *source;
        uint32_t key_bytes;
        unsigned char key[128];
    } *kernels; /* [capacity] */
    int32_t count, capacity;
} compiled_kernels;

static bool is_compiled(const compiled_kernels *all, const rf__kernel_launch *launch, const void *key) {
    for (int32_t i = 0; i < all->count; i++)
        if (all->kernels[i].source == launch->source && all->kernels[i].key_bytes == launch->key_bytes &&
            memcmp(all->kernels[i].key, key, launch->key_bytes) == 0)
            return true;
    return false;
}

/* Leaves of launches those whose kernels are not compiled yet, and notes them. */
static rf_status new_kernels_keep(compiled_kernels *all, rf__launches *launches) {
    int32_t kept = 0;
    for (int32_t i = 0; i < launches->count; i++) {
        const rf__kernel_launch launch = launches->launches[i];
        const void *key = rf__launches_key(launches, i);
        if (launch.source == NULL || is_compiled(all, &launch, key)) continue;
        launches->launches[kept++] = launch;
        if (all->count == all->capacity) {
            const int32_t capacity = 2 * all->capacity + 64;
            struct compiled_kernel *grown = realloc(all->kernels, (size_t)capacity * sizeof *grown);
            RF_FAIL_IF(grown == NULL, RF_ERR_MEMORY, "no memory for %d kernels", (int)capacity);
            all->kernels = grown;
            all->capacity = capacity;
        }
        struct compiled_kernel *added = &all->kernels[all->count++];
        *added = (struct compiled_kernel){.source = launch.source, .key_bytes = launch.key_bytes};
        memcpy(added->key, key, launch.key_bytes);
    }
    launches->count = kept;
    return RF_OK;
}

static rf_status launches_compile(compiled_kernels *all, rf__launches *launches) {
    RF_CHECK(new_kernels_keep(all, launches));
    return rf__launches_compile(launches, all->gpu->arch, NULL);
}

/* All launches of a batch. */
static rf_status batch_lower(const rf__gpu *gpu, const rf__backward_problem *problem,
                             rf__launches *launches) {
    rf_status status = RF_OK;
    rf__description description = {0};
    int64_t counts_at = 0;
    RF_TRY(rf__backward_description_make(gpu, problem, &description));
    RF_TRY(rf__backward_lower(gpu, description.data, problem, launches, &counts_at));
    if (counts_at != 0) RF_TRY(rf__backward_listed_lower(gpu, description.data, problem, launches));
out:
    free(description.data);
    free((void *)(uintptr_t)description.upload);
    return status;
}

/* All kernels that a problem takes, whatever the sizes of batches: with few bags and with many, of which none or all are too
 * many for the small path; with few lookups, and with many. */
static rf_status problem_compile(compiled_kernels *all, rf__backward_problem *problem) {
    static const int64_t bags[] = {1, RF_SMALL_MOST_BAGS, RF_SMALL_MOST_BAGS + 1};
    static const int64_t lookups[] = {1, 1 << 20};
    for (int32_t i = 0; i < 6; i++) {
        rf__launches launches;
        problem->call.bags = bags[i / 2];
        problem->call.lookups = lookups[i % 2];
        rf__launches_init(&launches, operator_name);
        rf_status status = batch_lower(all->gpu, problem, &launches);
        if (status == RF_OK)
            status = launches_compile(all, &launches);
        else if (status == RF_ERR_UNSUPPORTED)
            status = RF_OK; /* as the call itself will say */
        rf__launches_free(&launches);
        RF_CHECK(status);
    }
    return RF_OK;
}

/* Updates of rows whose sums are given: in the weight's dtype, or in float32 where several calls were summed. */
static rf_status rows_updates_compile(compiled_kernels *all, const rf__backward_problem *problem) {
    rf_status status = RF_OK;
    rf__launches launches;
    rf__launches_init(&launches, operator_name);
    for (int32_t i = 0; i < problem->n_matrices; i++) {
        const rf_backward_matrix *matrix = &problem->matrices[i];
        rf_rows_update_params params = {
            .sums = (const void *)(uintptr_t)ALIGNED,
            .count = 1,
            .matrix = {.weight = (void *)(uintptr_t)matrix->weight,
                       .states = {(float *)(uintptr_t)ALIGNED, (float *)(uintptr_t)ALIGNED},
                       .rows = matrix->rows,
                       .dim = matrix->dim,
                       .dtype = problem->dtype},
            .update = {.optimizer = (rf_optimizer)(problem->emit - 1),
                       .stochastic_rounding = problem->stochastic_rounding}};
        const rf_dtype dtypes[] = {RF_FLOAT32, problem->dtype};
        for (int32_t d = 0; d < 2; d++) {
            params.sums_dtype = dtypes[d];
            RF_TRY(rf__rows_update_lower(&params, &launches));
        }
    }
    RF_TRY(launches_compile(all, &launches));
out:
    rf__launches_free(&launches);
    return status;
}

/* The matrices of one dtype from buffer *next on, as many as one launch takes. */
static void matrices_take(const rf_fused_embedding_bag_params *params, int64_t *next,
                          rf__backward_problem *problem) {
    for (; *next < params->n_buffers && problem->n_matrices < RF_BACKWARD_MOST_MATRICES; ++*next) {
        int64_t f = 0;
        while (f < params->n_features && params->features[f].buffer != *next) f++;
        if (f == params->n_features || params->features[f].dim == 0 ||
            params->buffers[*next].dtype != problem->dtype)
            continue;
        const int64_t dim = params->features[f].dim;
        rf__backward_matrix_add(problem, *next,
                                (rf_backward_matrix){.weight = ALIGNED,
                                                     .states = {ALIGNED, ALIGNED},
                                                     .rows = params->buffers[*next].numel / dim,
                                                     .dim = (int32_t)dim});
    }
}

/* Gradients of each matrix by itself, listed and dense. */
static rf_status gradients_compile(compiled_kernels *all, const rf__backward_problem *problem) {
    for (int32_t i = 0; i < problem->n_matrices; i++) {
        rf__backward_problem one = *problem;
        one.n_matrices = 0;
        rf__backward_matrix_add(&one, problem->buffers[i], problem->matrices[i]);
        RF_CHECK(problem_compile(all, &one));
        one.listed = NULL;
        RF_CHECK(problem_compile(all, &one));
    }
    return RF_OK;
}

/* Problems of one dtype. */
static rf_status dtype_compile(compiled_kernels *all, const rf_fused_embedding_bag_params *params,
                               rf_dtype dtype, int32_t emit, bool stochastic_rounding) {
    static const rf_sparse_output *const listed[RF_BACKWARD_MOST_MATRICES];
    const bool gradients = emit == RF_EMIT_GRADIENT;
    for (int64_t next = 0; next < params->n_buffers;) {
        rf__backward_problem problem = {.call = {.features = params->features,
                                                 .n_features = params->n_features,
                                                 .index_type = params->index_type,
                                                 .offset_type = params->offset_type,
                                                 .sample_weights = params->sample_weights,
                                                 .grad = (const void *)(uintptr_t)ALIGNED,
                                                 .output_dim = params->output_dim,
                                                 .grad_dtype = params->output_dtype},
                                        .dtype = dtype,
                                        .emit = emit,
                                        .stochastic_rounding = stochastic_rounding,
                                        .listed = gradients ? listed : NULL};
        matrices_take(params, &next, &problem);
        if (problem.n_matrices == 0) continue;
        RF_CHECK(problem_compile(all, &problem));
        RF_CHECK(gradients ? gradients_compile(all, &problem) : rows_updates_compile(all, &problem));
    }
    return RF_OK;
}

rf_status rf__backward_compile(const char *arch, const rf_fused_embedding_bag_params *params, int32_t emit,
                               bool stochastic_rounding) {
    rf_status status = RF_OK;
    rf__gpu gpu;
    compiled_kernels all = {.gpu = &gpu};
    RF_CHECK(rf__gpu_of_arch(arch, &gpu));
    for (int32_t dtype = RF_FLOAT32; dtype <= RF_BFLOAT16; dtype++)
        RF_TRY(dtype_compile(&all, params, (rf_dtype)dtype, emit, stochastic_rounding));
    RF_TRY(rf__bags_compile(&gpu, params));
out:
    free(all.kernels);
    return status;
}
