/* rf__fused_quantized_weights_read: weights of which some are codes, or memory with tables. */
#include "core/row_format.h"
#include "families/fused_embedding_bag/torch/fused_arguments.h"

#include <stdlib.h>

/* Codes, uint8 [rows, bytes], and their parameters, [rows, 2]. */
static rf_status codes_read(const rf__call *call, const rf__tensor *codes, AtenTensorHandle handle,
                            rf_buffer *buffer) {
    rf__tensor parameters;
    RF_CHECK(rf__tensor_read("parameters", handle, RF__ANY_DIM, call->device, &parameters));
    const int64_t rows = codes->sizes[0];
    const bool is_float = parameters.dtype == aoti_torch_dtype_float32();
    if (parameters.dim != 2 || parameters.sizes[0] != rows || parameters.sizes[1] != 2 ||
        (!is_float && parameters.dtype != aoti_torch_dtype_float16()))
        return rf__tensor_refuse(&parameters, RF_ERR_VALUE,
                                 "float16 or float32 [%lld, 2], the scale and the bias of each row of codes",
                                 (long long)rows);
    RF_FAIL_IF((codes->sizes[1] > 1 && codes->strides[1] != 1) || (rows > 0 && parameters.strides[1] != 1),
               RF_ERR_VALUE, "codes have stride %lld and parameters %lld; expected contiguous rows",
               (long long)codes->strides[1], (long long)parameters.strides[1]);
    buffer->data = codes->data;
    buffer->dtype = RF_INT8_ROWS;
    buffer->parameters = parameters.data;
    buffer->parameters_dtype = is_float ? RF_FLOAT32 : RF_FLOAT16;
    /* torch may give the only row any stride */
    buffer->pitch = rows > 1 ? codes->strides[0] : codes->sizes[1];
    buffer->parameters_pitch =
        rf__elements_bytes(buffer->parameters_dtype, rows > 1 ? parameters.strides[0] : 2);
    return RF_OK;
}

/* Reads weights[at]. Of codes *dim is their bytes a row, and numel is -1 - rows, until dims_set. */
static rf_status item_read(const rf__call *call, size_t at, int weights, rf_buffer *buffer, int64_t *dim) {
    rf__value weight = {0}, of_weight = {0};
    rf__tensor tensor;
    RF__TORCH_CHECK(torch_list_get_item(call->values[weights].list, at, &weight.bits));
    RF__TORCH_CHECK(torch_list_get_item(call->values[weights + 1].list, at, &of_weight.bits));
    RF_CHECK(rf__tensor_read("weights", weight.tensor, RF__ANY_DIM, call->device, &tensor));
    if (tensor.dtype != aoti_torch_dtype_uint8()) {
        RF_CHECK(rf__fused_weight_read("weights", weight.tensor, call->device, buffer, dim));
        RF_CHECK(rf__tensor_read("parameters", of_weight.tensor, RF__ANY_DIM, call->device, &tensor));
        for (int64_t d = 0; d < tensor.dim; d++)
            if (tensor.sizes[d] == 0) return RF_OK;
        return rf__tensor_refuse(&tensor, RF_ERR_VALUE, "an empty tensor for weights[%zu], which is no codes",
                                 at);
    }
    if (tensor.dim != 2) return rf__tensor_refuse(&tensor, RF_ERR_VALUE, "codes of two dimensions");
    *dim = tensor.sizes[1];
    buffer->numel = -1 - tensor.sizes[0];
    return codes_read(call, &tensor, of_weight.tensor, buffer);
}

/* Codes of a dim's bytes are int8, of half as many bytes int4. */
static rf_status dims_set(const rf_fused_embedding_bag_params *params, rf_buffer *buffers, int64_t *dims) {
    for (int64_t f = 0; f < params->n_features; f++) {
        const rf_feature *feature = &params->features[f];
        if (feature->buffer < 0 || feature->buffer >= params->n_buffers ||
            buffers[feature->buffer].numel >= 0)
            continue; /* refused later, or known */
        rf_buffer *buffer = &buffers[feature->buffer];
        int64_t *dim = &dims[feature->buffer];
        const bool is_int4 = feature->dim % 2 == 0 && feature->dim / 2 == *dim && feature->dim > 0;
        RF_FAIL_IF(
            !is_int4 && feature->dim != *dim, RF_ERR_VALUE,
            "weights[%lld] has rows of %lld bytes of codes; expected %lld bytes (int8) or half as many "
            "(int4) for features[%lld], which has %lld columns",
            (long long)feature->buffer, (long long)*dim, (long long)feature->dim, (long long)f,
            (long long)feature->dim);
        buffer->dtype = is_int4 ? RF_INT4_ROWS : RF_INT8_ROWS;
        *dim = feature->dim;
        buffer->numel = (-1 - buffer->numel) * feature->dim;
    }
    for (int64_t i = 0; i < params->n_buffers; i++)
        if (buffers[i].numel < 0) buffers[i].numel = 0; /* no feature reads it */
    return RF_OK;
}

