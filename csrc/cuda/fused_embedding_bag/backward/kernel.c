/* Variants of the backward's kernels. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/fused_embedding_bag/backward/call.h"
#include "cuda/fused_embedding_bag/backward/general.h"

#define FOLDER "fused_embedding_bag/backward/"
static const rf__kernel_source sources[RF__BACKWARD_KERNELS] = {
    [RF__BACKWARD_BAG_FACTORS] = {FOLDER "keys.cu", "rf_backward_bag_factors"},
    [RF__BACKWARD_KEYS] = {FOLDER "keys.cu", "rf_backward_keys"},
    [RF__BACKWARD_COUNT] = {FOLDER "sort/sort.cu", "rf_backward_count"},
    [RF__BACKWARD_PLACES] = {FOLDER "sort/sort.cu", "rf_backward_places"},
    [RF__BACKWARD_SORT] = {FOLDER "sort/sort.cu", "rf_backward_sort"},
    [RF__BACKWARD_GROUP] = {FOLDER "sort/group.cu", "rf_backward_group"},
    [RF__BACKWARD_COUNT_ROWS] = {FOLDER "unique.cu", "rf_backward_count_rows"},
    [RF__BACKWARD_SUM_ROWS] = {FOLDER "unique.cu", "rf_backward_sum_rows"},
    [RF__BACKWARD_SPLIT_ROWS] = {FOLDER "unique.cu", "rf_backward_split_rows"},
    [RF__BACKWARD_ROWS] = {FOLDER "rows.cu", "rf_backward_rows"},
    [RF__BACKWARD_JOINS] = {FOLDER "joins.cu", "rf_backward_joins"},
    [RF__BACKWARD_LISTED] = {FOLDER "listed.cu", "rf_backward_listed"},
};

static rf_status describe(const void *key, rf__kernel_options *options) {
    const rf__backward_variant *variant = key;
    const char *const words[] = {"rf_u32", "rf_u64"};
    options->dynamic_shared = variant->dynamic_shared;
    snprintf(options->defines, sizeof options->defines,
             "-DRF_INDEX=%s -DRF_OFFSET=%s -DRF_KEY=%s -DRF_VALUE=%s -DRF_DIGIT_BITS=%d -DRF_ITEMS=%d "
             "-DRF_ENTRIES=%d -DRF_GROUPED=%d "
             "-DRF_GRAD_DTYPE=%d -DRF_WEIGHT_DTYPE=%d -DRF_EMIT=%d -DRF_ROUND=%d -DRF_ALIGNED=%d",
             rf__kernel_integer(variant->index_type), rf__kernel_integer(variant->offset_type),
             words[variant->wide_keys], words[variant->wide_values], (int)variant->digit_bits,
             (int)variant->items, (int)variant->entries, (int)variant->grouped, (int)variant->grad_dtype,
             (int)variant->weight_dtype, (int)variant->emit, (int)variant->round, (int)variant->aligned);
    const size_t length = strlen(options->defines);
    if (variant->vectors > 0)
        snprintf(options->defines + length, sizeof options->defines - length, " -DRF_VECTORS=%d",
                 (int)variant->vectors);
    return RF_OK;
}

/* Leaves out what the kernel's code does not depend on, so that fewer are compiled. */
static rf__backward_variant only_what_matters(const rf__backward_variant *from, rf__backward_kernel number) {
    rf__backward_variant to = *from;
    const bool reads_lookups = number <= RF__BACKWARD_KEYS, pools = number >= RF__BACKWARD_ROWS;
    const bool sorts = number >= RF__BACKWARD_COUNT && number <= RF__BACKWARD_SORT;
    to.kernel = number;
    if (!reads_lookups) to.index_type = to.offset_type = 0;
    if (!sorts) to.digit_bits = RF_BACKWARD_MOST_DIGIT_BITS;
    if (!sorts && number != RF__BACKWARD_KEYS) to.items = RF_BACKWARD_MOST_ITEMS;
    if (number != RF__BACKWARD_KEYS && number != RF__BACKWARD_ROWS) to.entries = 0;
    if (number != RF__BACKWARD_KEYS && !sorts) to.grouped = number == RF__BACKWARD_GROUP;
    if (!pools) to.grad_dtype = to.weight_dtype = to.emit = to.round = to.aligned = to.vectors = 0;
    if (number != RF__BACKWARD_SORT && number != RF__BACKWARD_ROWS) to.dynamic_shared = 0;
    if (number == RF__BACKWARD_JOINS) to.grad_dtype = 0;
    if (number == RF__BACKWARD_LISTED) to.wide_keys = to.wide_values = to.vectors = 0;
    return to;
}

