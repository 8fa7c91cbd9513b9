/* Variants of fused_embedding_bag.cu and staged/staged.cu: their options, and their launches. */
#include "families/fused_embedding_bag/fused_kernel.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/tune/occupancy.h"

static const rf__kernel_source source = {"families/fused_embedding_bag/fused_embedding_bag.cu",
                                         "rf_fused_embedding_bag"};
static const rf__kernel_source staged_source = {"families/fused_embedding_bag/staged/staged.cu",
                                                "rf_fused_staged"};

enum { WARP = 32, FLOAT = 4 };

static _Atomic(rf__fused_class_list *) lists; /* atomic; grows at its head */

static rf__fused_class_list *list_find(rf__fused_class_list *from, const rf__fused_classes *classes) {
    const size_t bytes = (size_t)classes->count * sizeof classes->of[0];
    while (from != NULL && (from->count != classes->count || memcmp(from->of, classes->of, bytes) != 0))
        from = from->next;
    return from;
}

/* Counts the shared memory of kernels with these classes, in the layout of pool/indices.cuh and
 * pool/pool.cuh: row indices of all slots of a warp, and the sums of warps that share a bag. */
static void needs_count(rf__fused_class_list *list) {
    for (int32_t i = 0; i < list->count; i++) {
        const rf__fused_class *class_of_list = &list->of[i];
        const int32_t rows = WARP / class_of_list->lanes * rf_fused_indices_at_once(class_of_list->distance);
        const int32_t floats =
            class_of_list->vectors *
                (int32_t)rf__elements_in((rf_dtype)class_of_list->dtype, class_of_list->align) +
            1;
        const int32_t bytes = RF_FUSED_BLOCK / WARP * floats * WARP * FLOAT;
        list->has_columns |= class_of_list->kind == RF_FUSED_CLASS_COLUMNS;
        list->has_staged |= class_of_list->kind == RF_FUSED_CLASS_STAGED;
        if (class_of_list->kind != RF_FUSED_CLASS_POOL) continue;
        if (class_of_list->lanes > 1 && rows > list->pool_rows) list->pool_rows = rows;
        if (class_of_list->threads > WARP && bytes > list->sum_bytes) list->sum_bytes = bytes;
    }
}

rf_status rf__fused_class_list_of(const rf__fused_classes *classes, const rf__fused_class_list **list) {
    const size_t bytes = (size_t)classes->count * sizeof classes->of[0];
    rf__fused_class_list *head = atomic_load_explicit(&lists, memory_order_acquire);
    *list = list_find(head, classes);
    if (*list != NULL) return RF_OK;
    rf__fused_class_list *created = calloc(1, sizeof *created + bytes);
    RF_FAIL_IF(created == NULL, RF_ERR_MEMORY, "no memory for %d classes of kernels", (int)classes->count);
    created->count = classes->count;
    memcpy(created->of, classes->of, bytes);
    needs_count(created);
    do { /* another thread may have added the same since */
        *list = list_find(head, classes);
        created->next = head;
    } while (*list == NULL && !atomic_compare_exchange_weak_explicit(
                                  &lists, &head, created, memory_order_acq_rel, memory_order_acquire));
    if (*list == NULL)
        *list = created;
    else
        free(created);
    return RF_OK;
}

/* Returns the most row indices that a warp exchanges at once: of all its slots, or of a tile, each with its
 * weight, as pool/column_rows.cuh does if no tables are staged. */
static int32_t rows_of_warp(const rf__fused_variant *variant) {
    const rf__fused_class_list *classes = variant->classes;
    const int32_t of_tile = variant->weighted ? 2 * RF_FUSED_TILE_ROWS : RF_FUSED_TILE_ROWS;
    const bool tiles = classes->has_columns && !variant->with_staged;
    return tiles && of_tile > classes->pool_rows ? of_tile : classes->pool_rows;
}

