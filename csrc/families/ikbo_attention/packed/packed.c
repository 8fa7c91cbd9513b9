/* The kernels of packed.cu lowered. */
#include "families/ikbo_attention/packed/packed.h"

#include <stddef.h>
#include <stdio.h>

#include "core/validate.h"
#include "families/ikbo_attention/ikbo_attention.h"

enum { BLOCK = 256, STEPS = 4, MOST_VECTOR = 16 };

static const rf__kernel_source prepare_source = {"families/ikbo_attention/packed/packed.cu",
                                                 "rf_attention_prepare"};
static const rf__kernel_source cut_source = {"families/ikbo_attention/packed/packed.cu", "rf_attention_cut"};
static const rf__kernel_source pack_source = {"families/ikbo_attention/packed/packed.cu",
                                              "rf_attention_pack"};
static const rf__kernel_source unpack_source = {"families/ikbo_attention/packed/packed.cu",
                                                "rf_attention_unpack"};

/* `key`: bytes of a vector. */
static rf_status describe(const void *key, rf__kernel_options *options) {
    snprintf(options->defines, sizeof options->defines, "-DRF_VECTOR=%d -DRF_BLOCK=%d -DRF_STEPS=%d",
             (int)*(const int32_t *)key, (int)BLOCK, (int)STEPS);
    return RF_OK;
}

/* Adds a launch with a thread for each of `threads`, which is not 0. */
static rf_status add(rf__kernel_launch launch, int32_t vector, int64_t threads, const void *args,
                     size_t bytes, rf__launches *launches) {
    const int64_t blocks = (threads - 1) / BLOCK + 1;
    RF_FAIL_IF(blocks > INT32_MAX, RF_ERR_UNSUPPORTED,
               "recfuse.ikbo_attention: " RF__I64
               " elements need 2^31 blocks of threads or more. Cut the batch.",
               threads);
    launch.describe = describe;
    launch.grid[0] = (uint32_t)blocks;
    launch.block[0] = BLOCK;
    return rf__launches_add(launches, &launch, &vector, sizeof vector, args, bytes);
}

rf_status rf__attention_prepare_lower(const rf_ikbo_attention_params *params, int32_t *users,
                                      rf__launches *launches) {
    const bool contents = params->kv_lengths != NULL || params->kv_offsets != NULL;
    const int64_t items = params->candidates.count, lengths = contents ? params->n_users + 1 : 0;
    const rf_attention_prepare_args args = {
        .map = {params->cand_to_user, params->cand_to_user_type == RF_INT64},
        .users = users,
        .n_items = items,
        .keys = rf__attention_users_of(params, 0),
        .report = params->check_bounds};
    const rf__kernel_launch launch = {.source = &prepare_source,
                                      .read_bytes = rf__attention_map_bytes(params),
                                      .written_bytes = items * (int64_t)sizeof *users};
    rf__ikbo_attention_errors(params, launches);
    if (items == 0 && lengths == 0) return RF_OK;
    RF_CHECK(add(launch, MOST_VECTOR, items > lengths ? items : lengths, &args, sizeof args, launches));
    rf__launches_bind_errors(launches, offsetof(rf_attention_prepare_args, errors));
    return RF_OK;
}

rf_status rf__attention_cut_lower(const rf_attention_items *items, const rf_attention_users *keys,
                                  int32_t *chunks, rf__launches *launches) {
    const int64_t count = rf_attention_chunks(items);
    const rf_attention_cut_args args = {.items = *items,
                                        .keys = *keys,
                                        .rows = chunks,
                                        .first = chunks + count + 1,
                                        .lengths = chunks + 2 * (count + 1)};
    const int64_t users = items->users != NULL ? items->count * (int64_t)sizeof *items->users : 0;
    const rf__kernel_launch launch = {.source = &cut_source,
                                      .read_bytes = users + rf__attention_length_bytes(keys),
                                      .written_bytes = (3 * count + 2) * (int64_t)sizeof *chunks};
    return count == 0 ? RF_OK : add(launch, MOST_VECTOR, count, &args, sizeof args, launches);
}

/* The widest vector that divides all of these: addresses and numbers of bytes, or-ed. */
static int32_t vector_of(uint64_t all) {
    int32_t vector = MOST_VECTOR;
    while (vector > 2 && all % (uint64_t)vector != 0) vector /= 2;
    return vector;
}

/* Vectors of an item, which kernels count in 32 bits. */
static rf_status item_size(int64_t queries, int64_t heads, int64_t vectors, int64_t *size) {
    RF_FAIL_IF(__builtin_mul_overflow(queries, heads, size) || __builtin_mul_overflow(*size, vectors, size) ||
                   *size >= INT32_MAX - BLOCK * STEPS,
               RF_ERR_UNSUPPORTED,
               "recfuse.ikbo_attention: an item of " RF__I64 " rows of " RF__I64
               " heads has 2^31 vectors or more",
               queries, heads);
    return RF_OK;
}

