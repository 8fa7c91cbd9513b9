/* ikbo_attention on the CPU: torch's flash attention, once for each user.
 *
 * The queries of a user's candidates are gathered into one sequence for each head of keys: [kv_heads, group,
 * item, query, dim], where the query heads of a group share their keys. So a user's keys are read once for
 * all of its candidates, and keys of other users or past a user's length are never read.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "families/ikbo_attention/check_ikbo_attention.h"
#include "families/ikbo_attention/ikbo_attention_sizes.h"
#include "torch/dispatch.h"
#include "families/ikbo_attention/torch/ikbo_attention_torch.h"

static const char sdpa[] = "aten::_scaled_dot_product_flash_attention_for_cpu";

/* One set of queries. */
typedef struct query_set {
    const rf_ikbo_attention_params *params;
    const rf_ikbo_queries *queries;
    const int64_t *starts, *order; /* as of rf__ikbo_attention_group; NULL: item u belongs to user u */
    AtenTensorHandle gathered; /* room for the queries of the user that has most */
    char *gathered_data;
    int32_t dtype; /* torch's code */
    rf_executor executor;
} query_set;

/* A user's part of it. */
typedef struct user_part {
    const query_set *set;
    int64_t user, n_items;
    const int64_t *items; /* [n_items]; NULL: the user itself */
    /* torch's results: [kv_heads, group * item * query, dim] and [kv_heads, ...]; NULL without keys. */
    const char *out;
    int64_t out_pitch[2]; /* bytes from head to head and from row to row */
    const char *lse;
    int64_t lse_pitch[2];
    bool lse_is_double;
    float constant_lse; /* if there is no `lse` */
} user_part;

static int64_t item_of(const user_part *part, int64_t at) {
    return part->items == NULL ? part->user : part->items[at];
}

/* Row of a query in the sequence of its head of keys. */
static int64_t row_of(const user_part *part, int64_t in_group, int64_t at, int64_t query) {
    return (in_group * part->n_items + at) * part->set->queries->queries + query;
}

/* Item number `at` of the part. */
static void gather_item(const user_part *part, int64_t at) {
    const rf_ikbo_attention_params *params = part->set->params;
    const rf_ikbo_queries *queries = part->set->queries;
    const int64_t group = params->heads / params->kv_heads, *pitch = queries->q_pitch;
    const int64_t bytes = rf__elements_bytes(params->dtype, params->dim),
                  rows = group * part->n_items * queries->queries;
    const int64_t item = item_of(part, at);
    for (int64_t head = 0; head < params->heads; head++) {
        for (int64_t query = 0; query < queries->queries; query++) {
            const int64_t row = head / group * rows + row_of(part, head % group, at, query);
            memcpy(part->set->gathered_data + row * bytes,
                   rf__element_at(queries->q, params->dtype,
                                  item * pitch[0] + query * pitch[1] + head * pitch[2]),
                   (size_t)bytes);
        }
    }
}

static float lse_at(const user_part *part, int64_t kv_head, int64_t row) {
    const char *at = part->lse + kv_head * part->lse_pitch[0] + row * part->lse_pitch[1];
    return part->lse_is_double ? (float)*(const double *)at : *(const float *)at;
}

static void scatter_item(const user_part *part, int64_t at) {
    const rf_ikbo_attention_params *params = part->set->params;
    const rf_ikbo_queries *queries = part->set->queries;
    const int64_t group = params->heads / params->kv_heads, item = item_of(part, at);
    const int64_t bytes = rf__elements_bytes(params->dtype, params->dim);
    for (int64_t head = 0; head < params->heads; head++) {
        for (int64_t query = 0; query < queries->queries; query++) {
            const int64_t row = row_of(part, head % group, at, query), kv_head = head / group;
            const int64_t item_query = item * queries->queries + query;
            char *to = (char *)queries->out + (item_query * params->heads + head) * bytes;
            if (part->out == NULL) {
                if (bytes > 0) memset(to, 0, (size_t)bytes);
            } else {
                memcpy(to, part->out + kv_head * part->out_pitch[0] + row * part->out_pitch[1],
                       (size_t)bytes);
            }
            if (queries->lse == NULL) continue;
            queries->lse[(item * params->heads + head) * queries->queries + query] =
                part->lse == NULL ? part->constant_lse : lse_at(part, kv_head, row);
        }
    }
}

