/* Variants of fused_embedding_bag.cu: their options, and how many blocks an SM runs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/fused_embedding_bag/kernel.h"
#include "cuda/tune/occupancy.h"

static const rf__kernel_source sources[] = {
    {"fused_embedding_bag/fused_embedding_bag.cu", "rf_fused_embedding_bag"},
    {"fused_embedding_bag/staged/staged.cu", "rf_fused_staged"}}; /* by variant->staged */

enum { WARP = 32, FLOAT = 4 };

/* The key of a kernel: a variant, and behind it its classes. */
typedef struct kernel_key {
    rf__fused_variant variant;
    rf__fused_class classes[RF_FUSED_MOST_CLASSES];
} kernel_key;

static void key_set(const rf__fused_variant *variant, const rf__fused_classes *classes, kernel_key *key) {
    key->variant = *variant;
    key->variant.n_classes = classes->count;
    if (variant->staged) { /* what its code does not depend on is left out */
        key->variant.with_staged = key->variant.timed = key->variant.min_blocks = 0;
        key->variant.dynamic_shared = RF_FUSED_STAGED_SHARED;
    }
    memcpy(key->classes, classes->of, (size_t)classes->count * sizeof classes->of[0]);
}

static size_t key_bytes(const rf__fused_classes *classes) {
    return sizeof(rf__fused_variant) + (size_t)classes->count * sizeof(rf__fused_class);
}

/* Row numbers that a warp hands out at once, at most: those of all its slots, as pool/indices.cuh says, or those of a tile, each
 * with its weight, as pool/column_rows.cuh does where no tables are staged. */
static int32_t rows_of_warp(const rf__fused_variant *variant, const rf__fused_class *classes, int32_t count) {
    int32_t most = 0;
    for (int32_t i = 0; i < count; i++) {
        const rf__fused_class *one = &classes[i];
        int32_t rows = 0;
        if (one->kind == RF_FUSED_CLASS_COLUMNS && !variant->with_staged)
            rows = variant->weighted ? 2 * RF_FUSED_TILE_ROWS : RF_FUSED_TILE_ROWS;
        if (one->kind == RF_FUSED_CLASS_POOL && one->lanes > 1)
            rows = WARP / one->lanes * rf_fused_indices_at_once(one->distance);
        if (rows > most) most = rows;
    }
    return most;
}

/* Options of either kernel: of all classes, those of its kinds. */
static rf_status describe(const void *key, rf__kernel_options *options) {
    const rf__fused_variant *variant = key;
    const bool staged = variant->staged;
    const rf__fused_class *classes = (const void *)(variant + 1);
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
        (int)variant->with_staged, (int)variant->callers_mapping,
        staged ? 0 : (int)rows_of_warp(variant, classes, variant->n_classes));
    for (int32_t i = 0; i < variant->n_classes && to < end; i++) {
        const rf__fused_class *one = &classes[i];
        if ((one->kind == RF_FUSED_CLASS_STAGED) != staged) continue;
        to += snprintf(to, (size_t)(end - to), "X(%d", (int)i);
#define WRITE(name, bits) \
    if (to < end) to += snprintf(to, (size_t)(end - to), ",%d", (int)one->name);
        RF__FUSED_CLASS_FIELDS(WRITE)
#undef WRITE
        if (to < end) to += snprintf(to, (size_t)(end - to), ")");
    }
    if (to < end) return RF_OK;
    return rf__fail(RF_ERR_INTERNAL, "the options of a kernel need more than %zu bytes",
                    sizeof options->defines);
}

/* Where lanes leave row numbers for each other, and behind it warps that share a bag their sums, as pool/indices.cuh and
 * pool/pool.cuh lay them out. */
