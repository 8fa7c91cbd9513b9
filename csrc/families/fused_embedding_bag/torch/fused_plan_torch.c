/* Runs a fused call: on a CPU, or on a GPU by the plan that its arguments describe. */
#include "families/fused_embedding_bag/check_fused.h"
#include "families/fused_embedding_bag/fused.h"
#include "families/fused_embedding_bag/torch/fused_arguments.h"
#include "gpu/driver/memory.h"

/* schedules: int32 [features, 5] on the CPU, an array of rf_fused_schedule; may be NULL. */
static rf_status schedules_read(rf__call *call, int argument, int64_t n_features, rf_fused_plan *plan) {
    enum { FIELDS = sizeof(rf_fused_schedule) / sizeof(int32_t) };
    rf__tensor schedules;
    if (!call->values[argument].is_present) return RF_OK;
    RF_CHECK(rf__call_host_tensor(call, argument, 2, &schedules));
    if (schedules.dtype != aoti_torch_dtype_int32() || schedules.sizes[0] != n_features ||
        schedules.sizes[1] != FIELDS)
        return rf__tensor_refuse(&schedules, RF_ERR_VALUE,
                                 "int32 [%lld, %d], a row a feature with kind, threads, distance, split, "
                                 "expected lookups of a bag times 16",
                                 (long long)n_features, FIELDS);
    RF_CHECK(rf__call_contiguous(call, &schedules, schedules.dtype));
    plan->schedules = schedules.data;
    return RF_OK;
}

/* mapping: int32 [rows, 8] on the CPU, may be NULL. From page-locked memory it is copied to the device here,
 * asynchronously; torch keeps the memory until then. From other memory torch's copy may wait for the stream,
 * and each replay of a captured copy would read memory that may have other contents by then: in these cases
 * the call makes its own copy. */
static rf_status mapping_read(rf__call *call, int argument, int64_t bags, const rf_cuda_stream *stream,
                              rf_fused_plan *plan) {
    enum { FIELDS = 8 };
    rf__tensor mapping;
    const rf__cuda_device *device = NULL;
    AtenTensorHandle on_device = NULL;
    void *data = NULL;
    bool captured = false;
    if (!call->values[argument].is_present) return RF_OK;
    RF_CHECK(rf__call_host_tensor(call, argument, 2, &mapping));
    if (mapping.dtype != aoti_torch_dtype_int32() || mapping.sizes[1] != FIELDS ||
        (mapping.sizes[0] == 0 && bags > 0))
        return rf__tensor_refuse(&mapping, RF_ERR_VALUE, "int32 [rows, %d], as the module's map() makes",
                                 FIELDS);
    RF_CHECK(rf__call_contiguous(call, &mapping, mapping.dtype));
    plan->mapping = mapping.data;
    plan->mapping_rows = mapping.sizes[0];
    if (mapping.sizes[0] == 0) return RF_OK;
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    if (device->driver == NULL) return RF_OK;
    RF_CHECK(rf__cuda_is_capturing(device, stream->stream, &captured));
    if (captured || !rf__cuda_is_page_locked(device, mapping.data)) return RF_OK;
    RF_CHECK(rf__call_temporary(call, 2, mapping.sizes, mapping.dtype, &on_device, &data));
    RF__TORCH_CHECK(aoti_torch_copy_(on_device, mapping.handle, true));
    plan->mapping_on_device = data;
    return RF_OK;
}

static rf_status pool_on_gpu(rf__call *call, int schedules, const rf_fused_embedding_bag_params *params,
                             const int64_t *columns) {
    const int warps_argument = schedules + 1, mapping = schedules + 2;
    const rf_cuda_allocator allocator = rf__call_allocator(call);
    rf_fused_plan plan = {.allocator = &allocator};
    rf_cuda_stream stream;
    const int64_t warps = call->values[warps_argument].integer;
    RF_FAIL_IF(warps != 0 && (warps < 2 || warps > 64), RF_ERR_VALUE,
               "warps is %lld; expected 2 to 64, or 0 for a good default", (long long)warps);
    plan.warps = (int32_t)warps;
    RF_CHECK(rf__call_stream(call, &stream));
    RF_CHECK(schedules_read(call, schedules, params->n_features, &plan));
    RF_CHECK(mapping_read(call, mapping, params->bags, &stream, &plan));
    return rf__fused_run_call(params, columns, &plan, NULL, 0, &stream);
}

rf_status rf__fused_pool(rf__call *call, int schedules, const rf_fused_embedding_bag_params *params,
                         const int64_t *columns) {
    rf_executor executor;
    if (!rf__call_on_cpu(call)) return pool_on_gpu(call, schedules, params, columns);
    RF_CHECK(rf__check_fused_rows(params, columns));
    RF_CHECK(rf__call_executor(&executor));
    return rf_fused_embedding_bag_cpu(params, &executor);
}
