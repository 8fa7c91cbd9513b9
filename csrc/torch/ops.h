/* The torch operators: their schemas, and how a boxed call becomes a C call and an exception. */
#ifndef RECFUSE_TORCH_OPS_H
#define RECFUSE_TORCH_OPS_H

#include "torch/values.h"

/* X(name, kinds of the arguments as in values.h, schema). `rf__torch_<name>` is the kernel of CPU and CUDA;
 * all return one tensor or nothing. */
#define RF__OPERATOR_LIST(X)                                                                             \
    X(embedding_bag, "tttsobibbiss",                                                                     \
      "(Tensor weight, Tensor indices, Tensor offsets, str mode=\"mean\", "                              \
      "Tensor? per_sample_weights=None, bool include_last_offset=False, int padding_idx=-1, "            \
      "bool scale_grad_by_freq=False, bool sparse=False, int prefetch_distance=-1, "                     \
      "str bounds_check=\"on\", str schedule=\"\") -> Tensor")                                           \
    X(_bag_lookups, "ttibi",                                                                             \
      "(Tensor indices, Tensor offsets, int rows, bool include_last_offset, int padding_idx) -> Tensor") \
    X(pin_rows, "tt", "(Tensor weight, Tensor rows) -> ()")                                              \
    X(unpin, "to", "(Tensor weight, Tensor? rows=None) -> ()")                                           \
    X(fused_embedding_bag, "ltttiobisoio",                                                               \
      "(Tensor[] buffers, Tensor features, Tensor indices, Tensor offsets, SymInt output_dim, "          \
      "Tensor? per_sample_weights=None, bool sparse=False, int prefetch_distance=-1, "                   \
      "str bounds_check=\"on\", Tensor? schedules=None, int warps=0, Tensor? mapping=None) -> Tensor")

/* A kernel: borrows `values`, gives a new tensor in *output (NULL before, and on failure) where its schema has
 * one. */
typedef rf_status (*rf__operator)(const rf__value *values, AtenTensorHandle *output);

#define RF__OPERATOR_DECLARE(name, kinds, schema) \
    rf_status rf__torch_##name(const rf__value *values, AtenTensorHandle *output);
RF__OPERATOR_LIST(RF__OPERATOR_DECLARE)
#undef RF__OPERATOR_DECLARE

/* Threads of torch's own pool; in a forked child the caller's alone. */
rf_status rf__torch_executor(rf_executor *executor);
/* Arguments that several operators share; each names what is allowed. */
rf_status rf__bounds_check_parse(StringHandle string, bool *check);
rf_status rf__prefetch_distance_parse(int64_t value, int32_t *distance);
/* A 1-D int32 or int64 argument at `place`, contiguous; *copy as in rf__tensor_make_contiguous. */
rf_status rf__integers_read(const char *argument, AtenTensorHandle handle, const rf__place *place,
                            AtenTensorHandle *copy, rf__tensor *integers, rf_int_type *type);
/* per_sample_weights ([lookups], may be NULL) as contiguous float32; *copy as in rf__tensor_make_contiguous. */
rf_status rf__sample_weights_read(AtenTensorHandle handle, int64_t lookups, const rf__place *place,
                                  AtenTensorHandle *copy, const float **weights);
/* torch's current stream of a GPU. RF_ERR_UNSUPPORTED: this torch has no CUDA. */
rf_status rf__torch_stream(const rf__place *place, rf_cuda_stream *stream);

#endif
