/* rf__gradient_list_new, rf__gradient_list_free. */
#include "families/fused_backward/torch/gradient_list.h"

#include "core/buffer_cache.h"
#include "core/validate.h"

static void block_release(void *data, void *context) {
    (void)data; /* that of the block */
    rf__cached_block_release(context);
}

/* Creates a tensor for the values of a sparse gradient, [count, dim]. On the CPU the memory of large ones is
 * cached for the next step. */
static rf_status values_new(const rf__call *call, int64_t count, const rf_fused_backward_params *params,
                            AtenTensorHandle *tensor, void **values) {
    const int64_t sizes[2] = {count, params->dim}, strides[2] = {params->dim, 1};
    const int32_t dtype = rf__torch_dtype(params->dtype);
    const size_t bytes = (size_t)rf__elements_bytes(params->dtype, count * params->dim);
    const rf__torch_device device = call->device;
    if (!rf__call_on_cpu(call) || bytes < RF__CACHED_BLOCK_LEAST)
        return rf__call_new(call, 2, sizes, dtype, tensor, values);
    rf__cached_block *block = rf__cached_block_take(bytes);
    RF_FAIL_IF(block == NULL, RF_ERR_MEMORY, "no memory for a gradient of %zu bytes", bytes);
    *values = block->data;
    /* On failure the block is lost, because torch may or may not have released it. */
    RF__TORCH_CHECK(torch_from_blob(block->data, 2, sizes, strides, 0, dtype, device.type, device.index,
                                    tensor, aoti_torch_layout_strided(), NULL, 0, block_release, block));
    return RF_OK;
}

rf_status rf__gradient_list_new(void *context, int64_t count, int64_t **rows, void **values) {
    rf__gradient_list *to = context;
    const int64_t sizes[2] = {1, count}, dims = to->row_dims;
    void *data = NULL;
    RF_CHECK(rf__call_new(to->call, dims, sizes + 2 - dims, aoti_torch_dtype_int64(), &to->rows, &data));
    *rows = data;
    return values_new(to->call, count, to->params, &to->values, values);
}

void rf__gradient_list_free(const rf__gradient_list *list) {
    rf__tensor_free(list->rows);
    rf__tensor_free(list->values);
}
