/* recfuse::ikbo_attention, with its log-sum-exp and with the users' self-attention, on CPU and GPU.
 *
 * Two ways to the same result: "packed" is torch's own attention over each user's candidates as one long
 * query, on any device; "fused" is one launch (rf_ikbo_attention_cuda).
 */
#include "families/ikbo_attention/torch/ikbo_attention_torch.h"
#include "torch/operators.h"

static rf_status path_choose(const rf__call *call, rf__attention *attention) {
    const bool on_cpu = rf__call_on_cpu(call);
    RF_FAIL_IF(
        attention->path == RF__ATTENTION_FUSED && on_cpu, RF_ERR_UNSUPPORTED,
        "path is \"fused\", which is a kernel of GPUs, with tensors on the CPU. Use \"auto\" or \"packed\".");
    if (attention->path != RF__ATTENTION_AUTO) return RF_OK;
    const bool fits = !on_cpu && rf_ikbo_attention_takes(&attention->params, rf__call_gpu(call));
    attention->path = fits ? RF__ATTENTION_FUSED : RF__ATTENTION_PACKED;
    return RF_OK;
}

/* Creates the outputs of one set of queries; `lse` -1: none. */
static rf_status outputs_new(rf__call *call, const rf_ikbo_attention_params *params, int out, int lse,
                             rf_ikbo_queries *queries) {
    const int64_t sizes[4] = {queries->count, queries->queries, params->heads, params->dim};
    const int64_t lse_sizes[3] = {queries->count, params->heads, queries->queries};
    void *data = NULL;
    RF_CHECK(rf__call_output(call, out, 4, sizes, rf__torch_dtype(params->dtype), &queries->out));
    if (lse < 0) return RF_OK;
    RF_CHECK(rf__call_output(call, lse, 3, lse_sizes, aoti_torch_dtype_float32(), &data));
    queries->lse = data;
    return RF_OK;
}

static rf_status run_fused(rf__call *call, rf__attention *attention) {
    const rf_cuda_allocator allocator = rf__call_allocator(call);
    rf_cuda_stream stream;
    attention->params.allocator = &allocator;
    RF_CHECK(rf__call_stream(call, &stream));
    return rf_ikbo_attention_cuda(&attention->params, &stream);
}

static rf_status run_call(rf__call *call, bool self, bool with_lse) {
    rf__attention attention;
    const int sets = 1 + self;
    RF_CHECK(rf__attention_read(call, self, &attention));
    RF_CHECK(path_choose(call, &attention));
    rf_ikbo_attention_params *params = &attention.params;
    if (self) RF_CHECK(outputs_new(call, params, 0, with_lse ? sets : -1, &params->users));
    RF_CHECK(outputs_new(call, params, sets - 1, with_lse ? 2 * sets - 1 : -1, &params->candidates));
    if (attention.path == RF__ATTENTION_FUSED) return run_fused(call, &attention);
    if (rf__call_on_cpu(call)) return rf__attention_packed_cpu(call, &attention);
    return rf__attention_packed_cuda(call, &attention);
}

/* Gives the number of the path that such a call takes. */
static rf_status tell_path(rf__call *call, bool self) {
    rf__attention attention;
    RF_CHECK(rf__attention_read(call, self, &attention));
    RF_CHECK(path_choose(call, &attention));
    call->outputs[0].integer = attention.path;
    call->outputs[0].is_present = true;
    return RF_OK;
}

static rf_status path_run(rf__call *call) { return tell_path(call, false); }
static rf_status self_path_run(rf__call *call) { return tell_path(call, true); }
static rf_status run(rf__call *call) { return run_call(call, false, false); }
static rf_status run_lse(rf__call *call) { return run_call(call, false, true); }
static rf_status run_self(rf__call *call) { return run_call(call, true, false); }
static rf_status run_self_lse(rf__call *call) { return run_call(call, true, true); }

#define DEVICES (RF__CPU | RF__CUDA)
const rf__operator rf__torch_ikbo_attention = {"(" RF__ATTENTION_ARGUMENTS " -> Tensor", DEVICES, run};
const rf__operator rf__torch_ikbo_attention_lse = {"(" RF__ATTENTION_ARGUMENTS " -> (Tensor, Tensor)",
                                                   DEVICES, run_lse};
const rf__operator rf__torch_ikbo_attention_self = {"(" RF__ATTENTION_SELF_ARGUMENTS " -> (Tensor, Tensor)",
                                                    DEVICES, run_self};
const rf__operator rf__torch_ikbo_attention_self_lse = {
    "(" RF__ATTENTION_SELF_ARGUMENTS " -> (Tensor, Tensor, Tensor, Tensor)", DEVICES, run_self_lse};
const rf__operator rf__torch__ikbo_attention_path = {"(" RF__ATTENTION_ARGUMENTS " -> int", DEVICES,
                                                     path_run};
const rf__operator rf__torch__ikbo_attention_self_path = {"(" RF__ATTENTION_SELF_ARGUMENTS " -> int", DEVICES,
                                                          self_path_run};
