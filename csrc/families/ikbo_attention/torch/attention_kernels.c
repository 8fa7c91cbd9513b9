/* torch's attention kernels for GPUs, over sequences of many lengths. */
#include "families/ikbo_attention/torch/ikbo_attention_torch.h"

/* A view [rows, heads, dim], with a dimension of 1 before them for the memory-efficient kernel. */
static rf_status rows_view(const rf__attention_sequences *of, AtenTensorHandle tensor, int64_t rows,
                           const int64_t pitch[2], AtenTensorHandle *view) {
    const int64_t sizes[4] = {1, rows, of->heads, of->dim};
    const int64_t strides[4] = {rows * pitch[0], pitch[0], pitch[1], 1};
    const int first = of->flash;
    return rf__tensor_view(tensor, 4 - first, sizes + first, strides + first, 0, view);
}

static rf_status integers_view(const rf__attention_sequences *of, int64_t at, int64_t count,
                               AtenTensorHandle *view) {
    const int64_t stride = 1;
    return rf__tensor_view(of->integers, 1, &count, &stride, at, view);
}

/* The inputs of both kernels. */
typedef struct operands {
    AtenTensorHandle q, k, v, rows, keys, lengths;
} operands;

static void operands_free(const operands *views) {
    rf__tensor_free(views->q);
    rf__tensor_free(views->k);
    rf__tensor_free(views->v);
    rf__tensor_free(views->rows);
    rf__tensor_free(views->keys);
    rf__tensor_free(views->lengths);
}

static rf_status operands_view(const rf__attention_sequences *of, operands *views) {
    RF_CHECK(rows_view(of, of->q, of->q_rows, of->q_pitch, &views->q));
    RF_CHECK(rows_view(of, of->k, of->k_rows, of->k_pitch, &views->k));
    RF_CHECK(rows_view(of, of->v, of->k_rows, of->v_pitch, &views->v));
    RF_CHECK(integers_view(of, of->rows_at, of->count + 1, &views->rows));
    RF_CHECK(integers_view(of, of->keys_at, of->count + 1, &views->keys));
    return integers_view(of, of->lengths_at, of->count, &views->lengths);
}

/* The call owns the views from here on. The arguments that torch 2.12 has added at the end are None. */
static rf_status run_flash(const rf__attention_sequences *of, operands *views, rf__dispatch *call) {
    rf__pass_tensor(call, views->q);
    rf__pass_tensor(call, views->k);
    rf__pass_tensor(call, views->v);
    rf__pass_optional_tensor(call, views->rows);
    rf__pass_optional_tensor(call, views->keys);
    rf__pass_integer(call, of->most_rows);
    rf__pass_integer(call, of->most_keys);
    rf__pass_number(call, 0);      /* dropout_p */
    rf__pass_boolean(call, false); /* is_causal */
    rf__pass_boolean(call, false); /* return_debug_mask */
    rf__pass_optional_number(call, of->scale);
    rf__pass_null(call); /* window_size_left */
    rf__pass_null(call); /* window_size_right */
    rf__pass_optional_tensor(call, views->lengths);
    *views = (operands){NULL, NULL, NULL, NULL, NULL, NULL};
    return rf__dispatch_run(call, 5);
}

static rf_status run_efficient(const rf__attention_sequences *of, operands *views, rf__dispatch *call) {
    aoti_torch_cuda__efficient_attention_forward_type *function = NULL;
    int64_t most_rows = of->most_rows, most_keys = of->most_keys, most_found[2];
    double scale = of->scale;
    AtenTensorHandle *results = call->results;
    RF_CHECK(rf__call_efficient_attention(&function));
    const int32_t code = function(views->q, views->k, views->v, NULL, &views->rows, &views->keys, &most_rows,
                                  &most_keys, 0, 0, of->with_lse, &scale, &views->lengths, NULL, &results[0],
                                  &results[1], &results[2], &results[3], &most_found[0], &most_found[1]);
    RF_CHECK(rf__torch_status(code, call->name));
    call->n_results = 4;
    return RF_OK;
}

/* Creates results in the form of the kernels, for the lowering of their readers. */
static rf_status results_make(const rf__attention_sequences *of, rf__dispatch *call) {
    const int64_t out[4] = {1, of->q_rows, of->heads, of->dim};
    const int64_t flash_lse[2] = {of->heads, of->q_rows}, lse[3] = {of->count, of->heads, of->most_rows};
    const int first = of->flash;
    rf__torch_device device;
    int32_t dtype = 0;
    void *data = NULL;
    call->n_results = 2;
    RF_CHECK(rf__tensor_device(of->q, &device));
    RF__TORCH_CHECK(aoti_torch_get_dtype(of->q, &dtype));
    RF_CHECK(rf__tensor_new(4 - first, out + first, dtype, device, &call->results[0], &data));
    return rf__tensor_new(3 - first, of->flash ? flash_lse : lse, aoti_torch_dtype_float32(), device,
                          &call->results[1], &data);
}

rf_status rf__attention_by_torch(const rf__attention_sequences *sequences, bool explained,
                                 rf__dispatch *call) {
    operands views = {NULL, NULL, NULL, NULL, NULL, NULL};
    const bool flash = sequences->flash;
    *call =
        rf__dispatch_of(flash ? "aten::_flash_attention_forward" : "aten::_efficient_attention_forward", "");
    if (explained) return results_make(sequences, call);
    rf_status status = operands_view(sequences, &views);
    if (status == RF_OK)
        status = flash ? run_flash(sequences, &views, call) : run_efficient(sequences, &views, call);
    operands_free(&views);
    return status;
}
