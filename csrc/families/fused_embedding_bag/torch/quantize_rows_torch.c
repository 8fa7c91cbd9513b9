/* recfuse::quantize_rows and recfuse::dequantize_rows: tensors -> rf_float_rows and rf_quantized_rows. */
#include "core/row_format.h"
#include "torch/arguments.h"
#include "torch/operators.h"

static rf_status floats_read(rf__call *call, int argument, rf_float_rows *rows, rf__tensor *tensor) {
    RF_CHECK(rf__call_tensor(call, argument, 2, tensor));
    RF_CHECK(rf__tensor_dtype(tensor, &rows->dtype));
    RF_FAIL_IF(tensor->sizes[1] > 1 && tensor->strides[1] != 1, RF_ERR_VALUE,
               "%s has stride %lld within a row; expected 1. Pass %s.contiguous().", tensor->argument,
               (long long)tensor->strides[1], tensor->argument);
    rows->weight = (void *)(uintptr_t)tensor->data;
    rows->stride = tensor->sizes[0] > 1 ? tensor->strides[0] : tensor->sizes[1];
    return RF_OK;
}

/* Reads codes of `weight`: uint8 [rows, bytes], and their parameters [rows, 2]. */
static rf_status codes_read(rf__call *call, int argument, const rf__tensor *weight, rf_quantized_rows *rows) {
    rf__tensor codes, parameters;
    RF_CHECK(rf__call_tensor(call, argument, 2, &codes));
    RF_CHECK(rf__call_tensor(call, argument + 1, 2, &parameters));
    const int64_t n_rows = weight->sizes[0], dim = weight->sizes[1];
    const bool is_int4 = dim > 0 && dim % 2 == 0 && codes.sizes[1] == dim / 2;
    if (codes.dtype != aoti_torch_dtype_uint8() || codes.sizes[0] != n_rows ||
        (codes.sizes[1] != dim && !is_int4) || (codes.sizes[1] > 1 && codes.strides[1] != 1))
        return rf__tensor_refuse(&codes, RF_ERR_VALUE,
                                 "uint8 [%lld, %lld] for int8 or half as many columns for int4, with "
                                 "contiguous rows",
                                 (long long)n_rows, (long long)dim);
    RF_CHECK(rf__tensor_dtype(&parameters, &rows->parameters_dtype));
    if (parameters.sizes[0] != n_rows || parameters.sizes[1] != 2 || parameters.strides[1] != 1)
        return rf__tensor_refuse(&parameters, RF_ERR_VALUE, "[%lld, 2], with contiguous rows",
                                 (long long)n_rows);
    rows->rows = n_rows;
    rows->dim = dim;
    rows->dtype = is_int4 ? RF_INT4_ROWS : RF_INT8_ROWS;
    rows->codes = (void *)(uintptr_t)codes.data;
    rows->parameters = (void *)(uintptr_t)parameters.data;
    rows->pitch = n_rows > 1 ? codes.strides[0] : codes.sizes[1];
    rows->parameters_pitch =
        rf__elements_bytes(rows->parameters_dtype, n_rows > 1 ? parameters.strides[0] : 2);
    return RF_OK;
}

static rf_status quantize(rf__call *call) {
    enum { WEIGHT, CODES };
    rf_float_rows floats;
    rf_quantized_rows codes;
    rf__tensor weight;
    rf_executor executor;
    void *error = NULL;
    const int64_t sizes[1] = {1};
    RF_CHECK(rf__call_device(call, WEIGHT));
    RF_CHECK(floats_read(call, WEIGHT, &floats, &weight));
    RF_CHECK(codes_read(call, CODES, &weight, &codes));
    RF_CHECK(rf__call_output(call, 0, 1, sizes, aoti_torch_dtype_float64(), &error));
    RF_CHECK(rf__call_executor(&executor));
    return rf_quantize_rows_cpu(&floats, &codes, error, &executor);
}

static rf_status dequantize(rf__call *call) {
    enum { CODES, PARAMETERS, WEIGHT };
    rf_float_rows floats;
    rf_quantized_rows codes;
    rf__tensor weight;
    rf_executor executor;
    RF_CHECK(rf__call_device(call, CODES));
    RF_CHECK(floats_read(call, WEIGHT, &floats, &weight));
    RF_CHECK(codes_read(call, CODES, &weight, &codes));
    RF_CHECK(rf__call_executor(&executor));
    return rf_dequantize_rows_cpu(&codes, &floats, &executor);
}

const rf__operator rf__torch_quantize_rows = {
    "(Tensor weight, Tensor(a!) codes, Tensor(b!) parameters) -> Tensor", RF__CPU, quantize};
const rf__operator rf__torch_dequantize_rows = {"(Tensor codes, Tensor parameters, Tensor(a!) weight) -> ()",
                                                RF__CPU, dequantize};
