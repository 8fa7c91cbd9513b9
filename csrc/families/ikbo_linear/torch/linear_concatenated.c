/* The concatenated form of ikbo_linear on the CPU: users' features copied next to their candidates', and one
 * matmul.
 *
 * If users have one candidate each, computing their part separately saves nothing, and two products in a
 * narrow type cost more than one product of twice the depth: torch reorders the operands of each.
 */
#include "core/validate.h"
#include "families/ikbo_linear/torch/ikbo_linear_torch.h"
#include "torch/dispatch.h"

static int64_t width(const rf__ikbo_layer *layer, int32_t l) { return layer->inputs[l].sizes[1]; }

/* Returns true if the weights share one tensor's memory as [m, k_user + k_cand]. */
static rf_status weights_are_adjacent(const rf__ikbo_layer *layer, bool *adjacent) {
    const rf__tensor *user = &layer->weights[0], *cand = &layer->weights[1];
    const int64_t k = width(layer, 0) + width(layer, 1);
    const int64_t last = (layer->m - 1) * user->strides[0] + (k - 1) * user->strides[1];
    int64_t offset = 0, storage_bytes = 0;
    *adjacent = layer->m > 0 && k > 0 && user->strides[0] == cand->strides[0] &&
                user->strides[1] == cand->strides[1] &&
                cand->data == rf__element_at(user->data, layer->dtype, width(layer, 0) * user->strides[1]);
    if (!*adjacent) return RF_OK;
    RF__TORCH_CHECK(aoti_torch_get_storage_offset(user->handle, &offset));
    RF__TORCH_CHECK(aoti_torch_get_storage_size(user->handle, &storage_bytes));
    *adjacent = rf__elements_bytes(layer->dtype, offset + last + 1) <=
                storage_bytes; /* otherwise two tensors are adjacent by chance */
    return RF_OK;
}

const char *rf__ikbo_concatenated_refusal(const rf__call *call, const rf__ikbo_layer *layer) {
    if (!rf__call_on_cpu(call)) return "tensors are not on the CPU";
    if (layer->chain) return "the levels are a chain's";
    return layer->matrices ? "inputs have three dimensions" : NULL;
}

rf_status rf__ikbo_concatenated_is_best(const rf__call *call, const rf__ikbo_layer *layer, bool *best) {
    *best = rf__ikbo_concatenated_refusal(call, layer) == NULL &&
            (layer->dtype == RF_FLOAT16 || layer->dtype == RF_BFLOAT16) &&
            layer->inputs[0].sizes[0] >= layer->inputs[1].sizes[0];
    return *best ? weights_are_adjacent(layer, best) : RF_OK;
}

/* A new handle to columns [first, first + sizes[1]) of a contiguous tensor of `pitch` columns. */
static rf_status columns(AtenTensorHandle of, int64_t pitch, int64_t first, const int64_t *sizes,
                         AtenTensorHandle *part) {
    return rf__tensor_view(of, 2, sizes, (const int64_t[]){pitch, 1}, first, part);
}

static rf_status columns_copy(AtenTensorHandle to, int64_t pitch, int64_t first, const rf__tensor *from) {
    AtenTensorHandle part = NULL;
    RF_CHECK(columns(to, pitch, first, from->sizes, &part));
    const rf_status status =
        rf__torch_status(aoti_torch_copy_(part, from->handle, false), "aoti_torch_copy_");
    rf__tensor_free(part);
    return status;
}

/* Returns a new handle to the concatenated weights: [k, m], transposed for the product. */
static rf_status whole_weight(rf__call *call, const rf__ikbo_layer *layer, AtenTensorHandle *handle) {
    const int64_t k = width(layer, 0) + width(layer, 1), m = layer->m;
    const rf__tensor *weights = layer->weights;
    AtenTensorHandle joined = weights[0].handle;
    int64_t pitches[2] = {weights[0].strides[1], weights[0].strides[0]};
    void *data = NULL;
    bool adjacent = false;
    RF_CHECK(weights_are_adjacent(layer, &adjacent));
    if (!adjacent) {
        RF_CHECK(rf__call_temporary(call, 2, (const int64_t[]){m, k}, weights[0].dtype, &joined, &data));
        for (int32_t l = 0; l < 2; l++) RF_CHECK(columns_copy(joined, k, l * width(layer, 0), &weights[l]));
        pitches[0] = 1;
        pitches[1] = k;
    }
    return rf__tensor_view(joined, 2, (const int64_t[]){k, m}, pitches, 0, handle);
}

