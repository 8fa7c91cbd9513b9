/* The program of a call on a GPU. */
#include "families/embedding_columns/torch/columns_torch.h"

static rf_status copy_make(const rf_embedding_columns_params *params, rf__columns_program *program) {
    const rf__cuda_device *device = NULL;
    RF_CHECK(rf__cuda_device_get(program->stream.device, &device));
    if (device->driver == NULL) { /* described: nothing reads it */
        program->words = params->program;
        return RF_OK;
    }
    RF_CHECK(rf__cuda_store_of(device, program->stream.stream, &program->allocator, &program->store));
    RF_CHECK(rf__cuda_block_shared(&program->store, params->program,
                                   (size_t)params->program_words * sizeof *params->program, &program->copy));
    program->words = (const int64_t *)(uintptr_t)program->copy.memory;
    return RF_OK;
}

rf_status rf__columns_program_read(rf__call *call, int argument, const rf_embedding_columns_params *params,
                                   rf__columns_program *program) {
    rf__tensor is_present;
    *program = (rf__columns_program){.allocator = rf__call_allocator(call)};
    RF_CHECK(rf__call_stream(call, &program->stream));
    if (!call->values[argument].is_present) return copy_make(params, program);
    RF_CHECK(rf__call_tensor(call, argument, 1, &is_present));
    if (is_present.dtype != aoti_torch_dtype_int64() || is_present.sizes[0] != params->program_words ||
        !rf__tensor_is_contiguous(&is_present))
        return rf__tensor_refuse(&is_present, RF_ERR_VALUE, "contiguous int64 [%lld], a copy of program",
                                 (long long)params->program_words);
    program->words = is_present.data;
    return RF_OK;
}
