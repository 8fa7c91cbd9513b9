/* rf__fused_embedding_lower: the variant of fused_embedding.cu, its arguments and its launch. */
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>

#include "families/fused_embedding/check_fused_embedding.h"
#include "families/fused_embedding/fused_embedding.h"
#include "families/fused_embedding/fused_embedding_args.h"
#include "families/fused_embedding_bag/feature_rows.h"

static const char operator_name[] = "fused_embedding";
static const rf__kernel_source source = {"families/fused_embedding/fused_embedding.cu", "rf_fused_embedding"};

/* All of it int32_t: compared bytewise. */
typedef struct embedding_variant {
    int32_t layout, index_type, offset_type, features;
} embedding_variant;

enum { MOST_VECTOR = 16, WARP = 32 };

static rf_status describe(const void *key, rf__kernel_options *options) {
    const embedding_variant *variant = key;
    snprintf(options->defines, sizeof options->defines,
             "-DRF_LAYOUT=%d -DRF_INDEX=%s -DRF_OFFSET=%s -DRF_FEATURES=%d", (int)variant->layout,
             rf__kernel_integer(variant->index_type), rf__kernel_integer(variant->offset_type),
             (int)variant->features);
    return RF_OK;
}

static int32_t capacity_for(int64_t features) {
    return features <= RF_EMBEDDING_SMALL    ? RF_EMBEDDING_SMALL
           : features <= RF_EMBEDDING_MEDIUM ? RF_EMBEDDING_MEDIUM
                                             : RF_EMBEDDING_LARGE;
}

/* The widest vector that divides a row, and that all addresses of a feature are aligned to. */
static int32_t vector_of(const rf_fused_embedding_params *params, const rf_embedding_feature *feature) {
    const uint64_t fill = (uintptr_t)params->fill, output = (uintptr_t)params->output;
    if (feature->dtype != (rf_i32)params->output_dtype) return 0;
    return rf__alignment_of((uintptr_t)feature->weight | feature->pitch | fill | output |
                                (uint64_t)feature->output_offset | feature->output_pitch,
                            MOST_VECTOR);
}

/* Sets a feature; *lookups and *element: of the features before, according to the sizes. */
static rf_status feature_set(const rf_fused_embedding_params *params, int64_t at, int64_t *lookups,
                             int64_t *element, rf_embedding_feature *to) {
    const rf_feature *feature = &params->features[at];
    const rf__row_format row = rf__feature_row(params->buffers, feature);
    const rf_dtype dtype = params->output_dtype;
    const bool is_jagged = params->layout == RF_HISTORY_JAGGED;
    const int64_t output_pitch = rf__elements_bytes(dtype, is_jagged ? feature->dim : params->output_dim);
    RF__REFUSE_IF(row.pitch > INT32_MAX || output_pitch > UINT32_MAX, RF_ERR_UNSUPPORTED,
                  "features[" RF__I64 "] has rows of " RF__I64 " bytes and an output of " RF__I64
                  " bytes a slot; expected less than 2^31 and 2^32 on a GPU",
                  at, row.pitch, output_pitch);
    *to = (rf_embedding_feature){
        .weight = (const rf_u8 *)rf__feature_weight(params->buffers, feature),
        .rows = feature->rows,
        .padding_idx = feature->padding_idx,
        .first_row = params->first_rows != NULL ? params->first_rows[at] : 0,
        .first_lookup = *lookups,
        .pitch = (rf_u32)row.pitch,
        .output_pitch = (rf_u32)output_pitch,
        .dim = (rf_i32)feature->dim,
        .dtype = (rf_i32)row.dtype,
    };
    if (params->sizes != NULL) {
        to->output_offset = rf__elements_bytes(dtype, *element) - *lookups * output_pitch;
        *lookups += params->sizes[at];
        *element += params->sizes[at] * feature->dim;
    } else if (!is_jagged) {
        to->output_offset = rf__elements_bytes(dtype, feature->output_column);
    }
    to->vector = vector_of(params, to);
    const int64_t pieces = to->vector > 0 ? row.pitch / to->vector : feature->dim;
    for (to->lanes = 1; to->lanes < pieces && to->lanes < WARP;) to->lanes *= 2;
    return RF_OK;
}

