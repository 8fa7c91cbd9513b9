/* recfuse::pin_rows and recfuse::unpin: tensors -> rf_pin_rows_params. On the CPU they do nothing. */
#include "torch/ops.h"
#include "base/validate.h"

enum { WEIGHT, ROWS };

static rf_status pin(const rf__value *values, bool keep) {
    rf_status status = RF_OK;
    rf_pin_rows_params params = {0};
    rf__tensor weight, rows;
    rf__place place;
    rf_cuda_stream stream;
    rf_dtype dtype;
    AtenTensorHandle copy = NULL;
    RF_TRY(rf__tensor_place(values[WEIGHT].tensor, &place));
    if (rf__place_is_cpu(&place)) return RF_OK;
    RF_TRY(rf__tensor_read("weight", values[WEIGHT].tensor, 2, &place, &weight));
    RF_TRY(rf__tensor_dtype(&weight, &dtype));
    if (weight.sizes[1] > 1 && weight.strides[1] != 1) {
        return rf__fail(RF_ERR_VALUE,
                        "weight has rows of stride %lld, must have rows whose elements lie side by "
                        "side",
                        (long long)weight.strides[1]);
    }
    RF_TRY(rf__integers_read("rows", values[ROWS].tensor, &place, &copy, &rows, &params.index_type));
    params.weight = weight.data;
    params.rows = weight.sizes[0];
    params.row_bytes = weight.sizes[1] * rf__dtype_bytes(dtype);
    params.row_pitch = weight.strides[0] * rf__dtype_bytes(dtype);
    params.hot_rows = rows.data;
    params.n_hot_rows = rows.sizes[0];
    RF_TRY(rf__torch_stream(&place, &stream));
    RF_TRY(rf_pin_rows_cuda(&params, keep, &stream));
out:
    rf__tensor_free(copy);
    return status;
}

rf_status rf__torch_pin_rows(const rf__value *values, AtenTensorHandle *output) {
    (void)output;
    return pin(values, true);
}

rf_status rf__torch_unpin(const rf__value *values, AtenTensorHandle *output) {
    (void)output;
    rf_status status = RF_OK;
    rf__place place;
    if (values[ROWS].tensor != NULL) return pin(values, false);
    RF_TRY(rf__tensor_place(values[WEIGHT].tensor, &place));
    if (!rf__place_is_cpu(&place)) RF_TRY(rf_unpin_all_cuda(place.index));
out:
    return status;
}
