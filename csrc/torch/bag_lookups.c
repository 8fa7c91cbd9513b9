/* recfuse::_bag_lookups, for gradients: int64 [1, 2 * lookups + bags], the rows, bags and sizes of
 * csrc/bag_lookups.h one after another. */
#include "base/bag_lookups.h"
#include "torch/ops.h"

enum { INDICES, OFFSETS, ROWS, INCLUDE_LAST_OFFSET, PADDING_IDX };

rf_status rf__torch__bag_lookups(const rf__value *values, AtenTensorHandle *output) {
    rf_status status = RF_OK;
    rf__bag_lookups_params params = {0};
    rf__place place;
    rf__tensor indices, offsets;
    AtenTensorHandle copies[2] = {NULL, NULL};
    void *data = NULL;
    RF_TRY(rf__tensor_place(values[INDICES].tensor, &place));
    RF_TRY(rf__integers_read("indices", values[INDICES].tensor, &place, &copies[0], &indices,
                             &params.index_type));
    RF_TRY(rf__integers_read("offsets", values[OFFSETS].tensor, &place, &copies[1], &offsets,
                             &params.offset_type));
    params.indices = indices.data;
    params.lookups = indices.sizes[0];
    params.offsets = offsets.data;
    params.n_offsets = offsets.sizes[0];
    params.bags = params.n_offsets - values[INCLUDE_LAST_OFFSET].boolean;
    params.rows = values[ROWS].integer;
    params.padding_idx = values[PADDING_IDX].integer;
    if (params.bags < 0) {
        status = rf__fail(RF_ERR_VALUE, "offsets is empty, must have at least one element");
        goto out;
    }
    RF_TRY(
        rf__tensor_new(1, 2 * params.lookups + params.bags, aoti_torch_dtype_int64(), &place, output, &data));
    params.row = data;
    params.bag_of = params.row + params.lookups;
    params.sizes = params.bag_of + params.lookups;
    if (rf__place_is_cpu(&place)) {
        rf__bag_lookups_cpu(&params);
    } else {
        rf_cuda_stream stream;
        RF_TRY(rf__torch_stream(&place, &stream));
        RF_TRY(rf__bag_lookups_cuda(&params, &stream));
    }
out:
    for (int i = 1; i >= 0; i--) rf__tensor_free(copies[i]);
    return status;
}
