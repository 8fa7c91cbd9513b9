/* Variants of the backward's kernels. */
#include <stdio.h>
#include <string.h>

#include "cuda/fused_embedding_bag/backward/backward.h"
#include "cuda/fused_embedding_bag/backward/small/small.h"

#define FOLDER "fused_embedding_bag/backward/"
static const rf__kernel_source sources[RF__BACKWARD_KERNELS] = {
    [RF__BACKWARD_SHIFTS] = {FOLDER "shifts.cu", "rf_backward_shifts"},
    [RF__BACKWARD_BAG_FACTORS] = {FOLDER "keys.cu", "rf_backward_bag_factors"},
    [RF__BACKWARD_KEYS] = {FOLDER "keys.cu", "rf_backward_keys"},
    [RF__BACKWARD_COUNT] = {FOLDER "sort.cu", "rf_backward_count"},
    [RF__BACKWARD_PLACES] = {FOLDER "sort.cu", "rf_backward_places"},
    [RF__BACKWARD_SORT] = {FOLDER "sort.cu", "rf_backward_sort"},
    [RF__BACKWARD_COUNT_ROWS] = {FOLDER "unique.cu", "rf_backward_count_rows"},
    [RF__BACKWARD_SUM_ROWS] = {FOLDER "unique.cu", "rf_backward_sum_rows"},
    [RF__BACKWARD_ROWS] = {FOLDER "rows.cu", "rf_backward_rows"},
    [RF__BACKWARD_JOINS] = {FOLDER "joins.cu", "rf_backward_joins"},
    [RF__BACKWARD_LISTED] = {FOLDER "listed.cu", "rf_backward_listed"},
};

static rf_status describe(const void *key, rf__kernel_options *options) {
    const rf__backward_variant *variant = key;
    const char *const words[] = {"rf_u32", "rf_u64"};
    options->dynamic_shared = variant->dynamic_shared;
    snprintf(options->defines, sizeof options->defines,
             "-DRF_INDEX=%s -DRF_OFFSET=%s -DRF_KEY=%s -DRF_VALUE=%s -DRF_DIGIT_BITS=%d -DRF_ENTRIES=%d "
             "-DRF_GRAD_DTYPE=%d -DRF_WEIGHT_DTYPE=%d -DRF_EMIT=%d -DRF_ROUND=%d -DRF_ALIGNED=%d",
             rf__kernel_integer(variant->index_type), rf__kernel_integer(variant->offset_type),
             words[variant->wide_keys], words[variant->wide_values], (int)variant->digit_bits,
             (int)variant->entries, (int)variant->grad_dtype, (int)variant->weight_dtype, (int)variant->emit,
             (int)variant->round, (int)variant->aligned);
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
    if (number != RF__BACKWARD_KEYS && number != RF__BACKWARD_ROWS) to.entries = 0;
    if (!pools) to.grad_dtype = to.weight_dtype = to.emit = to.round = to.aligned = to.vectors = 0;
    if (number != RF__BACKWARD_SORT && number != RF__BACKWARD_ROWS) to.dynamic_shared = 0;
    if (number == RF__BACKWARD_COUNT || number == RF__BACKWARD_PLACES) to.wide_values = 0;
    if (number == RF__BACKWARD_JOINS) to.grad_dtype = 0;
    if (number == RF__BACKWARD_LISTED) to.wide_keys = to.wide_values = to.vectors = 0;
    return to;
}

rf_status rf__backward_kernel_get(const rf__cuda_device *device, const rf__backward_variant *variant,
                                  rf__backward_kernel number, const rf__kernel **kernel) {
    const rf__backward_variant key = only_what_matters(variant, number);
    return rf__jit_kernel(device, &sources[number], &key, sizeof key, describe, kernel);
}

rf_status rf__backward_compile(const char *arch) {
    rf__backward_variant common = {
        .index_type = RF_INT64, .offset_type = RF_INT64, .digit_bits = 9, .aligned = 1, .vectors = 1};
    for (int32_t number = 0; number < RF__BACKWARD_KERNELS; number++) {
        rf__backward_variant variants[RF_ADAM + 2];
        int32_t count = 0;
        for (common.emit = RF_EMIT_GRADIENT; common.emit <= RF_ADAM + 1; common.emit++) {
            variants[count] = only_what_matters(&common, (rf__backward_kernel)number);
            if (count == 0 || memcmp(&variants[count], &variants[0], sizeof variants[0]) != 0) count++;
        }
        RF_CHECK(rf__jit_compile_each(&sources[number], variants, sizeof variants[0], count, describe, arch));
    }
    return rf__backward_small_compile(arch);
}
