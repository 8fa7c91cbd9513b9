/* recfuse::_bag_lookups, for gradients: int64 [1, 2 * lookups + bags], the rows, bags and sizes of
 * base/bag_lookups.h one after another. */
#include "base/bag_lookups.h"
#include "torch/operators.h"

enum { INDICES, OFFSETS, ROWS, INCLUDE_LAST_OFFSET, PADDING_IDX };

static rf_status run(rf__call *call) {
    const rf__value *values = call->values;
    rf__bag_lookups_params params = {.rows = values[ROWS].integer,
                                     .padding_idx = values[PADDING_IDX].integer};
    rf_cuda_stream stream;
    void *data = NULL;
    RF_CHECK(rf__call_device(call, INDICES));
    RF_CHECK(rf__call_integers(call, INDICES, &params.indices, &params.lookups, &params.index_type));
    RF_CHECK(rf__call_integers(call, OFFSETS, &params.offsets, &params.n_offsets, &params.offset_type));
    params.bags = params.n_offsets - values[INCLUDE_LAST_OFFSET].boolean;
    RF_FAIL_IF(params.bags < 0, RF_ERR_VALUE, "offsets is empty, must have at least one element");
    const int64_t sizes[2] = {1, 2 * params.lookups + params.bags};
    RF_CHECK(rf__call_output(call, 0, 2, sizes, aoti_torch_dtype_int64(), &data));
    params.row = data;
    params.bag_of = params.row + params.lookups;
    params.sizes = params.bag_of + params.lookups;
    if (rf__device_is_cpu(call->device)) {
        rf__bag_lookups_cpu(&params);
        return RF_OK;
    }
    RF_CHECK(rf__call_stream(call, &stream));
    return rf__bag_lookups_cuda(&params, &stream);
}

const rf__operator rf__torch__bag_lookups = {
    "(Tensor indices, Tensor offsets, int rows, bool include_last_offset, int padding_idx) -> Tensor",
    RF__CPU | RF__CUDA, run};
