/* The arguments of packed.cu's kernels, and the cut of items into chunks, which C tests run on the host.
 *
 * torch's attention of sequences of many lengths gets chunks: runs of the rows of one user's items, ordered
 * by user. A chunk begins where a user's items begin, and at every item whose number is a multiple of `most`.
 * So there are as many as users and multiples together, which the host knows without the device, and none is
 * longer than `most`; chunks of users without items are empty. Items with an invalid user belong to an
 * additional user without keys. A chunk's number is the number of previous begins: a user's begin comes
 * before the multiple at the same item.
 */
#ifndef RECFUSE_CUDA_IKBO_ATTENTION_PACKED_ARGS_H
#define RECFUSE_CUDA_IKBO_ATTENTION_PACKED_ARGS_H

#include "families/ikbo_attention/attention_keys_args.h"

/* Items, in the order in which they are computed. */
typedef struct rf_attention_items {
    /* [count] users of items; of no user: the number of users. Ascending, unless most is 0. NULL: item u is
     * of user u. */
    const rf_i32 *users;
    rf_i64 count, n_users;
    rf_i64 most; /* items per chunk; 0: each item is a chunk with its own number */
    rf_i64 rows; /* of an item */
} rf_attention_items;

typedef struct rf_attention_chunk {
    rf_i64 number, begin, user; /* begin: the first item */
} rf_attention_chunk;

RF_BOTH rf_i64 rf_attention_user_of(const rf_attention_items *items, rf_i64 item) {
    return items->users == 0 ? item : items->users[item];
}

RF_BOTH rf_i64 rf_attention_chunks(const rf_attention_items *items) {
    if (items->most == 0) return items->count;
    return items->n_users + 1 + (items->count + items->most - 1) / items->most;
}

/* Returns the number of the first item whose user is not below `user`. */
RF_BOTH rf_i64 rf_attention_begin_of(const rf_attention_items *items, rf_i64 user) {
    rf_i64 low = 0, high = items->count;
    while (low < high) {
        const rf_i64 middle = low + (high - low) / 2;
        if (items->users[middle] < user)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Returns a chunk: each `at` below their number has another. */
RF_BOTH rf_attention_chunk rf_attention_chunk_at(const rf_attention_items *items, rf_i64 at) {
    rf_attention_chunk chunk;
    if (items->most == 0) {
        chunk.number = chunk.begin = at;
        chunk.user = rf_attention_user_of(items, at);
    } else if (at <= items->n_users) {
        chunk.user = at;
        chunk.begin = rf_attention_begin_of(items, at);
        chunk.number = at + (chunk.begin + items->most - 1) / items->most;
    } else {
        const rf_i64 multiple = at - items->n_users - 1;
        chunk.begin = multiple * items->most;
        chunk.user = items->users[chunk.begin];
        chunk.number = multiple + chunk.user + 1;
    }
    return chunk;
}

/* Number of the chunk that an item is in. */
RF_BOTH rf_i64 rf_attention_chunk_of(const rf_attention_items *items, rf_i64 item, rf_i64 user) {
    return items->most == 0 ? item : item / items->most + user + 1;
}

typedef struct rf_attention_prepare_args {
    rf_integers map; /* [n_items] */
    rf_i32 *users; /* [n_items]: the map, or users.count if it is not in [0, users.count) */
    rf_i64 n_items;
    rf_attention_users keys;
    rf_i64 report; /* invalid contents are recorded */
    rf_error_word errors;
} rf_attention_prepare_args;
RF_SIZE_IS(rf_attention_prepare_args, 112);

typedef struct rf_attention_cut_args {
    rf_attention_items items;
    rf_attention_users keys;
    rf_i32 *rows; /* [chunks + 1]: first row of each chunk, then the end */
    rf_i32 *first; /* [chunks + 1]: first position of its user's keys; the last one is 0 */
    rf_i32 *lengths; /* [chunks]: number of these keys */
} rf_attention_cut_args;
RF_SIZE_IS(rf_attention_cut_args, 120);

/* Units are vectors of RF_VECTOR bytes. */
typedef struct rf_attention_pack_args {
    rf_u8 *to; /* [count, queries, group, heads / group, head_vectors] */
    const rf_u8 *from; /* [items, queries, heads, used_vectors] */
    const rf_i64 *order; /* [count]: the item of `from` for each position; NULL: the same */
    rf_i64 count;
    rf_i64 pitch[3]; /* of `from`: item, query, head */
    rf_u32 item_vectors; /* of `to`: queries * heads * head_vectors */
    rf_u32 heads, group, head_vectors;
    rf_u32 used_vectors; /* of a head; the rest of head_vectors become zeros */
    rf_u32 unused;
} rf_attention_pack_args;
RF_SIZE_IS(rf_attention_pack_args, 80);

typedef struct rf_attention_unpack_args {
    rf_u8 *out; /* [items, queries, heads, head_vectors] vectors */
    const rf_u8 *from; /* rows [count * queries * group] of heads / group heads; NULL: no dim, or no keys */
    rf_i64 from_pitch[2]; /* row, head */
    const rf_i64 *order; /* [count], as in packing */
    rf_attention_items items;
    rf_attention_users keys;
    const rf_i32 *rows; /* [chunks + 1], of rf_attention_cut_args; not read if `from` is NULL */
    rf_i64 first_chunk, end_chunk; /* whose items are written */
    float *lse; /* [items, heads, queries] or NULL */
    const float *lse_from; /* of a row at its number, or with lse_by_chunk at its number in the chunk */
    rf_i64 lse_pitch[3]; /* elements: chunk, head, row */
    rf_i64 lse_by_chunk;
    rf_u32 queries, heads, group, head_vectors;
    rf_u32 item_pieces; /* queries * heads * max(head_vectors, 1) */
    rf_u32 unused;
} rf_attention_unpack_args;
RF_SIZE_IS(rf_attention_unpack_args, 232);

#endif
