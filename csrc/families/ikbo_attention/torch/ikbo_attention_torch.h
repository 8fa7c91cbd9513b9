/* Shared by the files of ikbo_attention. One reader of arguments serves its five operators. */
#ifndef RECFUSE_TORCH_IKBO_ATTENTION_H
#define RECFUSE_TORCH_IKBO_ATTENTION_H

#include "torch/call.h"
#include "torch/dispatch.h"

/* The paths of a call: name, text. The last selects the best of the others. */
#define RF__ATTENTION_PATH_LIST(X)    \
    X(RF__ATTENTION_PACKED, "packed") \
    X(RF__ATTENTION_FUSED, "fused")   \
    X(RF__ATTENTION_AUTO, "auto")

typedef enum rf__attention_path {
#define RF__ATTENTION_PATH_ENUM(name, text) name,
    RF__ATTENTION_PATH_LIST(RF__ATTENTION_PATH_ENUM)
#undef RF__ATTENTION_PATH_ENUM
} rf__attention_path;

/* A call, read and checked except for contents. The dims of a head are contiguous in all four tensors. */
typedef struct rf__attention {
    bool self; /* q_user is there */
    rf__tensor q, q_user; /* [count, queries, heads, dim] */
    rf__tensor k, v; /* [users, positions, kv_heads, dim], or [positions, kv_heads, dim] */
    rf_ikbo_attention_params params; /* except for outputs and allocator */
    rf__attention_path path;
} rf__attention;

/* No keyword-only tensors: torch's vmap has no rule for them. */
#define RF__ATTENTION_ARGUMENTS                                                                       \
    "Tensor q, Tensor k, Tensor v, Tensor cand_to_user, float? scale=None, Tensor? kv_lengths=None, " \
    "Tensor? kv_offsets=None, *, str path=\"auto\", str bounds_check=\"on\")"
#define RF__ATTENTION_SELF_ARGUMENTS "Tensor q_user, " RF__ATTENTION_ARGUMENTS

/* Reads the arguments of RF__ATTENTION_ARGUMENTS or, with `self`, of RF__ATTENTION_SELF_ARGUMENTS. */
rf_status rf__attention_read(rf__call *call, bool self, rf__attention *attention);

/* Computes both sets of queries; the outputs are in params. On the CPU: torch's attention for each user, over
 * the queries of all of its candidates. */
rf_status rf__attention_packed_cpu(rf__call *call, const rf__attention *attention);
/* As above, on a GPU: torch's attention of sequences of many lengths. Never waits. */
rf_status rf__attention_packed_cuda(rf__call *call, const rf__attention *attention);

/* Sequences of queries and of their keys, as torch's kernels for GPUs take them: rows of `heads` heads of
 * `dim`, with pitches from row to row and from head to head, which are multiples of 16 bytes. */
typedef struct rf__attention_sequences {
    AtenTensorHandle q, k, v; /* the rows begin with their first elements */
    int64_t q_pitch[2], k_pitch[2], v_pitch[2];
    int64_t q_rows, k_rows, heads, dim;
    int64_t count; /* sequences */
    AtenTensorHandle integers; /* int32, which has at element ... */
    int64_t rows_at; /* [count + 1]: begins of queries, ascending */
    int64_t keys_at; /* [count + 1]: begins of keys, in any order; the last is not used */
    int64_t lengths_at; /* [count] of keys */
    int64_t most_rows, most_keys; /* of a sequence, or more */
    double scale;
    bool flash; /* by aten::_flash_attention_forward, else aten::_efficient_attention_forward */
    bool with_lse;
} rf__attention_sequences;

/* Runs it; in an explained call, creates undefined results of these sizes instead. Of the call's results the
 * first is [rows, heads, dim], for the second kernel [1, rows, heads, dim], and the second the log-sum-exp,
 * if requested: [heads, rows], for the second kernel [count, heads, most_rows or more]. Rows without keys are
 * undefined. */
rf_status rf__attention_by_torch(const rf__attention_sequences *sequences, bool explained,
                                 rf__dispatch *call);

#endif
