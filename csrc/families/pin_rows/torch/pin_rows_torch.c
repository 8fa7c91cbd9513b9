/* recfuse::pin_rows and recfuse::unpin: tensors -> rf_pin_rows_params. On the CPU they do nothing. */
#include "core/validate.h"
#include "torch/operators.h"

enum { WEIGHT, ROWS };

static rf_status pin(rf__call *call, bool pins) {
    rf_pin_rows_params params = {0};
    rf__tensor weight;
    rf_cuda_stream stream;
    rf_dtype dtype;
    RF_CHECK(rf__call_device(call, WEIGHT));
    if (rf__call_on_cpu(call)) return RF_OK;
    RF_CHECK(rf__call_tensor(call, WEIGHT, 2, &weight));
    RF_CHECK(rf__tensor_dtype(&weight, &dtype));
    RF_FAIL_IF(weight.sizes[1] > 1 && weight.strides[1] != 1, RF_ERR_VALUE,
               "weight has rows of stride %lld; expected rows whose elements lie side by side",
               (long long)weight.strides[1]);
    RF_CHECK(rf__call_integers(call, ROWS, &params.hot_rows, &params.n_hot_rows, &params.index_type));
    params.weight = weight.data;
    params.rows = weight.sizes[0];
    const rf__row_format row = rf__row_format_of(dtype, weight.sizes[1], weight.strides[0]);
    params.row_bytes = row.bytes;
    params.row_pitch = row.pitch;
    RF_CHECK(rf__call_stream(call, &stream));
    return rf_pin_rows_cuda(&params, pins, &stream);
}

static rf_status pin_rows(rf__call *call) { return pin(call, true); }

static rf_status unpin(rf__call *call) {
    if (call->values[ROWS].is_present) return pin(call, false);
    RF_CHECK(rf__call_device(call, WEIGHT));
    if (!rf__device_is_cpu(call->device)) RF_CHECK(rf_unpin_all_cuda(call->device.index));
    return RF_OK;
}

const rf__operator rf__torch_pin_rows = {"(Tensor weight, Tensor rows) -> ()", RF__CPU | RF__CUDA, pin_rows};
const rf__operator rf__torch_unpin = {"(Tensor weight, Tensor? rows=None) -> ()", RF__CPU | RF__CUDA, unpin};
