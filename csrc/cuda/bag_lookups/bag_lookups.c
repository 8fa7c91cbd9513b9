/* rf__bag_lookups_cuda: the launch of bag_lookups.cu. */
#include "base/bag_lookups.h"

#include <inttypes.h>
#include <stdio.h>

#include "cuda/bag_lookups/args.h"
#include "cuda/jit/jit.h"

static const rf__kernel_source source = {"bag_lookups/bag_lookups.cu", "rf_bag_lookups"};

typedef struct bag_lookups_variant {
    int32_t index_type, offset_type;
} bag_lookups_variant;

enum { BLOCK = 256, WARP = 32 };

static rf_status describe(const void *key, rf__kernel_options *options) {
    const bag_lookups_variant *variant = key;
    snprintf(options->defines, sizeof options->defines, "-DRF_INDEX=%s -DRF_OFFSET=%s -DRF_BLOCK=%d",
             rf__kernel_integer(variant->index_type), rf__kernel_integer(variant->offset_type), (int)BLOCK);
    return RF_OK;
}

rf_status rf__bag_lookups_cuda(const rf__bag_lookups_params *params, const rf_cuda_stream *stream) {
    const rf__cuda_device *device = NULL;
    const rf__kernel *kernel = NULL;
    if (params->lookups == 0 && params->bags == 0) return RF_OK;
    const int64_t bags_a_block = BLOCK / WARP;
    const rf_bag_lookups_args args = {.indices = params->indices,
                                      .offsets = params->offsets,
                                      .lookups = params->lookups,
                                      .bags = params->bags,
                                      .n_offsets = params->n_offsets,
                                      .rows = params->rows,
                                      .padding_idx = params->padding_idx,
                                      .row = params->row,
                                      .bag_of = params->bag_of,
                                      .sizes = params->sizes,
                                      .position_blocks = (params->lookups + BLOCK - 1) / BLOCK};
    const int64_t blocks = args.position_blocks + (params->bags + bags_a_block - 1) / bags_a_block;
    RF_FAIL_IF(blocks > INT32_MAX || params->bags == 0, RF_ERR_UNSUPPORTED,
               "%" PRId64 " lookups in %" PRId64 " bags: bags must be 1 or more, and both "
               "fewer than 2^39",
               params->lookups, params->bags);
    const bag_lookups_variant variant = {(int32_t)params->index_type, (int32_t)params->offset_type};
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    RF_CHECK(rf__jit_kernel(device, &source, &variant, sizeof variant, describe, &kernel));
    const rf__launch_config launch = {
        .function = kernel->function, .grid = {(uint32_t)blocks}, .block = {BLOCK}, .stream = stream->stream};
    RF_CHECK(rf__cuda_enter(device));
    return rf__cuda_leave_with(rf__launch(device, &launch, &args));
}

rf_status rf__bag_lookups_compile(const char *arch) {
    static const bag_lookups_variant every[] = {
        {RF_INT32, RF_INT32}, {RF_INT32, RF_INT64}, {RF_INT64, RF_INT32}, {RF_INT64, RF_INT64}};
    return rf__jit_compile_each(&source, every, sizeof every[0], sizeof every / sizeof every[0], describe,
                                arch);
}
