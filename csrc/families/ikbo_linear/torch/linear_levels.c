/* The paths "decomposed", "aligned" and "broadcast" of ikbo_linear: a matmul of torch and an addition for each
 * level. A level's products go to a temporary tensor, the last level's to the output. torch's matmuls are called by
 * the operators that write to a given tensor, because autocast, which would change the type, does not affect them.
 */
#include "core/validate.h"
#include "families/ikbo_linear/ikbo_linear.h"
#include "families/ikbo_linear/torch/ikbo_linear_torch.h"
#include "torch/dispatch.h"

/* A view of some tensor, or of a copy that belongs to the call. */
typedef struct operand {
    AtenTensorHandle of;
    int64_t sizes[3], strides[3];
} operand;

static rf_status view(const operand *operand, int64_t dim, AtenTensorHandle *handle) {
    return rf__tensor_view(operand->of, dim, operand->sizes, operand->strides, 0, handle);
}

/* out = left . right, of `dim` dimensions. */
static rf_status multiply(const operand *left, const operand *right, const operand *out, int64_t dim) {
    rf_status status = RF_OK;
    AtenTensorHandle handles[3] = {NULL, NULL, NULL};
    RF_TRY(view(left, dim, &handles[0]));
    RF_TRY(view(right, dim, &handles[1]));
    RF_TRY(view(out, dim, &handles[2]));
    return rf__matmul_into(handles[0], handles[1], handles[2], dim == 3);
out:
    for (int i = 0; i < 3; i++) rf__tensor_free(handles[i]);
    return status;
}

/* Returns true if tensor cores can read a weight in place: rows or columns in whole units of 16 bytes. */
static bool is_aligned(const rf__tensor *weight, int64_t bytes) {
    enum { UNIT = 16 };
    const bool by_rows = weight->strides[1] == 1 && weight->strides[0] * bytes % UNIT == 0;
    const bool by_columns = weight->strides[0] == 1 && weight->strides[1] * bytes % UNIT == 0;
    return (by_rows || by_columns) && (uintptr_t)weight->data % UNIT == 0;
}

/* Returns a weight [m, k], or a copy whose rows are padded to a multiple of 8 elements. The padding is never
 * read. */
static rf_status weight_operand(rf__call *call, const rf__tensor *weight, bool aligned,
                                operand *operand_of_weight) {
    const int64_t m = weight->sizes[0], k = weight->sizes[1];
    *operand_of_weight = (operand){weight->handle, {m, k}, {weight->strides[0], weight->strides[1]}};
    if (!aligned || m * k == 0 || rf__call_on_cpu(call) ||
        is_aligned(weight, (int64_t)aoti_torch_dtype_element_size(weight->dtype)))
        return RF_OK;
    const int64_t padded[2] = {m, (k + 7) / 8 * 8};
    AtenTensorHandle copy = NULL;
    void *data = NULL;
    RF_CHECK(rf__call_temporary(call, 2, padded, weight->dtype, &operand_of_weight->of, &data));
    operand_of_weight->strides[0] = padded[1];
    operand_of_weight->strides[1] = 1;
    RF_CHECK(view(operand_of_weight, 2, &copy));
    const rf_status status =
        rf__torch_status(aoti_torch_copy_(copy, weight->handle, true), "aoti_torch_copy_");
    rf__tensor_free(copy);
    return status;
}

/* Returns the rows of k that the adding kernel computes, because torch's matmul would be slow only due to
 * them. Level 0 has no such kernel, and few items. */
static int64_t tail_rows(const rf__call *call, const rf__ikbo_layer *layer, int32_t l) {
    enum { UNIT = RF__IKBO_TAIL_UNIT };
    const rf__tensor *input = &layer->inputs[l];
    const int64_t k = input->sizes[1], rows = k % UNIT;
    const bool narrow = layer->dtype == RF_FLOAT16 || layer->dtype == RF_BFLOAT16;
    const bool fits = layer->path == RF__IKBO_BROADCAST && l > 0 && narrow && layer->matrices && k > UNIT &&
                      !rf__call_on_cpu(call);
    return fits && layer->n > 0 && layer->n % UNIT == 0 && input->strides[2] == 1 &&
                   input->strides[0] % UNIT == 0 && input->strides[1] % UNIT == 0 &&
                   (uintptr_t)input->data % 16 == 0
               ? rows
               : 0;
}

/* Writes the products of a level to `out` [count, m, n] or [count, m], except for those of tail_rows. */
static rf_status level_multiply(rf__call *call, const rf__ikbo_layer *layer, int32_t l,
                                AtenTensorHandle out) {
    const rf__tensor *input = &layer->inputs[l];
    const int64_t count = input->sizes[0], k = input->sizes[1] - tail_rows(call, layer, l);
    const int64_t m = layer->m, n = layer->n;
    operand weight;
    if (rf__call_is_explained(call)) return RF_OK;
    RF_CHECK(weight_operand(call, &layer->weights[l], layer->path != RF__IKBO_DECOMPOSED, &weight));
    const int64_t *strides = input->strides;
    if (!layer->matrices) {
        const operand x = {input->handle, {count, k}, {strides[0], strides[1]}};
        const operand transposed = {weight.of, {k, m}, {weight.strides[1], weight.strides[0]}};
        return multiply(&x, &transposed, &(operand){out, {count, m}, {m, 1}}, 2);
    }
    const operand x = {input->handle, {count, k, n}, {strides[0], strides[1], strides[2]}};
    const operand same = {weight.of, {count, m, k}, {0, weight.strides[0], weight.strides[1]}};
    return multiply(&same, &x, &(operand){out, {count, m, n}, {m * n, n, 1}}, 3);
}