/* Checks the map: a sum over items of nothing. */
static rf_status map_check(const rf__ikbo_layer *layer, const rf_executor *executor) {
    const rf_ikbo_add_params nothing = {.count = layer->inputs[1].sizes[0],
                                        .m = 1,
                                        .dtype = layer->dtype,
                                        .parents = layer->inputs[0].sizes[0],
                                        .parent = layer->maps[1],
                                        .parent_type = layer->map_types[1],
                                        .check_bounds = layer->check_bounds,
                                        .map = -1};
    return rf_ikbo_add_cpu(&nothing, executor);
}

/* to = from[map], by aten::index_select; takes over `to`. */
static rf_status rows_select(const rf__tensor *from, const rf__tensor *map, AtenTensorHandle to) {
    AtenTensorHandle views[2] = {NULL, NULL};
    rf_status status = rf__tensor_view(from->handle, 2, from->sizes, from->strides, 0, &views[0]);
    if (status == RF_OK) status = rf__tensor_view(map->handle, 1, map->sizes, map->strides, 0, &views[1]);
    rf__dispatch select = rf__dispatch_of("aten::index_select", "out");
    rf__pass_tensor(&select, views[0]);
    rf__pass_integer(&select, 0);
    rf__pass_tensor(&select, views[1]);
    rf__pass_tensor(&select, to);
    if (status == RF_OK) status = rf__dispatch_run(&select, 1);
    rf__dispatch_free(&select);
    return status;
}

/* Returns a new handle to each candidate's features after its user's: [count, k]. */
static rf_status whole_input(rf__call *call, const rf__ikbo_layer *layer, AtenTensorHandle *handle) {
    enum { CAND_TO_USER = 4 };
    const rf__tensor *users = &layer->inputs[0], *candidates = &layer->inputs[1];
    const int64_t count = candidates->sizes[0], k = width(layer, 0) + width(layer, 1);
    AtenTensorHandle joined = NULL, part = NULL;
    rf__tensor map;
    void *data = NULL;
    RF_CHECK(rf__call_tensor(call, CAND_TO_USER, 1, &map));
    RF_CHECK(rf__call_temporary(call, 2, (const int64_t[]){count, k}, users->dtype, &joined, &data));
    RF_CHECK(columns(joined, k, 0, (const int64_t[]){count, width(layer, 0)}, &part));
    RF_CHECK(rows_select(users, &map, part));
    RF_CHECK(columns_copy(joined, k, width(layer, 0), candidates));
    return columns(joined, k, 0, (const int64_t[]){count, k}, handle);
}

rf_status rf__ikbo_concatenated_run(rf__call *call, const rf__ikbo_layer *layer, AtenTensorHandle output,
                                    void *data) {
    const int64_t count = layer->inputs[1].sizes[0], m = layer->m, sizes[2] = {count, m};
    const bool finishes = layer->bias != NULL || layer->activation != RF_ACTIVATION_NONE;
    rf_status status = RF_OK;
    rf_executor executor;
    void *products = NULL;
    AtenTensorHandle input = NULL, weight = NULL, out = NULL;
    RF_CHECK(rf__call_executor(&executor));
    RF_CHECK(map_check(layer, &executor));
    if (finishes)
        RF_CHECK(rf__call_temporary(call, 2, sizes, rf__torch_dtype(layer->dtype), &output, &products));
    RF_TRY(whole_input(call, layer, &input));
    RF_TRY(whole_weight(call, layer, &weight));
    RF_TRY(rf__tensor_view(output, 2, sizes, (const int64_t[]){m, 1}, 0, &out));
    status = rf__matmul_into(input, weight, out, false);
    input = weight = out = NULL;
    if (status != RF_OK || !finishes) goto out;
    const rf_ikbo_add_params finish = {.out = data,
                                       .count = count,
                                       .m = 1,
                                       .n = m,
                                       .dtype = layer->dtype,
                                       .base = products,
                                       .parents = count,
                                       .parent_type = RF_INT64,
                                       .bias = layer->bias,
                                       .bias_on_n = layer->bias != NULL,
                                       .activation = layer->activation,
                                       .replace = true,
                                       .map = -1};
    status = rf_ikbo_add_cpu(&finish, &executor);
out:
    rf__tensor_free(input);
    rf__tensor_free(weight);
    rf__tensor_free(out);
    return status;
}