rf_status rf__backward_kernel_get(const rf__cuda_device *device, const rf__backward_variant *variant,
                                  rf__backward_kernel number, const rf__kernel **kernel) {
    const rf__backward_variant key = only_what_matters(variant, number);
    return rf__jit_kernel(device, &sources[number], &key, sizeof key, describe, kernel);
}

/* ---- ahead of time */

enum { ALIGNED = 256 }; /* an address that nobody looks behind */

static rf_status compile(const char *arch, const rf__backward_variant *variant, rf__backward_kernel number) {
    const rf__backward_variant key = only_what_matters(variant, number);
    return rf__jit_compile_each(&sources[number], &key, sizeof key, 1, describe, arch);
}

/* What depends on which features take the general path: all, or those that the small one leaves. */
typedef struct general_kind {
    int32_t entries, digit_bits, grouped;
} general_kind;

static general_kind kind_of(const rf__backward_features *described) {
    return (general_kind){described->entries, described->digit_bits, described->groups.count > 0};
}

/* One kernel of the general path, for batches with many lookups and with few. */
static rf_status sized_compile(const char *arch, rf__backward_variant variant, rf__backward_kernel number) {
    variant.items = RF_BACKWARD_MOST_ITEMS;
    RF_CHECK(compile(arch, &variant, number));
    if (number < RF__BACKWARD_KEYS || number > RF__BACKWARD_SORT) return RF_OK;
    variant.items = RF_BACKWARD_FEW_ITEMS;
    return compile(arch, &variant, number);
}

static rf_status general_compile(const char *arch, const rf__backward_problem *problem,
                                 rf__backward_variant variant, bool any_mean, const general_kind kinds[2]) {
    for (int32_t number = 0; number < RF__BACKWARD_LISTED; number++) {
        const bool lists = number >= RF__BACKWARD_COUNT_ROWS && number <= RF__BACKWARD_SPLIT_ROWS;
        if ((lists && problem->listed == NULL) || (number == RF__BACKWARD_BAG_FACTORS && !any_mean)) continue;
        for (int32_t i = 0; i < 1 + (memcmp(&kinds[0], &kinds[1], sizeof *kinds) != 0); i++) {
            variant.entries = kinds[i].entries;
            for (variant.grouped = 0; variant.grouped <= kinds[i].grouped; variant.grouped++) {
                variant.digit_bits = variant.grouped ? RF_BACKWARD_MOST_DIGIT_BITS : kinds[i].digit_bits;
                if (number == RF__BACKWARD_GROUP && !variant.grouped) continue;
                RF_CHECK(sized_compile(arch, variant, (rf__backward_kernel)number));
            }
        }
    }
    return RF_OK;
}