rf_status rf__attention_pack_lower(const rf__attention_rows *from, const int64_t *order, void *to,
                                   int64_t padded, rf__launches *launches) {
    int64_t item = 0;
    const rf__row_format head = rf__row_format_of(from->dtype, from->dim, padded);
    int64_t pitch[3];
    uint64_t all = (uintptr_t)from->data | (uintptr_t)to | (uint64_t)head.bytes | (uint64_t)head.pitch;
    for (int i = 0; i < 3; i++) {
        pitch[i] = rf__elements_bytes(from->dtype, from->pitch[i]);
        all |= (uint64_t)pitch[i];
    }
    const int32_t vector = vector_of(all);
    const int64_t head_vectors = head.pitch / vector;
    RF_CHECK(item_size(from->queries, from->heads, head_vectors, &item));
    if (item == 0 || from->count == 0) return RF_OK;
    rf_attention_pack_args args = {.to = to,
                                   .from = from->data,
                                   .order = (const rf_i64 *)order,
                                   .count = from->count,
                                   .item_vectors = (uint32_t)item,
                                   .heads = (uint32_t)from->heads,
                                   .group = (uint32_t)from->group,
                                   .head_vectors = (uint32_t)head_vectors,
                                   .used_vectors = (uint32_t)(head.bytes / vector)};
    for (int i = 0; i < 3; i++) args.pitch[i] = pitch[i] / vector;
    const int64_t rows = from->count * from->queries * from->heads, orders = order != NULL ? from->count : 0;
    const rf__kernel_launch launch = {.source = &pack_source,
                                      .read_bytes = rows * head.bytes + orders * (int64_t)sizeof *order,
                                      .written_bytes = rows * head.pitch};
    return add(launch, vector, (from->count * item - 1) / STEPS + 1, &args, sizeof args, launches);
}

rf_status rf__attention_unpack_lower(const rf_ikbo_attention_params *params, const rf_ikbo_queries *queries,
                                     const rf_attention_items *items, const int64_t *order,
                                     const int32_t *rows, const rf__attention_result *from,
                                     rf__launches *launches) {
    const int64_t head_bytes = rf__elements_bytes(params->dtype, params->dim);
    const int64_t out_pitch[2] = {rf__elements_bytes(params->dtype, from->out_pitch[0]),
                                  rf__elements_bytes(params->dtype, from->out_pitch[1])};
    int64_t item = 0;
    uint64_t all = (uintptr_t)queries->out | (uint64_t)head_bytes;
    if (from->out != NULL) all |= (uintptr_t)from->out | (uint64_t)(out_pitch[0] | out_pitch[1]);
    const int32_t vector = vector_of(all);
    const int64_t head_vectors = head_bytes / vector;
    RF_CHECK(item_size(queries->queries, params->heads, head_vectors > 0 ? head_vectors : 1, &item));
    if (item == 0 || items->count == 0) return RF_OK;
    const rf_attention_unpack_args args = {
        .out = queries->out,
        .from = from->out,
        .from_pitch = {out_pitch[0] / vector, out_pitch[1] / vector},
        .order = (const rf_i64 *)order,
        .items = *items,
        .keys = rf__attention_users_of(params, 0),
        .rows = rows,
        .first_chunk = from->first_chunk,
        .end_chunk = from->end_chunk,
        .lse = queries->lse,
        .lse_from = from->lse,
        .lse_pitch = {from->lse_pitch[0], from->lse_pitch[1], from->lse_pitch[2]},
        .lse_by_chunk = from->lse_by_chunk,
        .queries = (uint32_t)queries->queries,
        .heads = (uint32_t)params->heads,
        .group = (uint32_t)(params->heads / params->kv_heads),
        .head_vectors = (uint32_t)head_vectors,
        .item_pieces = (uint32_t)item};
    /* The number of items of some chunks is known only on the device: an upper bound. */
    const int64_t heads = items->count * queries->queries * params->heads;
    const int64_t written = heads * (head_bytes + (queries->lse != NULL ? 4 : 0));
    const int64_t orders = order != NULL ? items->count * (int64_t)sizeof *order : 0;
    const rf__kernel_launch launch = {.source = &unpack_source,
                                      .read_bytes = orders + (from->out != NULL ? written : 0),
                                      .written_bytes = written};
    return add(launch, vector, (items->count * item - 1) / STEPS + 1, &args, sizeof args, launches);
}
