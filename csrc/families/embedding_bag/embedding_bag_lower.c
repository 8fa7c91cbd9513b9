/* The embedding bag lowered: which kernel runs, in which variant, with which grid. */
#include "families/embedding_bag/embedding_bag.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "families/embedding_bag/embedding_bag_args.h"
#include "families/embedding_bag/embedding_bag_schedule.h"
#include "gpu/tune/occupancy.h"
#include "core/validate.h"

static const rf__kernel_source list_source = {"families/embedding_bag/embedding_bag.cu", "rf_embedding_bag"};
static const rf__kernel_source short_source = {"families/embedding_bag/short_bags.cu", "rf_short_bags"};

/* Everything on which the code of a variant depends; compared bytewise, so it has no padding. */
typedef struct bag_variant {
    int64_t dim, stride; /* elements */
    int32_t alignment;   /* bytes */
    int32_t dtype, index_type, offset_type, pooling;
    int32_t wide_rows, weighted, padded, check;
    int32_t block, min_blocks;
    int32_t bags; /* per warp, of short_bags.cu; 0: embedding_bag.cu, with the following fields */
    int32_t station, distance, threads, parts, segment;
    int32_t dynamic_shared; /* bytes a block at launch */
} bag_variant;
_Static_assert(sizeof(bag_variant) == 2 * sizeof(int64_t) + 18 * sizeof(int32_t), "compared bytewise");

/* Most columns of a row: the smallest slices times the height of a grid. */
enum { WARP = 32, MOST_ALIGNMENT = 16, MOST_DIM = 65535 * 64 };

static rf__bag_shape shape_of(const rf__gpu *gpu, const rf_embedding_bag_params *params) {
    const rf__row_format row = rf__row_format_of(params->dtype, params->dim, params->weight_stride);
    const int64_t output_pitch = rf__elements_bytes(params->dtype, params->output_stride);
    return (rf__bag_shape){
        .sms = gpu->sms,
        .l2_bytes = gpu->l2_bytes,
        .row = row,
        .alignment = rf__alignment_of((uintptr_t)params->weight | (uintptr_t)params->output |
                                          (uint64_t)row.bytes | (uint64_t)row.pitch | (uint64_t)output_pitch,
                                      MOST_ALIGNMENT),
        .output_pitch = output_pitch,
        .table_bytes = params->rows * row.pitch,
        .lookups = params->lookups,
        .bags = params->bags,
        .has_state = params->sample_weights != NULL || params->padding_idx >= 0 || params->pooling != RF_SUM,
        .may_be_short =
            params->sample_weights == NULL && params->pooling != RF_MAX && params->lookups <= INT32_MAX / 2};
}

/* Bytes of shared memory a block, as the kernel lays it out: lists of rows, sums of warps, rows in flight. */
static int64_t shared_bytes(const bag_variant *variant, const rf__bag_shape *shape) {
    if (variant->bags != 0) return 0;
    const int64_t group = variant->threads < WARP ? variant->threads : WARP;
    const int64_t index_bytes = (variant->wide_rows ? 8 : 4) + (variant->weighted ? 4 : 0);
    const int64_t lists = variant->block / group * rf__round_up(variant->segment * index_bytes, 16);
    const int64_t floats =
        rf__bag_vectors(shape) * rf__elements_in(shape->row.dtype, shape->alignment) * rf__bag_lanes(shape);
    const int64_t sums =
        variant->threads > WARP ? variant->block / WARP * rf__round_up(floats * 4 + 8, 16) : 0;
    const int64_t ring =
        variant->station == RF_STATION_SHARED
            ? (int64_t)variant->distance * rf__bag_vectors(shape) * variant->block * shape->alignment
            : 0;
    return lists + sums + ring;
}

