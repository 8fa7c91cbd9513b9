/* ikbo_attention's portable path for GPUs on tensors of the CPU, for tests/c/test_torch_attention.py: its kernels run on the
 * host (kernels.cu), and the device is made up here. torch's attention is the test's. */
#include <stdio.h>
#include <string.h>

#include "cuda/jit/jit.h"
#include "torch/dispatch.h"
#include "torch/ikbo/ikbo_attention.h"

static rf__cuda_device gpu = {.gpu = {.cc_major = 8}}; /* one thread alone tests */
static rf_error_record record; /* the one error word; one thread alone tests */
static rf_u32 claimed; /* one thread alone tests */

rf_status rf__cuda_device_get(int32_t ordinal, const rf__cuda_device **device) {
    RF_FAIL_IF(ordinal != 3, RF_ERR_INTERNAL, "device %d", (int)ordinal);
    *device = &gpu;
    return RF_OK;
}

rf_status rf__cuda_enter(const rf__cuda_device *device) {
    (void)device;
    return RF_OK;
}

rf_status rf__cuda_leave_with(rf_status status) { return status; }

rf_status rf__call_stream(const rf__call *call, rf_cuda_stream *stream) {
    (void)call;
    *stream = (rf_cuda_stream){.device = 3};
    return RF_OK;
}

rf__cuda_error_word rf__cuda_error_word_of(const rf__cuda_error_words *words, const void *weight,
                                           uint64_t shape) {
    (void)words, (void)weight, (void)shape;
    return (rf__cuda_error_word){{&claimed, &record}, &record};
}

rf_status rf__cuda_check_word(const rf__cuda_device *device, rf__cuda_error_word word, void *stream) {
    (void)device, (void)stream;
    if (word.record->ready != RF_ERROR_READY) return RF_OK;
    word.record->ready = RF_ERROR_NONE;
    word.record->raised++;
    return rf__fail(RF_ERR_INDEX, "argument %u[%lld] is %lld, allowed %lld to %lld", word.record->argument,
                    (long long)word.record->position, (long long)word.record->value,
                    (long long)word.record->limit, (long long)word.record->lookups);
}

/* A kernel by its name and vector: the function of a launch. */
typedef struct host_kernel {
    rf__kernel kernel;
    const char *entry;
    int32_t vector;
} host_kernel;

rf_status rf__jit_kernel(const rf__cuda_device *device, const rf__kernel_source *source, const void *key,
                         size_t key_size, rf__kernel_describe describe, const rf__kernel **kernel) {
    static host_kernel last; /* one thread alone tests */
    (void)device, (void)key_size, (void)describe;
    last = (host_kernel){.entry = source->entry, .vector = *(const int32_t *)key};
    last.kernel.function = (rf__cu_function)&last;
    *kernel = &last.kernel;
    return RF_OK;
}

typedef bool host_run(const char *entry, unsigned blocks, unsigned threads, const void *arguments);
host_run host_run_2, host_run_4, host_run_8, host_run_16;

rf_status rf__launch(const rf__cuda_device *device, const rf__launch_config *config, const void *arguments) {
    const host_kernel *kernel = (const host_kernel *)config->function;
    host_run *run = kernel->vector == 2   ? host_run_2
                    : kernel->vector == 4 ? host_run_4
                    : kernel->vector == 8 ? host_run_8
                                          : host_run_16;
    (void)device;
    RF_FAIL_IF(!run(kernel->entry, config->grid[0], config->block[0], arguments), RF_ERR_INTERNAL,
               "no kernel %s", kernel->entry);
    return RF_OK;
}

/* Passes a tensor that the caller keeps. */
static void pass_borrowed(rf__dispatch *call, AtenTensorHandle tensor) {
    rf__tensor seen;
    AtenTensorHandle view = NULL;
    if (rf__tensor_read("", tensor, RF__ANY_DIM, rf__device_cpu(), &seen) == RF_OK)
        (void)rf__tensor_view(tensor, seen.dim, seen.sizes, seen.strides, 0, &view);
    rf__pass_tensor(call, view);
}