static int32_t shared_bytes(const rf__fused_variant *variant, const rf__fused_classes *classes) {
    const int64_t row_bytes = variant->wide_rows ? sizeof(uint64_t) : sizeof(uint32_t);
    int32_t most = 0;
    for (int32_t i = 0; i < classes->count; i++) {
        const rf__fused_class *one = &classes->of[i];
        if (one->threads <= WARP || one->kind != RF_FUSED_CLASS_POOL) continue;
        const int32_t floats = one->vectors * one->align / (one->dtype == RF_FLOAT32 ? 4 : 2) + 1;
        const int32_t bytes = RF_FUSED_BLOCK / WARP * floats * WARP * FLOAT;
        if (bytes > most) most = bytes;
    }
    const int32_t rows = rows_of_warp(variant, classes->of, classes->count);
    return most + RF_FUSED_BLOCK / WARP * rows * (int32_t)row_bytes;
}

void rf__fused_occupancy(const rf__cuda_device *device, int32_t warps, rf__fused_variant *variant,
                         const rf__fused_classes *classes) {
    const int32_t wanted = warps > 0 ? warps : RF__FUSED_DEFAULT_WARPS;
    variant->min_blocks = wanted * WARP / RF_FUSED_BLOCK > 0 ? wanted * WARP / RF_FUSED_BLOCK : 1;
    variant->dynamic_shared = shared_bytes(variant, classes);
    if (device == NULL || warps == 0 || variant->min_blocks >= device->gpu.blocks_per_sm) return;
    variant->dynamic_shared = rf__occupancy_limit(&device->gpu, variant->min_blocks, variant->dynamic_shared);
}

/* The staged kernel's block has nearly all shared memory: none is asked for but what is used. */
void rf__fused_with_staged(rf__fused_variant *variant, const rf__fused_classes *classes) {
    variant->with_staged = 1;
    variant->dynamic_shared = shared_bytes(variant, classes);
}

/* Shared memory that keeps blocks out is taken from L1: none where registers keep them out already. */
int32_t rf__fused_shared_bytes(const rf__cuda_device *device, const rf__fused_variant *variant,
                               const rf__fused_classes *classes, const rf__kernel *kernel) {
    const int64_t by_registers = rf__occupancy_by_registers(&device->gpu, kernel->registers, RF_FUSED_BLOCK);
    return by_registers <= variant->min_blocks ? shared_bytes(variant, classes) : variant->dynamic_shared;
}

rf_status rf__fused_kernel(const rf__cuda_device *device, const rf__fused_variant *variant,
                           const rf__fused_classes *classes, const rf__kernel **kernel) {
    kernel_key key;
    key_set(variant, classes, &key);
    return rf__jit_kernel(device, &sources[variant->staged], &key, key_bytes(classes), describe, kernel);
}

static rf_status compile(const char *arch, const rf__fused_variant *variant, const rf__fused_classes *classes,
                         rf_kernel_info *info) {
    rf_status status = RF_OK;
    kernel_key key;
    rf__kernel_options *options = malloc(sizeof *options);
    RF_FAIL_IF(options == NULL, RF_ERR_MEMORY, "no memory for the options of a kernel");
    key_set(variant, classes, &key);
    RF_TRY(describe(&key, options));
    RF_TRY(rf__jit_compile(&sources[variant->staged], options, arch, NULL, NULL, info));
out:
    free(options);
    return status;
}

/* Whether a batch may make the kernel of staged tables necessary. */
static bool may_stage(const char *arch, const rf__fused_variant *variant, const rf__fused_classes *classes) {
    enum { FIRST_ARCH = 90 };
    bool any = false;
    for (int32_t i = 0; i < classes->count; i++) any |= classes->of[i].kind == RF_FUSED_CLASS_STAGED;
    return any && !variant->timed && !variant->wide_positions && strncmp(arch, "sm_", 3) == 0 &&
           strtol(arch + 3, NULL, 10) >= FIRST_ARCH;
}

rf_status rf__fused_kernel_compile(const char *arch, const rf__fused_variant *variant,
                                   const rf__fused_classes *classes, rf_kernel_info *info) {
    if (may_stage(arch, variant, classes)) {
        rf__fused_variant staged = *variant, others = *variant;
        staged.staged = 1;
        rf__fused_with_staged(&others, classes);
        RF_CHECK(compile(arch, &staged, classes, info));
        RF_CHECK(compile(arch, &others, classes, info));
    }
    return compile(arch, variant, classes, info);
}