/* Options of either kernel: of all classes, those of its kinds. */
static rf_status describe(const void *key, rf__kernel_options *options) {
    const rf__fused_variant *variant = key;
    const bool staged = variant->staged;
    char *to = options->defines, *end = to + sizeof options->defines;
    options->dynamic_shared = variant->dynamic_shared;
    to += snprintf(
        to, (size_t)(end - to),
        "-DRF_INDEX=%s -DRF_OFFSET=%s -DRF_POSITION=%s -DRF_OUTPUT=%d -DRF_WIDE_ROWS=%d -DRF_WEIGHTED=%d "
        "-DRF_CHECK=%d -DRF_TIMED=%d -DRF_BLOCK=%d -DRF_MIN_BLOCKS=%d -DRF_WITH_STAGED=%d "
        "-DRF_CALLERS_MAPPING=%d -DRF_ROWS=%d "
        "-DRF_SCHEDULES(X)=",
        rf__kernel_integer(variant->index_type), rf__kernel_integer(variant->offset_type),
        rf__kernel_integer(variant->wide_positions ? RF_INT64 : RF_INT32), (int)variant->output_dtype,
        (int)variant->wide_rows, (int)variant->weighted, (int)variant->check, (int)variant->timed,
        staged ? (int)RF_FUSED_STAGED_BLOCK : (int)RF_FUSED_BLOCK, (int)variant->min_blocks,
        (int)variant->with_staged, (int)variant->callers_mapping, staged ? 0 : (int)rows_of_warp(variant));
    for (int32_t i = 0; i < variant->classes->count && to < end; i++) {
        const rf__fused_class *class_of_list = &variant->classes->of[i];
        if ((class_of_list->kind == RF_FUSED_CLASS_STAGED) != staged) continue;
        to += snprintf(to, (size_t)(end - to), "X(%d", (int)i);
#define WRITE(name, bits) \
    if (to < end) to += snprintf(to, (size_t)(end - to), ",%d", (int)class_of_list->name);
        RF__FUSED_CLASS_FIELDS(WRITE)
#undef WRITE
        if (to < end) to += snprintf(to, (size_t)(end - to), ")");
    }
    if (to < end) return RF_OK;
    return rf__fail(RF_ERR_INTERNAL, "the options of a kernel need more than %zu bytes",
                    sizeof options->defines);
}

/* The staged kernel's block has nearly all shared memory: next to it no shared memory is used to limit
 * blocks. */
void rf__fused_kernel_choose(const rf__gpu *gpu, int32_t warps, rf__fused_variant *variant,
                             rf__kernel_launch *launch) {
    const int32_t blocks = (warps > 0 ? warps : RF__FUSED_DEFAULT_WARPS) * WARP / RF_FUSED_BLOCK;
    const int32_t row_bytes = variant->wide_rows ? sizeof(uint64_t) : sizeof(uint32_t);
    const int32_t required =
        variant->classes->sum_bytes + RF_FUSED_BLOCK / WARP * rows_of_warp(variant) * row_bytes;
    variant->min_blocks = blocks > 0 ? blocks : 1;
    variant->dynamic_shared = required;
    launch->source = &source;
    launch->describe = describe;
    launch->block[0] = RF_FUSED_BLOCK;
    launch->shared_bytes = (uint32_t)required;
    if (variant->with_staged || warps == 0 || variant->min_blocks >= gpu->blocks_per_sm) return;
    variant->dynamic_shared = rf__occupancy_limit(gpu, variant->min_blocks, required);
    launch->limiting_shared_bytes = (uint32_t)variant->dynamic_shared;
    launch->most_blocks = (uint32_t)variant->min_blocks;
}

void rf__fused_staged_kernel_choose(rf__fused_variant *variant, rf__kernel_launch *launch) {
    variant->staged = 1;
    variant->with_staged = variant->timed = variant->min_blocks = 0;
    variant->dynamic_shared = RF_FUSED_STAGED_SHARED;
    launch->source = &staged_source;
    launch->describe = describe;
    launch->block[0] = RF_FUSED_STAGED_BLOCK + RF_FUSED_STAGED_HELPERS;
    launch->shared_bytes = RF_FUSED_STAGED_SHARED;
}
