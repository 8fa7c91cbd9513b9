/* ikbo_attention on any GPU: torch's attention of sequences of many lengths, over chunks of each user's
 * queries.
 *
 * Candidates are ordered by user by a stable sort on the device, and cut into chunks whose number the host
 * knows (families/ikbo_attention/packed/attention_packed_args.h), so that nothing waits. A chunk is a
 * sequence of queries; its keys stay in place, given by a first position and a length, so that chunks share
 * them and nothing is repeated in memory. Query heads that share keys are further rows of one head. Flash
 * attention takes float16 and bfloat16 heads of up to 256, the memory-efficient kernel the rest. Both are
 * called below autocast, which would change types.
 */
#include "families/ikbo_attention/check_ikbo_attention.h"
#include "families/ikbo_attention/ikbo_attention.h"
#include "families/ikbo_attention/torch/attention_packed.h"

#ifndef RF__MOST_SEQUENCES
#define RF__MOST_SEQUENCES 65535 /* of a launch: a grid's dimension; tests use fewer */
#endif

enum {
    CHUNK_ROWS = 1024, /* about as many in a chunk: some tiles of each kernel, and few of them empty */
    MOST_HEADS = 65535,
    MOST_FLASH_DIM = 256,
    PADDED = 8 /* elements: heads that the kernels take are multiples of it */
};

/* Puts the launches into the stream: before torch's kernels that read their results, and before memory that
 * they read is released. */
static rf_status launch(rf__packed_call *packed) {
    const rf_status status =
        rf__launches_run(packed->device, &packed->launches, NULL, NULL, packed->stream.stream);
    rf__launches_free(&packed->launches);
    rf__launches_init(&packed->launches, "ikbo_attention");
    return status;
}

static int64_t most_rows(const rf__packed_set *set) {
    const int64_t items = set->items.most == 0 ? 1 : set->items.most;
    return (items < set->items.count ? items : set->items.count) * set->items.rows;
}

/* torch's attention of the chunks from `first` to before `end`; its results are the call's. */
static rf_status attend(const rf__packed_call *packed, const rf__packed_set *set, int64_t first, int64_t end,
                        rf__dispatch *call) {
    const rf__packed_keys *keys = &packed->keys;
    const int64_t chunks = rf_attention_chunks(&set->items);
    const rf__attention_sequences sequences = {.q = set->q,
                                               .k = keys->k,
                                               .v = keys->v,
                                               .q_pitch = {set->q_pitch[0], set->q_pitch[1]},
                                               .k_pitch = {keys->k_pitch[0], keys->k_pitch[1]},
                                               .v_pitch = {keys->v_pitch[0], keys->v_pitch[1]},
                                               .q_rows = set->items.count * set->items.rows,
                                               .k_rows = keys->rows,
                                               .heads = packed->params->kv_heads,
                                               .dim = packed->padded,
                                               .count = end - first,
                                               .integers = set->chunks,
                                               .rows_at = first,
                                               .keys_at = chunks + 1 + first,
                                               .lengths_at = 2 * (chunks + 1) + first,
                                               .most_rows = most_rows(set),
                                               .most_keys = packed->params->positions,
                                               .scale = packed->params->scale,
                                               .flash = packed->flash,
                                               .with_lse = set->queries->lse != NULL};
    return rf__attention_by_torch(&sequences, rf__call_is_explained(packed->call), call);
}

/* Reads torch's results, and writes outputs from them. */
static rf_status results_write(rf__packed_call *packed, const rf__packed_set *set, int64_t first, int64_t end,
                               const rf__dispatch *call) {
    const int64_t rows = set->items.count * set->items.rows, heads = packed->params->kv_heads;
    const int more = packed->flash ? 0 : 1; /* dimensions before the rows */
    rf__tensor out, lse;
    rf__attention_result from = {.first_chunk = first, .end_chunk = end, .lse_by_chunk = !packed->flash};
    RF_CHECK(rf__tensor_read("output", call->results[0], 3 + more, packed->call->device, &out));
    bool expected = out.dtype == packed->dtype && out.sizes[more] == rows && out.sizes[more + 1] == heads &&
                    out.sizes[more + 2] == packed->padded && out.strides[more + 2] == 1;
    from.out = out.data;
    from.out_pitch[0] = out.strides[more];
    from.out_pitch[1] = out.strides[more + 1];
    if (set->queries->lse != NULL) {
        RF_CHECK(rf__tensor_read("logsumexp", call->results[1], 2 + more, packed->call->device, &lse));
        expected = expected && lse.dtype == aoti_torch_dtype_float32() && lse.sizes[more] == heads &&
                   (packed->flash ? lse.sizes[1] == rows
                                  : lse.sizes[0] == end - first && lse.sizes[2] >= most_rows(set));
        from.lse = lse.data;
        from.lse_pitch[0] = packed->flash ? 0 : lse.strides[0];
        from.lse_pitch[1] = lse.strides[more];
        from.lse_pitch[2] = lse.strides[more + 1];
    }
    RF_FAIL_IF(!expected, RF_ERR_INTERNAL,
               "this torch's %s has results of other shapes than those of torch 2.11 to 2.13", call->name);
    RF_CHECK(rf__attention_unpack_lower(packed->params, set->queries, &set->items, set->order,
                                        set->chunks_data, &from, &packed->launches));
    return launch(packed);
}