/* The test's operator. */
static int32_t efficient(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value,
                         AtenTensorHandle *bias, AtenTensorHandle *cu_seqlens_q,
                         AtenTensorHandle *cu_seqlens_k, int64_t *max_seqlen_q, int64_t *max_seqlen_k,
                         double dropout_p, int64_t custom_mask_type, int32_t compute_log_sumexp,
                         double *scale, AtenTensorHandle *seqlen_k, int64_t *window_size,
                         AtenTensorHandle *output, AtenTensorHandle *logsumexp, AtenTensorHandle *seed,
                         AtenTensorHandle *offset, int64_t *most_q, int64_t *most_k) {
    rf__dispatch call = rf__dispatch_of("recfuse_efficient::attend", "");
    if (bias != NULL || window_size != NULL || dropout_p != 0 || custom_mask_type != 0) return 1;
    pass_borrowed(&call, query);
    pass_borrowed(&call, key);
    pass_borrowed(&call, value);
    pass_borrowed(&call, *cu_seqlens_q);
    pass_borrowed(&call, *cu_seqlens_k);
    pass_borrowed(&call, *seqlen_k);
    rf__pass_integer(&call, *max_seqlen_q);
    rf__pass_integer(&call, *max_seqlen_k);
    rf__pass_boolean(&call, compute_log_sumexp);
    rf__pass_number(&call, *scale);
    const rf_status status = rf__dispatch_run(&call, 4);
    *output = call.results[0];
    *logsumexp = call.results[1];
    *seed = call.results[2];
    *offset = call.results[3];
    *most_q = *most_k = 0;
    return status != RF_OK;
}

rf_status rf__call_efficient_attention(aoti_torch_cuda__efficient_attention_forward_type **function) {
    *function = efficient;
    return RF_OK;
}

static rf_status outputs_new(rf__call *call, const rf_ikbo_attention_params *params, int first,
                             rf_ikbo_queries *queries) {
    const int64_t sizes[4] = {queries->count, queries->queries, params->heads, params->dim};
    const int64_t lse_sizes[3] = {queries->count, params->heads, queries->queries};
    void *lse = NULL;
    RF_CHECK(rf__call_output(call, first, 4, sizes, rf__torch_dtype(params->dtype), &queries->out));
    RF_CHECK(rf__call_output(call, 2 + first, 3, lse_sizes, aoti_torch_dtype_float32(), &lse));
    if (params->check_bounds) queries->lse = lse; /* so that a test has calls of both kinds */
    return RF_OK;
}

static rf_status packed(rf__call *call) {
    rf__attention attention;
    RF_CHECK(rf__attention_read(call, true, &attention));
    RF_CHECK(outputs_new(call, &attention.params, 0, &attention.params.users));
    RF_CHECK(outputs_new(call, &attention.params, 1, &attention.params.candidates));
    return rf__attention_packed_cuda(call, &attention);
}

static rf_status set_capability(rf__call *call) {
    gpu.gpu.cc_major = (int32_t)call->values[0].integer;
    return RF_OK;
}

static const rf__operator operators_of[] = {
    {"(" RF__ATTENTION_SELF_ARGUMENTS " -> (Tensor, Tensor, Tensor, Tensor)", RF__CPU, packed},
    {"(int major) -> ()", RF__ANYWHERE, set_capability},
};

static rf__registered operators[2]; /* filled once, while the library is loaded */

static void packed_boxed(StableIValue *stack, uint64_t n_in, uint64_t n_out) {
    (void)n_in, (void)n_out;
    rf__call_run(&operators[0], stack);
}

static void set_capability_boxed(StableIValue *stack, uint64_t n_in, uint64_t n_out) {
    (void)n_in, (void)n_out;
    rf__call_run(&operators[1], stack);
}

__attribute__((constructor)) static void register_operators(void) {
    operators[0] = (rf__registered){"packed", &operators_of[0], packed_boxed, {0}};
    operators[1] = (rf__registered){"set_capability", &operators_of[1], set_capability_boxed, {0}};
    rf__operators_register("recfuse_attention", operators, 2);
}
