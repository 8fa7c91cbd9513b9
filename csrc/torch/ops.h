/* The torch operators: their schemas, and how a boxed call becomes a C call and an exception. */
#ifndef RECFUSE_TORCH_OPS_H
#define RECFUSE_TORCH_OPS_H

#include "torch/values.h"

/* X(name, kinds of the arguments as in values.h, schema). `rf__torch_<name>` is the kernel of CPU and CUDA;
 * return one tensor or nothing. */
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
    X(fused_embedding_bag, "ltttiobisoiob",                                                              \
      "(Tensor[] weights, Tensor features, Tensor indices, Tensor offsets, SymInt output_dim, "          \
      "Tensor? per_sample_weights=None, bool sparse=False, int prefetch_distance=-1, "                   \
      "str bounds_check=\"on\", Tensor? schedules=None, int warps=0, Tensor? mapping=None, "             \
      "bool any_max=True) -> Tensor")

/* The same for operators whose CUDA kernels are registered from Python. */
#define RF__CPU_OPERATOR_LIST(X)                                                                \
    X(fused_embedding_bag_backward, "ttttiiiioob",                                              \
      "(Tensor grad, Tensor features, Tensor indices, Tensor offsets, int group, SymInt rows, " \
      "SymInt dim, int dtype, Tensor? per_sample_weights, Tensor? winners, "                    \
      "bool scale_grad_by_freq=False) -> Tensor")                                               \
    X(fused_embedding_bag_sparse_backward, "ttttiiiioob",                                       \
      "(Tensor grad, Tensor features, Tensor indices, Tensor offsets, int group, SymInt rows, " \
      "SymInt dim, int dtype, Tensor? per_sample_weights, Tensor? winners, "                    \
      "bool scale_grad_by_freq=False) -> (Tensor, Tensor)")                                     \
    X(fused_embedding_bag_winners, "lttti",                                                     \
      "(Tensor[] weights, Tensor features, Tensor indices, Tensor offsets, SymInt output_dim) " \
      "-> Tensor")                                                                              \
    X(fused_embedding_bag_sample_weights_backward, "tlttt",                                     \
      "(Tensor grad, Tensor[] weights, Tensor features, Tensor indices, Tensor offsets) -> Tensor")

/* Tensors that an operator returns, at most. */
enum { RF__MAX_OUTPUTS = 2 };

/* A kernel: borrows `values`, gives new tensors in outputs [RF__MAX_OUTPUTS] (NULL before; those of a failed call
 * are freed by the caller), as many as its schema has. */
typedef rf_status (*rf__operator)(const rf__value *values, AtenTensorHandle *outputs);

#define RF__OPERATOR_DECLARE(name, kinds, schema) \
    rf_status rf__torch_##name(const rf__value *values, AtenTensorHandle *outputs);
RF__OPERATOR_LIST(RF__OPERATOR_DECLARE)
RF__CPU_OPERATOR_LIST(RF__OPERATOR_DECLARE)
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
/* Arguments of a fused call, read by csrc/torch/fused_arguments.c. */
enum { RF__FEATURE_FIELDS = sizeof(rf_feature) / sizeof(int64_t) };
/* features: int64 [features, 7], on the CPU whichever device pools: the host plans by them. */
rf_status rf__features_read(AtenTensorHandle handle, AtenTensorHandle *copy, const rf_feature **features,
                            int64_t *n_features);
/* weights, and the type of the output: theirs where they agree, else float32. *buffers is to be freed, also after a
 * failure; in the same memory is *columns, for rf__check_fused_rows. */
rf_status rf__weights_read(StableListHandle list, const rf__place *place, rf_buffer **buffers,
                           const int64_t **columns, rf_fused_embedding_bag_params *params);
/* Bags a feature, of so many offsets. */
rf_status rf__bags_count(int64_t offsets, int64_t n_features, int64_t *bags);
/* indices and offsets of a fused call whose features are read; copies [2]. */
rf_status rf__lookups_read(AtenTensorHandle indices, AtenTensorHandle offsets, const rf__place *place,
                           AtenTensorHandle *copies, rf_fused_embedding_bag_params *params);

/* torch's current stream of a GPU. RF_ERR_UNSUPPORTED: this torch has no CUDA. */
rf_status rf__torch_stream(const rf__place *place, rf_cuda_stream *stream);
/* torch's caching allocator of the GPU that a tensor is on. Blocks are tensors. Memory that lasts is made on a thread of
 * its own: see cuda.c. */
rf_cuda_allocator rf__torch_allocator(const rf__place *place);

#endif