/* Returns the chunks that a launch takes at once, and whose log-sum-exps the memory-efficient kernel counts
 * in 32 bits. */
static int64_t chunks_at_once(const rf__packed_call *packed, const rf__packed_set *set) {
    const int64_t most = INT32_MAX / (rf__round_up(most_rows(set), 32) * packed->params->kv_heads);
    return packed->flash || most >= RF__MOST_SEQUENCES ? RF__MOST_SEQUENCES : most > 0 ? most : 1;
}

static rf_status chunks_run(rf__packed_call *packed, AtenTensorHandle handle, rf__packed_set *set) {
    const int64_t chunks = rf_attention_chunks(&set->items), sizes[1] = {3 * chunks + 2};
    const rf_attention_users keys = rf__attention_users_of(packed->params, packed->keys.user_pitch);
    void *data = NULL;
    RF_CHECK(rf__packed_queries_find(packed, handle, set));
    RF_CHECK(rf__call_temporary(packed->call, 1, sizes, aoti_torch_dtype_int32(), &set->chunks, &data));
    set->chunks_data = data;
    RF_CHECK(rf__attention_cut_lower(&set->items, &keys, set->chunks_data, &packed->launches));
    RF_CHECK(launch(packed));
    const int64_t step = chunks_at_once(packed, set);
    for (int64_t first = 0; first < chunks; first += step) {
        const int64_t end = chunks - first < step ? chunks : first + step;
        rf__dispatch call;
        rf_status status = attend(packed, set, first, end, &call);
        if (status == RF_OK) status = results_write(packed, set, first, end, &call);
        rf__dispatch_free(&call);
        RF_CHECK(status);
    }
    return RF_OK;
}

/* aten::sort of users of candidates; candidates of one user stay in their order. */
static rf_status sort(AtenTensorHandle users, int64_t count, rf__dispatch *call) {
    const int64_t stride = 1;
    AtenTensorHandle view = NULL;
    *call = rf__dispatch_of("aten::sort", "stable");
    RF_CHECK(rf__tensor_view(users, 1, &count, &stride, 0, &view));
    rf__pass_tensor(call, view);
    rf__pass_optional_boolean(call, true); /* stable */
    rf__pass_integer(call, 0); /* dim */
    rf__pass_boolean(call, false); /* descending */
    return rf__dispatch_run(call, 2);
}

static bool has_work(const rf_ikbo_attention_params *params, const rf_ikbo_queries *queries) {
    return queries->count > 0 && queries->queries > 0 && params->heads > 0;
}

static rf_status set_run(rf__packed_call *packed, AtenTensorHandle handle, rf__packed_set *set) {
    const rf_ikbo_attention_params *params = packed->params;
    RF_FAIL_IF(__builtin_mul_overflow(set->queries->queries, packed->group, &set->items.rows) ||
                   set->items.rows > INT32_MAX / set->items.count,
               RF_ERR_UNSUPPORTED,
               "recfuse.ikbo_attention: path \"packed\" counts rows of queries in 32 bits. Cut the batch.");
    if (params->positions > 0 && params->dim > 0 && params->n_users > 0)
        return chunks_run(packed, handle, set);
    set->order = NULL; /* no queries or no keys; any order will do */
    set->items.most = 0;
    RF_CHECK(rf__attention_unpack_lower(params, set->queries, &set->items, NULL, NULL,
                                        &(rf__attention_result){.out = NULL}, &packed->launches));
    return launch(packed);
}

/* Candidates, grouped by user if it pays: each is separate if users have at most one on average, or if one
 * fills a chunk. */