/* Rows of an item as the sum has them: without n, an item is one row. */
static int64_t item_rows(const rf__ikbo_layer *layer) { return layer->matrices ? layer->m : 1; }

/* Raises the errors that calls with this weight have left on a GPU. */
static rf_status check_earlier(const rf__call *call, const rf__ikbo_layer *layer) {
    rf_cuda_stream stream;
    if (rf__call_on_cpu(call)) return RF_OK;
    RF_CHECK(rf__call_stream(call, &stream));
    return rf__ikbo_linear_check(layer->weights[layer->n_levels - 1].data, item_rows(layer), &stream);
}

static rf_status add(const rf__call *call, const rf_ikbo_add_params *params, const rf__ikbo_tail *tail) {
    rf_executor executor;
    rf_cuda_stream stream;
    if (rf__call_on_cpu(call)) {
        RF_CHECK(rf__call_executor(&executor));
        return rf_ikbo_add_cpu(params, &executor);
    }
    RF_CHECK(rf__call_stream(call, &stream));
    return rf__ikbo_add_launch(params, tail, &stream);
}

static rf__ikbo_tail tail_of(const rf__call *call, const rf__ikbo_layer *layer, int32_t l) {
    const rf__tensor *weight = &layer->weights[l], *input = &layer->inputs[l];
    const int64_t rows = tail_rows(call, layer, l), first = input->sizes[1] - rows;
    return (rf__ikbo_tail){.rows = (int32_t)rows,
                           .weight = rf__element_at(weight->data, layer->dtype, first * weight->strides[1]),
                           .weight_pitch = {weight->strides[0], weight->strides[1]},
                           .x = rf__element_at(input->data, layer->dtype, first * input->strides[1]),
                           .x_pitch = {input->strides[0], input->strides[1]}};
}

/* Adds the products of level l - 1 to those of level l. */
static rf_status level_add(rf__call *call, const rf__ikbo_layer *layer, int32_t l, const void *base,
                           void *out) {
    const bool last = l == layer->n_levels - 1;
    rf_ikbo_add_params params = {.out = out,
                                 .count = layer->inputs[l].sizes[0],
                                 .m = item_rows(layer),
                                 .n = layer->matrices ? layer->n : layer->m,
                                 .dtype = layer->dtype,
                                 .base = base,
                                 .parents = layer->inputs[l - 1].sizes[0],
                                 .parent = layer->maps[l],
                                 .parent_type = layer->map_types[l],
                                 .bias = last ? layer->bias : NULL,
                                 .bias_on_n = last && layer->bias != NULL && !layer->matrices,
                                 .activation = last ? layer->activation : RF_ACTIVATION_NONE,
                                 .check_bounds = layer->check_bounds,
                                 .map = layer->chain ? l - 1 : -1,
                                 .weight = layer->weights[layer->n_levels - 1].data};
    if (layer->path == RF__IKBO_BROADCAST) {
        const rf__ikbo_tail tail = tail_of(call, layer, l);
        return add(call, &params, tail.rows > 0 ? &tail : NULL);
    }
    rf_ikbo_add_params gather = params;
    AtenTensorHandle gathered = NULL;
    const int64_t sizes[3] = {params.count, params.m, params.n};
    RF_CHECK(rf__call_temporary(call, 3, sizes, rf__torch_dtype(layer->dtype), &gathered, &gather.out));
    gather.replace = true;
    gather.bias = NULL;
    gather.bias_on_n = false;
    gather.activation = RF_ACTIVATION_NONE;
    RF_CHECK(add(call, &gather, NULL));
    params.base = gather.out;
    params.parent = NULL;
    params.parents = params.count;
    return add(call, &params, NULL);
}

rf_status rf__ikbo_levels_run(rf__call *call, const rf__ikbo_layer *layer, AtenTensorHandle output,
                              void *data) {
    const void *base = NULL;
    RF_CHECK(check_earlier(call, layer));
    for (int32_t l = 0; l < layer->n_levels; l++) {
        AtenTensorHandle products = output;
        void *out = data;
        const int64_t sizes[3] = {layer->inputs[l].sizes[0], layer->m, layer->n};
        if (l < layer->n_levels - 1)
            RF_CHECK(rf__call_temporary(call, 2 + layer->matrices, sizes, rf__torch_dtype(layer->dtype),
                                        &products, &out));
        RF_CHECK(level_multiply(call, layer, l, products));
        if (l > 0) RF_CHECK(level_add(call, layer, l, base, out));
        base = out;
    }
    return RF_OK;
}