/* All kernels that a problem may take, whatever the sizes of batches. */
static rf_status problem_compile(const char *arch, rf__backward_problem *problem) {
    static const char operator_name[] = "fused_embedding_bag_backward";
    /* With as much shared memory as any has: what needs it is compiled, too. */
    const rf__cuda_device typical = {.gpu = {.sms = 132,
                                             .shared_per_sm = 228 << 10,
                                             .shared_per_block_optin = 227 << 10,
                                             .reserved_shared_per_block = 1 << 10}};
    const rf__backward_small_call small = rf__backward_small_call_of(problem, &typical);
    rf_status status = RF_OK;
    rf__backward_features described;
    rf__backward_small_plan plan = {0};
    rf__backward_layout sizes;
    general_kind kinds[2];
    rf__backward_place_matrices(problem);
    RF_TRY(rf__backward_describe(problem, &described));
    if (described.count == 0) goto out;
    const bool any_mean = described.any_mean;
    kinds[0] = kinds[1] = kind_of(&described);
    status = rf__backward_layout_of(operator_name, problem, &described, &typical, ALIGNED, &sizes);
    if (status == RF_ERR_UNSUPPORTED)
        status = RF_OK; /* as the call itself will say */
    else if (status == RF_OK) {
        if (problem->listed == NULL) {
            RF_TRY(rf__backward_small_take(&small, described.features, &plan));
            rf__backward_summarise(problem, &described);
            if (described.count > 0) kinds[1] = kind_of(&described);
        }
        if (plan.n_features > 0) RF_TRY(rf__backward_small_compile(&small, arch));
        RF_TRY(general_compile(arch, problem, sizes.variant, any_mean, kinds));
    }
out:
    rf__backward_small_free(&plan);
    free(described.features);
    return status;
}

/* Updates of rows whose sums are given: in the weight's dtype, or in float32 where several calls were summed. */
static rf_status listed_compile(const char *arch, const rf__backward_problem *problem) {
    for (int32_t i = 0; i < problem->n_matrices; i++) {
        rf__backward_variant variant = {
            .weight_dtype = (int32_t)problem->dtype,
            .emit = problem->emit,
            .round = problem->stochastic_rounding && problem->dtype != RF_FLOAT32,
            .aligned = rf__backward_aligned(&problem->matrices[i], problem->dtype, problem->emit - 1)};
        for (int32_t half = 0; half < 1 + (problem->dtype != RF_FLOAT32); half++) {
            variant.grad_dtype = half ? variant.weight_dtype : RF_FLOAT32;
            RF_CHECK(compile(arch, &variant, RF__BACKWARD_LISTED));
        }
    }
    return RF_OK;
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
        problem->buffers[problem->n_matrices] = *next;
        problem->matrices[problem->n_matrices++] =
            (rf_backward_matrix){.weight = ALIGNED,
                                 .states = {ALIGNED, ALIGNED},
                                 .rows = params->buffers[*next].numel / dim,
                                 .dim = (int32_t)dim};
    }
}

rf_status rf__backward_compile(const char *arch, const rf_fused_embedding_bag_params *params, int32_t emit,
                               bool stochastic_rounding) {
    static const rf_sparse_output *const listed[RF_BACKWARD_MOST_MATRICES];
    for (int32_t dtype = RF_FLOAT32; dtype <= RF_BFLOAT16; dtype++) {
        for (int64_t next = 0; next < params->n_buffers;) {
            rf__backward_problem problem = {.call = {.features = params->features,
                                                     .n_features = params->n_features,
                                                     .lookups = 1,
                                                     .bags = 1,
                                                     .index_type = params->index_type,
                                                     .offset_type = params->offset_type,
                                                     .sample_weights = params->sample_weights,
                                                     .grad = (const void *)(uintptr_t)ALIGNED,
                                                     .output_dim = params->output_dim,
                                                     .grad_dtype = params->output_dtype},
                                            .dtype = (rf_dtype)dtype,
                                            .emit = emit,
                                            .stochastic_rounding = stochastic_rounding,
                                            .listed = emit == RF_EMIT_GRADIENT ? listed : NULL};
            matrices_take(params, &next, &problem);
            if (problem.n_matrices == 0) continue;
            if (emit != RF_EMIT_GRADIENT) RF_CHECK(listed_compile(arch, &problem));
            RF_CHECK(problem_compile(arch, &problem));
            for (int32_t i = 0; emit == RF_EMIT_GRADIENT && i < problem.n_matrices; i++) { /* one by one */
                rf__backward_problem one = problem;
                one.matrices[0] = problem.matrices[i];
                one.buffers[0] = problem.buffers[i];
                one.n_matrices = 1;
                RF_CHECK(problem_compile(arch, &one));
                one.listed = NULL;
                RF_CHECK(problem_compile(arch, &one));
            }
        }
    }
    return rf__bags_compile(arch, params);
}
