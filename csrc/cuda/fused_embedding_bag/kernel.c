/* Variants of fused_embedding_bag.cu: their options, and how many blocks an SM runs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/fused_embedding_bag/fused.h"
#include "cuda/tune/occupancy.h"

static const rf__kernel_source source = {"fused_embedding_bag/fused_embedding_bag.cu",
                                         "rf_fused_embedding_bag"};

enum { WARP = 32, FLOAT = 4 };

/* The key of a kernel: a variant, and behind it its classes. */
typedef struct kernel_key {
    rf__fused_variant variant;
    rf__fused_class classes[RF__FUSED_MOST_CLASSES];
} kernel_key;

static void key_set(const rf__fused_variant *variant, const rf__fused_classes *classes, kernel_key *key) {
    key->variant = *variant;
    key->variant.n_classes = classes->count;
    memcpy(key->classes, classes->of, (size_t)classes->count * sizeof classes->of[0]);
}

static size_t key_bytes(const rf__fused_classes *classes) {
    return sizeof(rf__fused_variant) + (size_t)classes->count * sizeof(rf__fused_class);
}

/* Keys that a warp hands out at once, at most: those of all its slots, as ids.cuh says, or those of a tile, each
 * with its weight, as column_keys.cuh does where they are not beside staged tables. */
static int32_t keys_of_warp(const rf__fused_variant *variant, const rf__fused_class *classes, int32_t count) {
    enum { KEYS_OF_TILE = 256 };
    int32_t most = 0;
    for (int32_t i = 0; i < count; i++) {
        const rf__fused_class *one = &classes[i];
        int32_t keys = 0;
        if (one->kind == RF__FUSED_COLUMNS && !variant->beside)
            keys = variant->weighted ? 2 * KEYS_OF_TILE : KEYS_OF_TILE;
        if (one->kind == RF__FUSED_POOL && one->lanes > 1)
            keys = WARP / one->lanes * rf__fused_ids_at_once(one);
        if (keys > most) most = keys;
    }
    return most;
}

/* Options of either kernel: of all classes, those of its kinds. */
static rf_status options_write(const void *key, bool staged, rf__kernel_options *options) {
    const rf__fused_variant *made = key;
    const rf__fused_class *classes = (const void *)(made + 1);
    char *to = options->defines, *end = to + sizeof options->defines;
    options->dynamic_shared = made->dynamic_shared;
    to += snprintf(
        to, (size_t)(end - to),
        "-DRF_INDEX=%s -DRF_OFFSET=%s -DRF_POSITION=%s -DRF_OUTPUT=%d -DRF_WIDE_ROWS=%d -DRF_WEIGHTED=%d "
        "-DRF_CHECK=%d -DRF_TIMED=%d -DRF_BLOCK=%d -DRF_MIN_BLOCKS=%d -DRF_BESIDE=%d -DRF_RING=%d "
        "-DRF_EXACT=%d -DRF_FOREIGN=%d -DRF_KEYS=%d "
        "-DRF_SCHEDULES(X)=",
        rf__kernel_integer(made->index_type), rf__kernel_integer(made->offset_type),
        rf__kernel_integer(made->wide_positions ? RF_INT64 : RF_INT32), (int)made->output_dtype,
        (int)made->wide_rows, (int)made->weighted, (int)made->check, (int)made->timed,
        staged ? (int)RF__FUSED_STAGED_BLOCK : (int)RF__FUSED_BLOCK, (int)made->min_blocks, (int)made->beside,
        (int)RF__FUSED_STAGED_RING, (int)made->exact, (int)made->foreign,
        staged ? 0 : (int)keys_of_warp(made, classes, made->n_classes));
    for (int32_t i = 0; i < made->n_classes && to < end; i++) {
        const rf__fused_class *one = &classes[i];
        if ((one->kind == RF__FUSED_STAGED) != staged) continue;
        to += snprintf(to, (size_t)(end - to), "X(%d,%d,%d,%d,%d,%d,%d,%d,%d,%d,%d,%d,%d)", (int)i,
                       (int)one->kind, (int)one->dtype, (int)one->align, (int)one->store, (int)one->lanes,
                       (int)one->vectors, (int)one->whole, (int)one->pooling, (int)one->padded,
                       (int)one->threads, (int)one->distance, (int)one->split);
    }
    if (to < end) return RF_OK;
    return rf__fail(RF_ERR_INTERNAL, "the options of a kernel need more than %zu bytes",
                    sizeof options->defines);
}

static rf_status describe(const void *key, const rf__cuda_device *device, rf__kernel_options *options) {
    (void)device;
    return options_write(key, false, options);
}

static rf_status describe_staged(const void *key, const rf__cuda_device *device,
                                 rf__kernel_options *options) {
    (void)device;
    return options_write(key, true, options);
}

/* Where lanes leave keys for each other, and behind it warps that share a bag their sums, as ids.cuh and
 * pool.cuh lay them out. */