/* Reads item `at` of weights or parameters, memory with tables. */
static rf_status memory_read(const rf__call *call, int argument, size_t at, const void **data,
                             int64_t *bytes) {
    rf__value item = {0};
    rf__tensor tensor;
    RF__TORCH_CHECK(torch_list_get_item(call->values[argument].list, at, &item.bits));
    RF_CHECK(rf__tensor_read(call->registered->signature.names[argument], item.tensor, RF__ANY_DIM,
                             call->device, &tensor));
    if (tensor.dtype != aoti_torch_dtype_uint8() || !rf__tensor_is_contiguous(&tensor))
        return rf__tensor_refuse(&tensor, RF_ERR_VALUE, "contiguous uint8 with stored");
    *data = tensor.data;
    *bytes = 1;
    for (int64_t d = 0; d < tensor.dim; d++) *bytes *= tensor.sizes[d];
    return RF_OK;
}

/* Reads weights as memory, and the tables in it from `stored`: int64 [tables, 8] on the CPU. */
static rf_status stored_read(rf__call *call, int weights, int argument, size_t count, const int64_t **columns,
                             rf_fused_embedding_bag_params *params) {
    enum { FIELDS = sizeof(rf_stored_table) / sizeof(int64_t) };
    rf__tensor stored;
    RF_CHECK(rf__call_host_tensor(call, argument, 2, &stored));
    if (stored.dtype != aoti_torch_dtype_int64() || stored.sizes[1] != FIELDS)
        return rf__tensor_refuse(
            &stored, RF_ERR_VALUE,
            "int64 [tables, %d] with memory, first, rows, dim, dtype, pitch, parameters, parameters_dtype",
            FIELDS);
    RF_CHECK(rf__call_contiguous(call, &stored, stored.dtype));
    const size_t n_tables = (size_t)stored.sizes[0];
    rf_buffer *buffers = calloc(n_tables + count + 1, sizeof *buffers + sizeof **columns + sizeof(rf_memory));
    RF_FAIL_IF(buffers == NULL, RF_ERR_MEMORY, "no memory for %zu tables", n_tables);
    call->scratch = buffers;
    int64_t *dims = (int64_t *)(buffers + n_tables);
    rf_memory *memories = (rf_memory *)(dims + n_tables);
    for (size_t i = 0; i < count; i++) {
        RF_CHECK(memory_read(call, weights, i, &memories[i].data, &memories[i].bytes));
        RF_CHECK(memory_read(call, weights + 1, i, &memories[i].parameters, &memories[i].parameters_bytes));
    }
    const rf_stored_table *tables = stored.data;
    RF_CHECK(rf_stored_tables_buffers(tables, (int64_t)n_tables, memories, (int64_t)count, buffers));
    for (size_t t = 0; t < n_tables; t++) dims[t] = tables[t].dim;
    params->buffers = buffers;
    params->n_buffers = (int64_t)n_tables;
    *columns = dims;
    return RF_OK;
}

rf_status rf__fused_quantized_weights_read(rf__call *call, int weights, int stored, const int64_t **columns,
                                           rf_fused_embedding_bag_params *params) {
    size_t count = 0, n_parameters = 0;
    RF__TORCH_CHECK(torch_list_size(call->values[weights].list, &count));
    RF__TORCH_CHECK(torch_list_size(call->values[weights + 1].list, &n_parameters));
    RF_FAIL_IF(count != n_parameters, RF_ERR_VALUE,
               "parameters has %zu tensors; expected as many as the %zu weights", n_parameters, count);
    if (call->values[stored].is_present) return stored_read(call, weights, stored, count, columns, params);
    rf_buffer *buffers = calloc(count + 1, sizeof *buffers + sizeof **columns);
    RF_FAIL_IF(buffers == NULL, RF_ERR_MEMORY, "no memory for %zu weights", count);
    call->scratch = buffers;
    int64_t *dims = (int64_t *)(buffers + count);
    for (size_t i = 0; i < count; i++) RF_CHECK(item_read(call, i, weights, &buffers[i], &dims[i]));
    params->buffers = buffers;
    params->n_buffers = (int64_t)count;
    *columns = dims;
    return dims_set(params, buffers, dims);
}
