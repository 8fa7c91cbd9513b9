/* ikbo_attention's portable path for GPUs on tensors of the CPU, for tests/c/test_torch_attention.py: its
 * kernels run on the host (kernels.cu), and the device is simulated. The test supplies torch's attention. */
#include <stdio.h>
#include <string.h>

#include "gpu/launches/launches.h"
#include "torch/dispatch.h"
#include "families/ikbo_attention/torch/ikbo_attention_torch.h"

static rf__cuda_device gpu = {.gpu = {.cc_major = 8}}; /* single thread */
static rf_error_record record; /* the only error word; single thread */
static rf_u32 claimed; /* single thread */

rf_status rf__cuda_device_get(int32_t ordinal, const rf__cuda_device **device) {
    RF_FAIL_IF(ordinal != 3, RF_ERR_INTERNAL, "device %d", (int)ordinal);
    *device = &gpu;
    return RF_OK;
}

bool rf__call_is_explained(const rf__call *call) {
    (void)call;
    return false;
}

rf_status rf__call_stream(const rf__call *call, rf_cuda_stream *stream) {
    (void)call;
    *stream = (rf_cuda_stream){.device = 3};
    return RF_OK;
}

/* Never called: it is launches.c's. */
rf_status rf__jit_compile(const rf__kernel_source *source, const rf__kernel_options *options,
                          const char *arch, void **cubin, int64_t *cubin_bytes, rf__kernel_info *info) {
    (void)source, (void)options, (void)arch, (void)cubin, (void)cubin_bytes, (void)info;
    return RF_ERR_INTERNAL;
}

/* Raises an earlier error. */
static rf_status check(void) {
    if (record.ready != RF_ERROR_READY) return RF_OK;
    record.ready = RF_ERROR_NONE;
    record.raised++;
    return rf__fail(RF_ERR_INDEX, "argument %u[%lld] is %lld, allowed %lld to %lld", record.argument,
                    (long long)record.position, (long long)record.value, (long long)record.limit,
                    (long long)record.lookups);
}

typedef bool host_run(const char *entry, unsigned blocks, unsigned threads, const void *arguments);
host_run host_run_2, host_run_4, host_run_8, host_run_16;

rf_status rf__launches_run(const rf__cuda_device *device, rf__launches *launches, const uint64_t *uploads,
                           const rf_cuda_allocator *allocator, void *stream) {
    const rf_error_word word = {&claimed, &record};
    (void)device, (void)uploads, (void)allocator, (void)stream;
    if (launches->checks) RF_CHECK(check());
    for (int32_t i = 0; i < launches->n_bindings; i++) {
        RF_FAIL_IF(launches->bindings[i].bound != RF__BOUND_ERRORS, RF_ERR_INTERNAL, "another binding");
        memcpy(launches->bytes + launches->bindings[i].at, &word, sizeof word);
    }
    for (int32_t i = 0; i < launches->count; i++) {
        const rf__kernel_launch *launch = &launches->launches[i];
        const int32_t vector = *(const int32_t *)rf__launches_key(launches, i);
        host_run *run = vector == 2   ? host_run_2
                        : vector == 4 ? host_run_4
                        : vector == 8 ? host_run_8
                                      : host_run_16;
        RF_FAIL_IF(!run(launch->source->entry, launch->grid[0], launch->block[0],
                        rf__launches_arguments(launches, i)),
                   RF_ERR_INTERNAL, "no kernel %s", launch->source->entry);
    }
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
    operators[0] = (rf__registered){"packed", &operators_of[0], packed_boxed, {0}, NULL};
    operators[1] = (rf__registered){"set_capability", &operators_of[1], set_capability_boxed, {0}, NULL};
    rf__operators_register("recfuse_attention", operators, 2);
}