static bag_variant variant_of(const rf_embedding_bag_params *params, const rf__bag_shape *shape,
                              const rf_embedding_bag_schedule *schedule) {
    const int32_t warps = schedule->warps != 0 ? schedule->warps : rf__bag_warps(shape);
    const int32_t min_blocks = warps * WARP / schedule->block;
    bag_variant variant = {.dim = params->dim,
                           .stride = params->weight_stride,
                           .alignment = shape->alignment,
                           .dtype = (int32_t)params->dtype,
                           .index_type = (int32_t)params->index_type,
                           .offset_type = (int32_t)params->offset_type,
                           .pooling = (int32_t)params->pooling,
                           .wide_rows = params->rows > INT32_MAX,
                           .weighted = params->sample_weights != NULL,
                           .padded = params->padding_idx >= 0,
                           .check = params->check_bounds,
                           .block = schedule->block,
                           .min_blocks = min_blocks > 0 ? min_blocks : 1,
                           .bags = schedule->bags,
                           .station = (int32_t)schedule->station,
                           .distance = schedule->distance,
                           .threads = schedule->threads,
                           .parts = schedule->parts,
                           .segment = schedule->segment};
    variant.dynamic_shared = (int32_t)shared_bytes(&variant, shape);
    return variant;
}

/* Limits an SM to `min_blocks` blocks by dynamic shared memory, unless they are more than MOST_LIMITED. */
static void limit_blocks(const rf__gpu *gpu, bag_variant *variant) {
    enum { MOST_LIMITED = 24 }; /* 128 * n * (n + 1) bytes must fit an SM */
    if (variant->min_blocks > MOST_LIMITED) return;
    variant->dynamic_shared = rf__occupancy_limit(gpu, variant->min_blocks, variant->dynamic_shared);
}

static rf_status describe(const void *key, rf__kernel_options *options) {
    const bag_variant *variant = key;
    const size_t size = sizeof options->defines;
    options->dynamic_shared = variant->dynamic_shared;
    int length =
        snprintf(options->defines, size,
                 "-DRF_DTYPE=%d -DRF_DIM=%" PRId64 " -DRF_STRIDE=%" PRId64
                 " -DRF_ALIGN=%d -DRF_INDEX=%s -DRF_OFFSET=%s "
                 "-DRF_ROW=%s -DRF_POOLING=%d -DRF_PADDED=%d -DRF_CHECK=%d -DRF_BLOCK=%d -DRF_MIN_BLOCKS=%d ",
                 variant->dtype, variant->dim, variant->stride, variant->alignment,
                 rf__kernel_integer(variant->index_type), rf__kernel_integer(variant->offset_type),
                 rf__kernel_integer(variant->wide_rows ? RF_INT64 : RF_INT32), variant->pooling,
                 variant->padded, variant->check, variant->block, variant->min_blocks);
    char *to = options->defines + (length > 0 && (size_t)length < size ? length : 0);
    const size_t room = size - (size_t)(to - options->defines);
    length +=
        variant->bags != 0
            ? snprintf(to, room, "-DRF_BAGS=%d", variant->bags)
            : snprintf(to, room,
                       "-DRF_WEIGHTED=%d -DRF_STATION=%d -DRF_DISTANCE=%d -DRF_THREADS=%d -DRF_PARTS=%d "
                       "-DRF_SEGMENT=%d",
                       variant->weighted, variant->station, variant->distance, variant->threads,
                       variant->parts, variant->segment);
    RF_FAIL_IF((size_t)length >= size, RF_ERR_INTERNAL,
               "the options of a kernel need %d bytes; expected %zu at most", length, size);
    return RF_OK;
}

static rf_status check_limits(const rf_embedding_bag_params *params) {
    RF_FAIL_IF(params->dim > MOST_DIM, RF_ERR_UNSUPPORTED,
               "recfuse.embedding_bag: weight has %" PRId64 " columns; expected at most %d on a GPU",
               params->dim, MOST_DIM);
    return RF_OK;
}

