/* rf_embedding_bag_cuda, and the lowering of described calls. */
#include <inttypes.h>

#include "families/embedding_bag/check_embedding_bag.h"
#include "families/embedding_bag/embedding_bag.h"

static const char operator_name[] = "embedding_bag";

rf_status rf__embedding_bag_run(const rf__cuda_device *device, const rf_embedding_bag_params *params,
                                const rf_embedding_bag_schedule *schedule, void *stream) {
    rf__launches launches;
    rf__launches_init(&launches, operator_name);
    return rf__launches_finish(rf__embedding_bag_lower(&device->gpu, params, schedule, &launches), device,
                               &launches, NULL, stream);
}

rf_status rf_embedding_bag_cuda(const rf_embedding_bag_params *params,
                                const rf_embedding_bag_schedule *schedule, const rf_cuda_stream *stream) {
    const rf__cuda_device *device = NULL;
    RF_CHECK(rf__check_embedding_bag(params));
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    return rf__embedding_bag_run(device, params, schedule, stream->stream);
}

/* Checks the description of a call, whose addresses are known only by their alignment. */
static rf_status check_described(const rf_embedding_bag_params *params, int32_t alignment) {
    RF_FAIL_IF(alignment < rf__elements_bytes(params->dtype, 1) || alignment > 16 ||
                   (alignment & (alignment - 1)) != 0 || params->dim <= 0 ||
                   rf__elements_bytes(params->dtype, params->dim) % alignment != 0 ||
                   params->weight_stride < params->dim || params->bags <= 0 || params->lookups < 0,
               RF_ERR_VALUE,
               "recfuse.embedding_bag: a call cannot be lowered for dim %" PRId64 ", stride %" PRId64
               ", alignment %d, %" PRId64 " lookups and %" PRId64
               " bags; expected dim and bags of 1 or more, stride at least dim, and alignment a power of two "
               "that divides the bytes of a row, at most 16",
               params->dim, params->weight_stride, (int)alignment, params->lookups, params->bags);
    RF_FAIL_IF(params->rows < 0 || !rf__rows_fit(params->dtype, params->rows, params->weight_stride),
               RF_ERR_VALUE,
               "recfuse.embedding_bag: a call cannot be lowered for %" PRId64 " rows, %" PRId64
               " elements apart; expected 0 rows or more, and a size in bytes that fits int64",
               params->rows, params->weight_stride);
    return RF_OK;
}

rf_status rf__embedding_bag_lower_described(const rf__gpu *gpu, const rf_embedding_bag_params *params,
                                            const rf_embedding_bag_schedule *schedule, int32_t alignment,
                                            rf__launches *launches, rf_embedding_bag_schedule *complete) {
    rf_embedding_bag_params described = *params;
    RF_CHECK(check_described(params, alignment));
    described.weight = (const void *)(uintptr_t)alignment;
    described.output = (void *)(uintptr_t)alignment;
    described.output_stride = params->dim;
    *complete = *schedule;
    RF_CHECK(rf__embedding_bag_complete(gpu, &described, complete));
    return rf__embedding_bag_lower(gpu, &described, schedule, launches);
}