static void traffic_count(const rf_fused_embedding_params *params, int64_t slots, rf__kernel_launch *launch) {
    const bool is_jagged = params->layout == RF_HISTORY_JAGGED;
    const int64_t index = params->index_type == RF_INT64 ? 8 : 4;
    const int64_t offset = params->offset_type == RF_INT64 ? 8 : 4;
    const int64_t output = params->sizes != NULL ? params->output_dim : slots * params->output_dim;
    launch->read_bytes = params->lookups * index + (params->n_features * params->bags + 1) * offset;
    for (int64_t f = 0; f < params->n_features; f++) {
        const rf_feature *feature = &params->features[f];
        const int64_t lookups =
            params->sizes != NULL ? params->sizes[f] : params->lookups / params->n_features;
        const int64_t rows = lookups < feature->rows ? lookups : feature->rows;
        launch->read_bytes += rows * rf__feature_row(params->buffers, feature).bytes;
    }
    launch->written_bytes = rf__elements_bytes(params->output_dtype, output);
    if (params->rows != NULL)
        launch->written_bytes += slots * (is_jagged ? 1 : params->n_features) * (int64_t)sizeof(int64_t);
}

rf_status rf__fused_embedding_lower(const rf_fused_embedding_params *params, rf__launches *launches) {
    const int64_t slots = rf__history_slots(params);
    const int64_t blocks = (slots + RF_EMBEDDING_BLOCK - 1) / RF_EMBEDDING_BLOCK;
    const bool is_jagged = params->layout == RF_HISTORY_JAGGED;
    launches->owner = params->n_buffers > 0 ? params->buffers[0].data : NULL;
    launches->shape = (uint64_t)params->n_features << 32 | (uint64_t)rf__history_columns(params);
    launches->checks = params->check_bounds;
    if (params->n_features == 0 || slots == 0) return RF_OK;
    RF__REFUSE_IF(params->n_features > RF_EMBEDDING_LARGE || blocks > INT32_MAX, RF_ERR_UNSUPPORTED,
                  "the call has " RF__I64 " features and " RF__I64
                  " slots of a feature; expected at most %d features and 2^39 slots on a GPU",
                  params->n_features, slots, (int)RF_EMBEDDING_LARGE);
    const embedding_variant variant = {(int32_t)params->layout, (int32_t)params->index_type,
                                       (int32_t)params->offset_type, capacity_for(params->n_features)};
    rf_fused_embedding_args args = {.indices = params->indices,
                                    .offsets = params->offsets,
                                    .output = params->output,
                                    .fill = params->fill,
                                    .rows = (rf_i64 *)params->rows,
                                    .lookups = params->lookups,
                                    .slots = slots,
                                    .length = params->length,
                                    .bags = params->bags > 0 ? params->bags : 1,
                                    .n_features = (rf_i32)params->n_features,
                                    .output_dtype = (rf_i32)params->output_dtype,
                                    .check = params->check_bounds,
                                    .sized = params->sizes != NULL};
    int64_t lookups = 0, element = 0;
    for (int64_t f = 0; f < params->n_features; f++)
        RF_CHECK(feature_set(params, f, &lookups, &element, &args.features[f]));
    rf__kernel_launch launch = {.source = &source,
                                .describe = describe,
                                .grid = {(uint32_t)blocks, is_jagged ? 1 : (uint32_t)params->n_features},
                                .block = {RF_EMBEDDING_BLOCK},
                                .overlap = RF__OVERLAP_EVEN};
    const size_t bytes =
        offsetof(rf_fused_embedding_args, features) + (size_t)variant.features * sizeof *args.features;
    traffic_count(params, slots, &launch);
    RF_CHECK(rf__launches_add(launches, &launch, &variant, sizeof variant, &args, bytes));
    rf__launches_bind_errors(launches, offsetof(rf_fused_embedding_args, errors));
    return RF_OK;
}