static rf_status candidates_run(rf__packed_call *packed, const int32_t *users,
                                AtenTensorHandle users_tensor) {
    const rf_ikbo_attention_params *params = packed->params;
    const rf_ikbo_queries *queries = &params->candidates;
    rf__packed_set set = {.queries = queries,
                          .items = {.users = users, .count = queries->count, .n_users = params->n_users}};
    const int64_t most = CHUNK_ROWS / packed->group / queries->queries;
    const bool sorts = most > 1 && params->n_users + 1 < queries->count && params->positions > 0 &&
                       params->dim > 0 && params->n_users > 0;
    if (!sorts) return set_run(packed, packed->attention->q.handle, &set);
    rf_status status = RF_OK;
    rf__tensor sorted, order;
    rf__dispatch call;
    RF_TRY(sort(users_tensor, queries->count, &call));
    RF_TRY(rf__tensor_read("values", call.results[0], 1, packed->call->device, &sorted));
    RF_TRY(rf__tensor_read("indices", call.results[1], 1, packed->call->device, &order));
    if (sorted.dtype != aoti_torch_dtype_int32() || order.dtype != aoti_torch_dtype_int64() ||
        !rf__tensor_is_contiguous(&sorted) || !rf__tensor_is_contiguous(&order))
        RF_TRY(
            rf__fail(RF_ERR_INTERNAL, "this torch's %s has results of other types than expected", call.name));
    set.items.users = sorted.data;
    set.items.most = most;
    set.order = order.data;
    RF_TRY(set_run(packed, packed->attention->q.handle, &set));
out:
    rf__dispatch_free(&call);
    return status;
}

/* Chooses the kernel, by the device and the type. */
static rf_status kernel_choose(rf__packed_call *packed) {
    const rf_dtype dtype = packed->params->dtype;
    RF_FAIL_IF(dtype == RF_FLOAT64, RF_ERR_UNSUPPORTED,
               "recfuse.ikbo_attention: q is float64, which torch's attention kernels of GPUs do not take. "
               "Use float32, or the CPU.");
    RF_CHECK(rf__cuda_device_get(packed->stream.device, &packed->device));
    RF_FAIL_IF(dtype == RF_BFLOAT16 && packed->device->gpu.cc_major < 8, RF_ERR_UNSUPPORTED,
               "recfuse.ikbo_attention: q is bfloat16, which needs a GPU of compute capability 8.0 or newer");
    RF_FAIL_IF(packed->params->kv_heads > MOST_HEADS, RF_ERR_UNSUPPORTED,
               "recfuse.ikbo_attention: k has " RF__I64 " heads; expected up to %d for path \"packed\"",
               packed->params->kv_heads, (int)MOST_HEADS);
    packed->flash =
        dtype != RF_FLOAT32 && packed->device->gpu.cc_major >= 8 && packed->padded <= MOST_FLASH_DIM;
    return RF_OK;
}

static rf_status run(rf__packed_call *packed) {
    const rf__attention *attention = packed->attention;
    const rf_ikbo_attention_params *params = packed->params;
    const int64_t count[1] = {params->candidates.count};
    AtenTensorHandle users_tensor = NULL;
    void *users = NULL;
    RF_CHECK(rf__call_stream(packed->call, &packed->stream));
    RF_CHECK(kernel_choose(packed));
    RF_FAIL_IF(params->n_users >= INT32_MAX, RF_ERR_UNSUPPORTED,
               "recfuse.ikbo_attention: path \"packed\" counts users in 32 bits. Cut the batch.");
    RF_CHECK(rf__call_temporary(packed->call, 1, count, aoti_torch_dtype_int32(), &users_tensor, &users));
    RF_CHECK(rf__attention_prepare_lower(params, users, &packed->launches));
    RF_CHECK(launch(packed));
    const bool self = attention->self && has_work(params, &params->users);
    if (!self && !has_work(params, &params->candidates)) return RF_OK;
    if (params->positions > 0 && params->dim > 0 && params->n_users > 0)
        RF_CHECK(rf__packed_keys_find(packed));
    if (has_work(params, &params->candidates)) RF_CHECK(candidates_run(packed, users, users_tensor));
    if (!self) return RF_OK;
    rf__packed_set set = {.queries = &params->users,
                          .items = {.count = params->n_users, .n_users = params->n_users}};
    return set_run(packed, attention->q_user.handle, &set);
}

rf_status rf__attention_packed_cuda(rf__call *call, const rf__attention *attention) {
    const rf_ikbo_attention_params *params = &attention->params;
    rf__packed_call packed;
    RF_CHECK(rf__check_ikbo_attention(params));
    packed.call = call;
    packed.attention = attention;
    packed.params = params;
    packed.dtype = rf__torch_dtype(params->dtype);
    packed.padded = rf__round_up(params->dim, PADDED);
    packed.group = params->heads > 0 ? params->heads / params->kv_heads : 1;
    rf__launches_init(&packed.launches, "ikbo_attention");
    const rf_status status = run(&packed);
    rf__launches_free(&packed.launches);
    return status;
}