static int32_t shared_bytes(const rf__fused_variant *variant, const rf__fused_classes *classes) {
    const int64_t key_bytes = variant->wide_rows ? sizeof(uint64_t) : sizeof(uint32_t);
    int32_t most = 0;
    for (int32_t i = 0; i < classes->count; i++) {
        const rf__fused_class *one = &classes->of[i];
        if (one->threads <= WARP || one->kind != RF__FUSED_POOL) continue;
        const int32_t floats = one->vectors * one->align / (one->dtype == RF_FLOAT32 ? 4 : 2) + 1;
        const int32_t bytes = RF__FUSED_BLOCK / WARP * floats * WARP * FLOAT;
        if (bytes > most) most = bytes;
    }
    const int32_t keys = keys_of_warp(variant, classes->of, classes->count);
    return most + RF__FUSED_BLOCK / WARP * keys * (int32_t)key_bytes;
}

void rf__fused_occupancy(const rf__cuda_device *device, int32_t warps, rf__fused_variant *variant,
                         const rf__fused_classes *classes) {
    const int32_t wanted = warps > 0 ? warps : RF__FUSED_DEFAULT_WARPS;
    variant->min_blocks = wanted * WARP / RF__FUSED_BLOCK > 0 ? wanted * WARP / RF__FUSED_BLOCK : 1;
    variant->dynamic_shared = shared_bytes(variant, classes);
    if (device == NULL || warps == 0 || variant->min_blocks >= device->blocks_per_sm) return;
    variant->dynamic_shared = rf__occupancy_limit(device, variant->min_blocks, variant->dynamic_shared);
}

/* The staged kernel's block has nearly all shared memory: none is asked for but what is used. */
void rf__fused_beside(rf__fused_variant *variant, const rf__fused_classes *classes) {
    variant->beside = 1;
    variant->dynamic_shared = shared_bytes(variant, classes);
}

/* Shared memory that keeps blocks out is taken from L1: none where registers keep them out already. */
int32_t rf__fused_shared_bytes(const rf__cuda_device *device, const rf__fused_variant *variant,
                               const rf__fused_classes *classes, const rf__kernel *kernel) {
    const int64_t by_registers = rf__occupancy_by_registers(device, kernel->registers, RF__FUSED_BLOCK);
    return by_registers <= variant->min_blocks ? shared_bytes(variant, classes) : variant->dynamic_shared;
}

rf_status rf__fused_kernel(const rf__cuda_device *device, const rf__fused_variant *variant,
                           const rf__fused_classes *classes, const rf__kernel **kernel) {
    kernel_key key;
    key_set(variant, classes, &key);
    return rf__jit_kernel(device, &source, &key, key_bytes(classes), describe, kernel);
}

static const rf__kernel_source staged_source = {"fused_embedding_bag/staged/staged.cu", "rf_fused_staged"};

/* What its code does not depend on is left out of the key. */
static rf__fused_variant staged_variant(const rf__fused_variant *variant) {
    rf__fused_variant own = *variant;
    own.beside = own.timed = own.min_blocks = 0;
    own.dynamic_shared = RF__FUSED_STAGED_SHARED;
    return own;
}

rf_status rf__fused_staged_kernel(const rf__cuda_device *device, const rf__fused_variant *variant,
                                  const rf__fused_classes *classes, const rf__kernel **kernel) {
    kernel_key key;
    const rf__fused_variant own = staged_variant(variant);
    key_set(&own, classes, &key);
    return rf__jit_kernel(device, &staged_source, &key, key_bytes(classes), describe_staged, kernel);
}

static rf_status compile(const char *arch, const rf__fused_variant *variant, const rf__fused_classes *classes,
                         bool staged, rf_kernel_info *info) {
    rf_status status = RF_OK;
    kernel_key key;
    rf__kernel_options *options = malloc(sizeof *options);
    if (options == NULL) return rf__fail(RF_ERR_MEMORY, "no memory for the options of a kernel");
    key_set(variant, classes, &key);
    RF_TRY(options_write(&key, staged, options));
    RF_TRY(rf__jit_compile(staged ? &staged_source : &source, options, arch, NULL, NULL, info));
out:
    free(options);
    return status;
}

/* Whether a batch may make the kernel of staged tables necessary. */
static bool may_stage(const char *arch, const rf__fused_variant *variant, const rf__fused_classes *classes) {
    enum { FIRST_ARCH = 90 };
    bool any = false;
    for (int32_t i = 0; i < classes->count; i++) any |= classes->of[i].kind == RF__FUSED_STAGED;
    return any && !variant->timed && !variant->wide_positions && strncmp(arch, "sm_", 3) == 0 &&
           strtol(arch + 3, NULL, 10) >= FIRST_ARCH;
}

rf_status rf__fused_kernel_compile(const char *arch, const rf__fused_variant *variant,
                                   const rf__fused_classes *classes, rf_kernel_info *info) {
    rf_status status = RF_OK;
    if (may_stage(arch, variant, classes)) {
        rf__fused_variant staged = staged_variant(variant), others = *variant;
        rf__fused_beside(&others, classes);
        for (staged.exact = 0; staged.exact <= 1; staged.exact++) /* where a batch ends in memory decides */
            RF_TRY(compile(arch, &staged, classes, true, info));
        RF_TRY(compile(arch, &others, classes, false, info));
    }
    RF_TRY(compile(arch, variant, classes, false, info));
out:
    return status;
}