/* Sum of the launch's bytes and operations; of a table each row once. */
static void traffic_count(const rf_embedding_bag_params *params, const rf__row_format *row,
                          rf__kernel_launch *launch) {
    const int64_t index = params->index_type == RF_INT64 ? 8 : 4,
                  offset = params->offset_type == RF_INT64 ? 8 : 4;
    const int64_t rows = params->lookups < params->rows ? params->lookups : params->rows;
    const bool weighted = params->sample_weights != NULL;
    launch->read_bytes = rows * row->bytes + params->lookups * (index + (weighted ? 4 : 0)) +
                         (params->bags + params->include_last_offset) * offset;
    launch->written_bytes = params->bags * row->bytes;
    launch->flops = (double)params->lookups * (double)params->dim * (weighted ? 2 : 1);
}

rf_status rf__embedding_bag_complete(const rf__gpu *gpu, const rf_embedding_bag_params *params,
                                     rf_embedding_bag_schedule *schedule) {
    const rf__bag_shape shape = shape_of(gpu, params);
    return rf__bag_schedule_complete(&shape, schedule);
}

rf_status rf__embedding_bag_lower(const rf__gpu *gpu, const rf_embedding_bag_params *params,
                                  const rf_embedding_bag_schedule *schedule, rf__launches *launches) {
    rf_embedding_bag_schedule complete = {0};
    launches->owner = params->weight;
    launches->shape = (uint64_t)params->rows;
    launches->checks = params->check_bounds;
    RF_CHECK(check_limits(params));
    if (params->bags == 0 || params->dim == 0) return RF_OK;
    const rf__bag_shape shape = shape_of(gpu, params);
    if (schedule != NULL) complete = *schedule;
    RF_CHECK(rf__bag_schedule_complete(&shape, &complete));
    bag_variant variant = variant_of(params, &shape, &complete);
    if (complete.warps != 0) limit_blocks(gpu, &variant);
    RF_FAIL_IF(variant.dynamic_shared > gpu->shared_per_block_optin, RF_ERR_VALUE,
               "schedule: distance %d and segment %d with blocks of %d threads need %d bytes of shared "
               "memory, a block of this GPU may have %" PRId64 ". Make one of them smaller.",
               (int)complete.distance, (int)complete.segment, (int)complete.block,
               (int)variant.dynamic_shared, gpu->shared_per_block_optin);
    const int64_t bags_a_block =
        complete.bags != 0 ? complete.block / WARP * complete.bags : complete.block / complete.threads;
    const int64_t blocks = (params->bags + bags_a_block - 1) / bags_a_block, slices = rf__bag_slices(&shape);
    RF_FAIL_IF(blocks > INT32_MAX, RF_ERR_UNSUPPORTED,
               "recfuse.embedding_bag: %" PRId64 " bags need %" PRId64 " blocks; expected at most %d",
               params->bags, blocks, INT32_MAX);
    rf_embedding_bag_args args = {.weight = params->weight,
                                  .indices = params->indices,
                                  .offsets = params->offsets,
                                  .sample_weights = params->sample_weights,
                                  .output = params->output,
                                  .rows = params->rows,
                                  .lookups = params->lookups,
                                  .bags = params->bags,
                                  .n_offsets = params->bags + params->include_last_offset,
                                  .output_pitch = shape.output_pitch,
                                  .padding_idx = params->padding_idx,
                                  .mean_lookups = params->lookups / params->bags};
    while (complete.parts > 1 && (params->rows - 1) >> args.part_shift >= complete.parts) args.part_shift++;
    rf__kernel_launch launch = {.source = variant.bags != 0 ? &short_source : &list_source,
                                .describe = describe,
                                .grid = {(uint32_t)blocks, (uint32_t)slices},
                                .block = {(uint32_t)complete.block},
                                .shared_bytes = (uint32_t)variant.dynamic_shared,
                                .overlap = RF__OVERLAP_EVEN};
    traffic_count(params, &shape.row, &launch);
    RF_CHECK(rf__launches_add(launches, &launch, &variant, sizeof variant, &args, sizeof args));
    rf__launches_bind_errors(launches, offsetof(rf_embedding_bag_args, errors));
    return RF_OK;
}
