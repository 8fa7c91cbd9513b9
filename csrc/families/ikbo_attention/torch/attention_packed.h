/* Shared by attention_packed.c and attention_packed_inputs.c: a call on a GPU, its keys and its queries. */
#ifndef RECFUSE_TORCH_ATTENTION_PACKED_H
#define RECFUSE_TORCH_ATTENTION_PACKED_H

#include "families/ikbo_attention/packed/packed.h"
#include "families/ikbo_attention/torch/ikbo_attention_torch.h"

/* Keys and values as torch's kernels read them: [rows, kv_heads, padded] each. */
typedef struct rf__packed_keys {
    AtenTensorHandle k, v;
    int64_t k_pitch[2], v_pitch[2]; /* elements from row to row and head to head */
    int64_t rows;
    int64_t user_pitch; /* rows from user to user */
} rf__packed_keys;

/* A call; pointers are borrowed. */
typedef struct rf__packed_call {
    rf__call *call;
    const rf__attention *attention;
    const rf_ikbo_attention_params *params;
    const rf__cuda_device *device;
    rf_cuda_stream stream;
    rf__launches launches; /* that are not in the stream yet */
    int32_t dtype; /* torch's code */
    int64_t padded, group;
    bool flash;
    rf__packed_keys keys;
} rf__packed_call;

/* One set of queries. */
typedef struct rf__packed_set {
    const rf_ikbo_queries *queries;
    rf_attention_items items;
    const int64_t *order; /* [count] on the device, or NULL */
    AtenTensorHandle q; /* rows of kv_heads heads of `padded` */
    int64_t q_pitch[2];
    AtenTensorHandle chunks;
    int32_t *chunks_data; /* of rf__attention_cut_lower */
} rf__packed_set;

/* Sets the call's keys and values to those of the caller if torch's kernels can read them in place, else to
 * copies, whose launches it adds to the call. RF_ERR_UNSUPPORTED: more positions than 32 bits count. */
rf_status rf__packed_keys_find(rf__packed_call *packed);
/* Sets q to the queries in place if torch's kernels can read them, else to an ordered copy, whose launch it
 * adds to the call. */
rf_status rf__packed_queries_find(rf__packed_call *packed, AtenTensorHandle handle, rf__packed_set *set);

#endif
