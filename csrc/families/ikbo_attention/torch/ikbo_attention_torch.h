/* What the files of ikbo_attention share. One reader of arguments serves its five operators. */
#ifndef RECFUSE_TORCH_IKBO_ATTENTION_H
#define RECFUSE_TORCH_IKBO_ATTENTION_H

#include "torch/call.h"
#include "torch/dispatch.h"

/* How a call is computed: name, text. The last is none of its own, but the best of the others. */
#define RF__ATTENTION_PATH_LIST(X)    \
    X(RF__ATTENTION_PACKED, "packed") \
    X(RF__ATTENTION_FUSED, "fused")   \
    X(RF__ATTENTION_AUTO, "auto")

typedef enum rf__attention_path {
#define RF__ATTENTION_PATH_ENUM(name, text) name,
    RF__ATTENTION_PATH_LIST(RF__ATTENTION_PATH_ENUM)
#undef RF__ATTENTION_PATH_ENUM
} rf__attention_path;

/* One call, looked at and checked except for contents. The dims of a head lie side by side in all four tensors. */
typedef struct rf__attention {
    bool self; /* q_user is there */
    rf__tensor q, q_user; /* [count, queries, heads, dim] */
    rf__tensor k, v; /* [users, positions, kv_heads, dim], or [positions, kv_heads, dim] */
    rf_ikbo_attention_params params; /* except for outputs and allocator */
    rf__attention_path path;
} rf__attention;

/* No tensor by name alone: torch's vmap has no rule for such ones. */
#define RF__ATTENTION_ARGUMENTS                                                                       \
    "Tensor q, Tensor k, Tensor v, Tensor cand_to_user, float? scale=None, Tensor? kv_lengths=None, " \
    "Tensor? kv_offsets=None, *, str path=\"auto\", str bounds_check=\"on\")"
#define RF__ATTENTION_SELF_ARGUMENTS "Tensor q_user, " RF__ATTENTION_ARGUMENTS

/* Reads the arguments of RF__ATTENTION_ARGUMENTS or, with `self`, of RF__ATTENTION_SELF_ARGUMENTS. */
rf_status rf__attention_read(rf__call *call, bool self, rf__attention *attention);

/* Computes both sets of queries; the outputs are in params. On the CPU: torch's attention for each user, over the queries
 * of all of its candidates. */
rf_status rf__attention_packed_cpu(rf__call *call, const rf__attention *attention);
/* The same on a GPU: torch's attention of sequences of many lengths. Waits for nothing. */
rf_status rf__attention_packed_cuda(rf__call *call, const rf__attention *attention);

/* Sequences of queries and of their keys, as torch's kernels for GPUs take them: rows of `heads` heads of `dim`, with
 * pitches from row to row and from head to head, which are multiples of 16 bytes. */
typedef struct rf__attention_sequences {
    AtenTensorHandle q, k, v; /* whose first elements the rows begin with */
    int64_t q_pitch[2], k_pitch[2], v_pitch[2];
    int64_t q_rows, k_rows, heads, dim;
    int64_t count; /* sequences */
    AtenTensorHandle integers; /* int32, which has at element ... */
    int64_t rows_at; /* [count + 1]: where queries begin, ascending */
    int64_t keys_at; /* [count + 1]: where keys begin, in any order; the last is not used */
    int64_t lengths_at; /* [count] of keys */
    int64_t most_rows, most_keys; /* of a sequence, or more */
    double scale;
    bool flash; /* by aten::_flash_attention_forward, else aten::_efficient_attention_forward */
    bool with_lse;
} rf__attention_sequences;

/* Runs it; in a call that is explained, makes results of these sizes instead, of any contents. Of the call's results the first is [rows, heads, dim], for the second kernel [1, rows, heads, dim], and the second
 * the log-sum-exp: [heads, rows], for the second kernel [count, heads, most_rows or more], where that is wanted. Rows
 * without keys are undefined. */
rf_status rf__attention_by_torch(const rf__attention_sequences *sequences, bool explained,
                                 rf__dispatch *call);

#endif