/* A part's items, and the function to run on each. */
typedef struct item_loop {
    const user_part *part;
    void (*run)(const user_part *part, int64_t at);
} item_loop;

static void run_items(int64_t from, int64_t to, void *context) {
    const item_loop *loop = context;
    for (int64_t at = from; at < to; at++) loop->run(loop->part, at);
}

/* On as many threads as have some ten microseconds of copying each. */
static rf_status for_each_item(const user_part *part, void (*run)(const user_part *part, int64_t at)) {
    enum { THREAD_BYTES = 1 << 16 };
    const rf_ikbo_attention_params *params = part->set->params;
    const int64_t rows = part->set->queries->queries * params->heads;
    const int64_t bytes = rows * (rf__elements_bytes(params->dtype, params->dim) + (int64_t)sizeof(float));
    item_loop loop = {part, run};
    if (part->set->executor.threads <= 1 || part->n_items * bytes < 2 * THREAD_BYTES) {
        run_items(0, part->n_items, &loop);
        return RF_OK;
    }
    RF_FAIL_IF(part->set->executor.parallel_for(0, part->n_items, THREAD_BYTES / (bytes + 1) + 1, run_items,
                                                &loop) != 0,
               RF_ERR_INTERNAL, "the thread pool failed");
    return RF_OK;
}

static rf_status keys_pass(rf__dispatch *call, const rf_ikbo_attention_params *params,
                           const rf__tensor *tensor, const int64_t pitch[3], int64_t user,
                           rf__ikbo_keys keys) {
    AtenTensorHandle view = NULL;
    const int64_t sizes[4] = {1, params->kv_heads, keys.count, params->dim};
    const int64_t strides[4] = {params->kv_heads * pitch[2], pitch[2], pitch[1], 1};
    const int64_t offset = keys.first * pitch[1] + (params->kv_offsets == NULL ? user * pitch[0] : 0);
    RF_CHECK(rf__tensor_view(tensor->handle, 4, sizes, strides, offset, &view));
    rf__pass_tensor(call, view);
    return RF_OK;
}

/* Reads torch's results. */
static rf_status results_read(const rf__dispatch *call, user_part *part) {
    rf__tensor out, lse;
    RF_CHECK(rf__tensor_read("output", call->results[0], 4, rf__device_cpu(), &out));
    RF_CHECK(rf__tensor_read("logsumexp", call->results[1], 3, rf__device_cpu(), &lse));
    part->lse_is_double = lse.dtype == aoti_torch_dtype_float64();
    RF_FAIL_IF(out.dtype != part->set->dtype || (out.strides[3] != 1 && out.sizes[3] != 1) ||
                   (!part->lse_is_double && lse.dtype != aoti_torch_dtype_float32()),
               RF_ERR_INTERNAL, "this torch's %s has other results than expected", sdpa);
    const rf_dtype dtype = part->set->params->dtype,
                   lse_dtype = part->lse_is_double ? RF_FLOAT64 : RF_FLOAT32;
    part->out = out.data;
    part->lse = lse.data;
    for (int i = 0; i < 2; i++) {
        part->out_pitch[i] = rf__elements_bytes(dtype, out.strides[1 + i]);
        part->lse_pitch[i] = rf__elements_bytes(lse_dtype, lse.strides[1 + i]);
    }
    return RF_OK;
}

