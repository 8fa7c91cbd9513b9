/* rf_embedding_columns_cuda: which variant of embedding_columns.cu runs, and its launch. */
#include <stdio.h>

#include "cuda/embedding_columns/embedding_columns.h"
#include "cuda/jit/jit.h"

static const rf__kernel_source source = {"embedding_columns/embedding_columns.cu", "rf_embedding_columns"};

/* All that the code depends on: nothing of a model but what kinds of columns and types it has. All of it int32_t: compared
 * bytewise. */
typedef struct columns_variant {
    int32_t units, tables, output, bags, check; /* tables: rf_dtype, -1: several */
} columns_variant;

static rf_status describe(const void *key, rf__kernel_options *options) {
    const columns_variant *variant = key;
    snprintf(options->defines, sizeof options->defines,
             "-DRF_UNITS=%d -DRF_TABLES=%d -DRF_OUTPUT=%d -DRF_BAGS=%d -DRF_CHECK=%d", (int)variant->units,
             (int)variant->tables, (int)variant->output, (int)variant->bags, (int)variant->check);
    return RF_OK;
}

static int32_t tables_of(const rf_embedding_columns_params *params) {
    for (int64_t i = 1; i < params->n_buffers; i++)
        if (params->buffers[i].dtype != params->buffers[0].dtype) return -1;
    return params->n_buffers > 0 ? (int32_t)params->buffers[0].dtype : RF_FLOAT32;
}

rf_status rf_embedding_columns_cuda(const rf_embedding_columns_params *params,
                                    const int64_t *program_on_device, const rf_cuda_stream *stream) {
    const rf__cuda_device *device = NULL;
    const rf__kernel *kernel = NULL;
    rf__columns_launch launch;
    rf_columns_args args; /* only tensors that there are are written, and read by the kernel */
    RF_CHECK(rf__columns_prepare(params, program_on_device, true, stream, &device, &launch, &args));
    if (launch.blocks == 0) return RF_OK;
    const columns_variant variant = {.units = launch.units,
                                     .tables = tables_of(params),
                                     .output = (int32_t)params->output_dtype,
                                     .bags = launch.columns.header->n_bag_tasks > 0,
                                     .check = params->check_bounds};
    RF_CHECK(rf__jit_kernel(device, &source, &variant, sizeof variant, describe, &kernel));
    const rf__launch_config config = {.function = kernel->function,
                                      .grid = {launch.blocks},
                                      .block = {RF_COLUMNS_BLOCK},
                                      .shared_bytes = (uint32_t)launch.shared_bytes,
                                      .stream = stream->stream};
    RF_CHECK(rf__cuda_enter(device));
    return rf__cuda_leave_with(rf__launch(device, &config, &args));
}

rf_status rf__columns_compile(const char *arch) {
    columns_variant variants[6];
    int32_t count = 0;
    for (int32_t dtype = RF_FLOAT32; dtype <= RF_BFLOAT16; dtype++)
        for (int32_t bags = 0; bags < 2; bags++)
            variants[count++] = (columns_variant){RF_COLUMNS_FEW_UNITS, dtype, dtype, bags, 1};
    return rf__jit_compile_each(&source, variants, sizeof variants[0], count, describe, arch);
}
