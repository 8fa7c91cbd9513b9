/* The positions of a user's keys, for the kernels of both paths and for any contents of the maps. Also read
 * by host C, for C tests. */
#ifndef RECFUSE_CUDA_IKBO_ATTENTION_KEYS_H
#define RECFUSE_CUDA_IKBO_ATTENTION_KEYS_H

#include "gpu/device/error_word.h"

#ifdef __CUDACC__
#define RF_BOTH __device__ __forceinline__
#else
#define RF_BOTH static inline
#endif

/* Integers of 32 or 64 bits. */
typedef struct rf_integers {
    const void *data; /* NULL: absent */
    rf_i64 is_long;
} rf_integers;

RF_BOTH rf_i64 rf_integer_at(const rf_integers *integers, rf_i64 at) {
    return integers->is_long ? ((const rf_i64 *)integers->data)[at] : ((const rf_i32 *)integers->data)[at];
}

/* The positions of users' keys, relative to the first of all. */
typedef struct rf_attention_users {
    rf_integers lengths; /* [count] or absent */
    rf_integers offsets; /* [count + 1] or absent; with them lengths and pitch are unused */
    rf_i64 count, positions; /* per user; with offsets of all */
    rf_i64 pitch; /* between the first positions of users */
} rf_attention_users;

typedef struct rf_attention_keys {
    rf_i64 first, count;
} rf_attention_keys;

/* Returns a user's keys, for any contents: users from `count` on have no keys. */
RF_BOTH rf_attention_keys rf_attention_keys_of(const rf_attention_users *users, rf_i64 user) {
    rf_attention_keys keys = {0, 0};
    if (user < 0 || user >= users->count) return keys;
    if (users->offsets.data != 0) {
        const rf_i64 first = rf_integer_at(&users->offsets, user);
        const rf_i64 end = rf_integer_at(&users->offsets, user + 1);
        if (first < 0 || end < first || end > users->positions) return keys;
        keys.first = first;
        keys.count = end - first;
        return keys;
    }
    rf_i64 count = users->lengths.data != 0 ? rf_integer_at(&users->lengths, user) : users->positions;
    count = count < 0 ? 0 : count > users->positions ? users->positions : count;
    keys.first = user * users->pitch;
    keys.count = count;
    return keys;
}

#endif