static rf_status user_attend(const rf__attention *attention, user_part *part, rf__ikbo_keys keys) {
    const query_set *set = part->set;
    const rf_ikbo_attention_params *params = set->params;
    const int64_t rows = params->heads / params->kv_heads * part->n_items * set->queries->queries;
    const int64_t sizes[4] = {1, params->kv_heads, rows, params->dim};
    const int64_t strides[4] = {params->kv_heads * rows * params->dim, rows * params->dim, params->dim, 1};
    rf_status status = RF_OK;
    AtenTensorHandle view = NULL;
    rf__dispatch call = rf__dispatch_of(sdpa, "");
    RF_TRY(for_each_item(part, gather_item));
    RF_TRY(rf__tensor_view(set->gathered, 4, sizes, strides, 0, &view));
    rf__pass_tensor(&call, view);
    RF_TRY(keys_pass(&call, params, &attention->k, params->k_pitch, part->user, keys));
    RF_TRY(keys_pass(&call, params, &attention->v, params->v_pitch, part->user, keys));
    rf__pass_number(&call, 0); /* dropout_p */
    rf__pass_boolean(&call, false); /* is_causal */
    rf__pass_null(&call); /* attn_mask */
    rf__pass_optional_number(&call, params->scale);
    RF_TRY(rf__dispatch_run(&call, 2));
    RF_TRY(results_read(&call, part));
    RF_TRY(for_each_item(part, scatter_item));
out:
    rf__dispatch_free(&call);
    return status;
}

static rf_status user_run(const rf__attention *attention, const query_set *set, int64_t user) {
    user_part part = {.set = set, .user = user, .n_items = 1};
    if (set->order != NULL) {
        part.n_items = set->starts[user + 1] - set->starts[user];
        part.items = set->order + set->starts[user];
    }
    if (part.n_items == 0) return RF_OK;
    const rf__ikbo_keys keys = rf__ikbo_attention_keys(set->params, user);
    if (keys.count > 0 && set->params->dim > 0) return user_attend(attention, &part, keys);
    part.constant_lse = keys.count > 0 ? logf((float)keys.count) : -INFINITY; /* all scores are 0 */
    return for_each_item(&part, scatter_item);
}

static rf_status set_run(rf__call *call, const rf__attention *attention, query_set *set) {
    const rf_ikbo_attention_params *params = set->params;
    int64_t most = set->order == NULL && params->n_users > 0;
    for (int64_t u = 0; set->order != NULL && u < params->n_users; u++)
        if (set->starts[u + 1] - set->starts[u] > most) most = set->starts[u + 1] - set->starts[u];
    const int64_t sizes[1] = {most * set->queries->queries * params->heads * params->dim};
    void *data = NULL;
    if (most * set->queries->queries * params->heads == 0) return RF_OK;
    set->dtype = rf__torch_dtype(params->dtype);
    RF_CHECK(rf__call_executor(&set->executor));
    RF_CHECK(rf__call_temporary(call, 1, sizes, set->dtype, &set->gathered, &data));
    set->gathered_data = data;
    for (int64_t u = 0; u < params->n_users; u++) RF_CHECK(user_run(attention, set, u));
    return RF_OK;
}

rf_status rf__attention_packed_cpu(rf__call *call, const rf__attention *attention) {
    const rf_ikbo_attention_params *params = &attention->params;
    RF_CHECK(rf__check_ikbo_attention(params));
    RF_CHECK(rf__ikbo_attention_check_contents(params));
    int64_t *starts = malloc((size_t)(params->n_users + 1 + params->candidates.count) * sizeof *starts);
    call->scratch = starts;
    RF_FAIL_IF(starts == NULL, RF_ERR_MEMORY, "no memory to group candidates by user");
    int64_t *order = starts + params->n_users + 1;
    rf__ikbo_attention_group(params, starts, order);
    query_set candidates = {
        .params = params, .queries = &params->candidates, .starts = starts, .order = order};
    RF_CHECK(set_run(call, attention, &candidates));
    if (!attention->self) return RF_OK;
    return set_run(call, attention, &(query_set){.params = params, .queries = &params->users});
}
