/* Variants of the backward's kernels, and their launches. */
#include <stdio.h>
#include <string.h>

#include "families/fused_backward/backward.h"

#define FOLDER "families/fused_backward/"
static const rf__kernel_source sources[RF__BACKWARD_KERNELS] = {
    [RF__BACKWARD_BAG_FACTORS] = {FOLDER "keys.cu", "rf_backward_bag_factors"},
    [RF__BACKWARD_KEYS] = {FOLDER "keys.cu", "rf_backward_keys"},
    [RF__BACKWARD_COUNT] = {FOLDER "sort/sort.cu", "rf_backward_count"},
    [RF__BACKWARD_PLACES] = {FOLDER "sort/sort.cu", "rf_backward_places"},
    [RF__BACKWARD_SORT] = {FOLDER "sort/sort.cu", "rf_backward_sort"},
    [RF__BACKWARD_COUNT_ROWS] = {FOLDER "unique.cu", "rf_backward_count_rows"},
    [RF__BACKWARD_SUM_ROWS] = {FOLDER "unique.cu", "rf_backward_sum_rows"},
    [RF__BACKWARD_SPLIT_ROWS] = {FOLDER "unique.cu", "rf_backward_split_rows"},
    [RF__BACKWARD_ROWS] = {FOLDER "rows.cu", "rf_backward_rows"},
    [RF__BACKWARD_JOINS] = {FOLDER "joins.cu", "rf_backward_joins"},
    [RF__BACKWARD_ROW_SPARSE] = {FOLDER "listed.cu", "rf_backward_listed"},
};

static rf_status describe(const void *key, rf__kernel_options *options) {
    const rf__backward_variant *variant = key;
    const char *const words[] = {"rf_u32", "rf_u64"};
    options->dynamic_shared = variant->dynamic_shared;
    snprintf(options->defines, sizeof options->defines,
             "-DRF_INDEX=%s -DRF_OFFSET=%s -DRF_KEY=%s -DRF_VALUE=%s -DRF_DIGIT_BITS=%d -DRF_ITEMS=%d "
             "-DRF_ENTRIES=%d "
             "-DRF_GRAD_DTYPE=%d -DRF_WEIGHT_DTYPE=%d -DRF_EPILOGUE=%d -DRF_ROUND=%d -DRF_ALIGNED=%d",
             rf__kernel_integer(variant->index_type), rf__kernel_integer(variant->offset_type),
             words[variant->wide_keys], words[variant->wide_values], (int)variant->digit_bits,
             (int)variant->items, (int)variant->entries, (int)variant->grad_dtype, (int)variant->weight_dtype,
             (int)variant->epilogue, (int)variant->round, (int)variant->aligned);
    const size_t length = strlen(options->defines);
    if (variant->vectors > 0)
        snprintf(options->defines + length, sizeof options->defines - length, " -DRF_VECTORS=%d",
                 (int)variant->vectors);
    return RF_OK;
}

/* The key without all that the kernel's code does not depend on, so that fewer are compiled. */
static rf__backward_variant canonical_key(const rf__backward_variant *from, rf__backward_kernel number) {
    rf__backward_variant to = *from;
    const bool reads_lookups = number <= RF__BACKWARD_KEYS, pools = number >= RF__BACKWARD_ROWS;
    const bool sorts = number >= RF__BACKWARD_COUNT && number <= RF__BACKWARD_SORT;
    to.kernel = number;
    if (!reads_lookups) to.index_type = to.offset_type = 0;
    if (!sorts) to.digit_bits = RF_BACKWARD_MOST_DIGIT_BITS;
    if (!sorts && number != RF__BACKWARD_KEYS) to.items = RF_BACKWARD_MOST_ITEMS;
    if (number != RF__BACKWARD_KEYS && number != RF__BACKWARD_ROWS) to.entries = 0;
    if (!pools) to.grad_dtype = to.weight_dtype = to.epilogue = to.round = to.aligned = to.vectors = 0;
    if (number != RF__BACKWARD_SORT && number != RF__BACKWARD_ROWS) to.dynamic_shared = 0;
    if (number == RF__BACKWARD_JOINS) to.grad_dtype = 0;
    if (number == RF__BACKWARD_ROW_SPARSE) to.wide_keys = to.wide_values = to.vectors = 0;
    return to;
}

rf_status rf__backward_launch_add(rf__launches *launches, const rf__backward_variant *variant,
                                  rf__backward_kernel number, const rf__kernel_launch *launch,
                                  const void *arguments, size_t argument_bytes) {
    rf__kernel_launch added = *launch;
    rf__backward_variant key = *variant;
    const bool sorts = number >= RF__BACKWARD_KEYS && number <= RF__BACKWARD_SORT;
    key.dynamic_shared = (int32_t)launch->shared_bytes;
    key = canonical_key(&key, number);
    added.source = &sources[number];
    added.describe = describe;
    added.block[0] = sorts ? RF_BACKWARD_SORT_BLOCK : RF_BACKWARD_BLOCK;
    added.overlap = number == RF__BACKWARD_ROW_SPARSE ? RF__OVERLAP_NEVER : RF__OVERLAP_ALWAYS;
    return arguments == NULL
               ? rf__launches_add_alike(launches, &added, &key, sizeof key)
               : rf__launches_add(launches, &added, &key, sizeof key, arguments, argument_bytes);
}
