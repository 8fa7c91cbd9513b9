/* rf_fused_embedding_cuda. */
#include <stddef.h>

#include "families/fused_embedding/check_fused_embedding.h"
#include "families/fused_embedding/fused_embedding.h"

rf_status rf_fused_embedding_cuda(const rf_fused_embedding_params *params, const rf_cuda_stream *stream) {
    const rf__cuda_device *device = NULL;
    rf__launches launches;
    RF_CHECK(rf__check_fused_embedding(params));
    RF_FAIL_IF(params->output == NULL && params->output_dim > 0 && rf__history_slots(params) > 0,
               RF_ERR_VALUE, "recfuse.fused_embedding: output is NULL");
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    rf__launches_init(&launches, "fused_embedding");
    return rf__launches_finish(rf__fused_embedding_lower(params, &launches), device, &launches, NULL,
                               stream->stream);
}
