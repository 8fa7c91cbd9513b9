/* The list of torch operators. X is `rf__torch_X`, in the file of its name or its family's. */
#ifndef RECFUSE_TORCH_OPERATORS_H
#define RECFUSE_TORCH_OPERATORS_H

#include "torch/call.h"

#define RF__TORCH_OPERATORS(X)                     \
    X(embedding_bag)                               \
    X(_embedding_bag)                              \
    X(_embedding_bag_gradient)                     \
    X(pin_rows)                                    \
    X(unpin)                                       \
    X(fused_embedding_bag)                         \
    X(fused_embedding_bag_backward)                \
    X(fused_embedding_bag_sparse_backward)         \
    X(fused_embedding_bag_sparse_gradients)        \
    X(fused_embedding_bag_winners)                 \
    X(fused_embedding_bag_sample_weights_backward) \
    X(fused_embedding_bag_update)                  \
    X(rows_update)                                 \
    X(ikbo_linear)                                 \
    X(ikbo_linear_chain)                           \
    X(_ikbo_linear_path)                           \
    X(_ikbo_linear_chain_path)                     \
    X(ikbo_attention)                              \
    X(ikbo_attention_lse)                          \
    X(ikbo_attention_self)                         \
    X(ikbo_attention_self_lse)                     \
    X(_ikbo_attention_path)                        \
    X(_ikbo_attention_self_path)                   \
    X(embedding_columns)                           \
    X(_embedding_columns_at)                       \
    X(_embedding_columns_split)                    \
    X(_embedding_columns_lookups)                  \
    X(check)                                       \
    X(cpu_isa)                                     \
    X(library_version)                             \
    X(library_path)

#define RF__TORCH_OPERATOR(name) extern const rf__operator rf__torch_##name;
RF__TORCH_OPERATORS(RF__TORCH_OPERATOR)
#undef RF__TORCH_OPERATOR

#endif
