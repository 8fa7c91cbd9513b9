/* rf_embedding_columns_cuda: which variant of embedding_columns.cu runs, and its launch. */
#include <stddef.h>
#include <stdio.h>

#include "core/validate.h"
#include "families/embedding_columns/embedding_columns.h"

static const rf__kernel_source source = {"families/embedding_columns/embedding_columns.cu",
                                         "rf_embedding_columns"};

/* Everything on which the code depends: of a model only its kinds of columns and types. All of it int32_t:
 * compared bytewise. */
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

/* The lookups of tables are unknown before the kernel runs: counts one row per table and sample. */
static void traffic_count(const rf_embedding_columns_params *params, int64_t read_bytes,
                          rf__kernel_launch *launch) {
    const int64_t output = rf__elements_bytes(params->output_dtype, params->batch * params->output_dim);
    launch->read_bytes = read_bytes + output;
    launch->written_bytes = output;
    launch->flops = (double)params->batch * (double)params->output_dim;
}

rf_status rf__embedding_columns_lower(const rf__gpu *gpu, const rf_embedding_columns_params *params,
                                      const int64_t *program_on_device, rf__launches *launches) {
    rf__columns_launch columns;
    rf_columns_args args; /* the kernel writes, copies and reads only the tensors of the call */
    RF_CHECK(rf__columns_prepare(gpu, params, program_on_device, true, launches, &columns, &args));
    if (columns.blocks == 0) return RF_OK;
    const columns_variant variant = {.units = columns.units,
                                     .tables = tables_of(params),
                                     .output = (int32_t)params->output_dtype,
                                     .bags = columns.has_bags,
                                     .check = params->check_bounds};
    rf__kernel_launch launch = {.source = &source,
                                .describe = describe,
                                .grid = {columns.blocks},
                                .block = {RF_COLUMNS_BLOCK},
                                .shared_bytes = (uint32_t)columns.shared_bytes};
    traffic_count(params, columns.read_bytes, &launch);
    RF_CHECK(rf__launches_add(launches, &launch, &variant, sizeof variant, &args,
                              RF_COLUMNS_ARGS_BYTES(columns.units)));
    rf__launches_bind_errors(launches, offsetof(rf_columns_args, errors));
    return RF_OK;
}

rf_status rf_embedding_columns_cuda(const rf_embedding_columns_params *params,
                                    const int64_t *program_on_device, const rf_cuda_stream *stream) {
    const rf__cuda_device *device = NULL;
    rf__launches launches;
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    rf__launches_init(&launches, "embedding_columns");
    return rf__launches_finish(
        rf__embedding_columns_lower(&device->gpu, params, program_on_device, &launches), device, &launches,
        NULL, stream->stream);
}
