/* rf_hash_strings_cpu: XXH64 of many strings (the specification of xxHash, section "XXH64 algorithm
 * description"), a block of strings by a thread. No byte outside of a string is read. */
#include <string.h>

#include "core/validate.h"
#include "core/tasks.h"
#include "families/embedding_columns/device/column_values.h"

enum {
    BLOCK = 1024, /* strings of a task */
    STRIPE = 32, /* bytes that the four lanes take in at once */
    STRING_WORK = 64, /* fixed cost of a string, in bytes of work */
    MOST_WORK = 1 << 30, /* above it the work makes no difference */
};

typedef struct hash_call {
    const unsigned char *bytes;
    int64_t n_bytes;
    const void *offsets;
    rf_int_type offset_type;
    int64_t count;
    uint64_t seed;
    int64_t *hashes;
    int64_t bad; /* atomic: the first string with invalid offsets; count: no such string */
} hash_call;

/* The low byte first: as x86-64 and aarch64 have it. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as they lie in memory");

static inline uint64_t word_at(const unsigned char *at) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

static inline uint64_t half_word_at(const unsigned char *at) {
    uint32_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

static inline uint64_t lane_round(uint64_t lane, uint64_t word) {
    return rf_xxh64_rotate(lane + word * RF_XXH64_2, 31) * RF_XXH64_1;
}

/* Returns the hash of the whole stripes of a string of at least STRIPE bytes, in four lanes; advances *at
 * past them. */
static uint64_t stripes_hash(const unsigned char **at, const unsigned char *end, uint64_t seed) {
    static const int rotations[] = {1, 7, 12, 18};
    uint64_t lanes[] = {seed + RF_XXH64_1 + RF_XXH64_2, seed + RF_XXH64_2, seed, seed - RF_XXH64_1};
    uint64_t hash = 0;
    for (; end - *at >= STRIPE; *at += STRIPE)
        for (int i = 0; i < 4; i++) lanes[i] = lane_round(lanes[i], word_at(*at + 8 * i));
    for (int i = 0; i < 4; i++) hash += rf_xxh64_rotate(lanes[i], rotations[i]);
    for (int i = 0; i < 4; i++) hash = (hash ^ lane_round(0, lanes[i])) * RF_XXH64_1 + RF_XXH64_4;
    return hash;
}

static inline uint64_t string_hash(const unsigned char *at, int64_t length, uint64_t seed) {
    const unsigned char *end = at + length;
    uint64_t hash = length >= STRIPE ? stripes_hash(&at, end, seed) : seed + RF_XXH64_5;
    hash += (uint64_t)length;
    for (; end - at >= 8; at += 8) hash = rf_xxh64_word(hash, word_at(at));
    if (end - at >= 4) {
        hash ^= half_word_at(at) * RF_XXH64_1;
        hash = rf_xxh64_rotate(hash, 23) * RF_XXH64_2 + RF_XXH64_3;
        at += 4;
    }
    for (; at < end; at++) hash = rf_xxh64_rotate(hash ^ *at * RF_XXH64_5, 11) * RF_XXH64_1;
    return rf_xxh64_avalanche(hash);
}

static int64_t offset_at(const hash_call *call, int64_t at) {
    return call->offset_type == RF_INT32 ? ((const int32_t *)call->offsets)[at]
                                         : ((const int64_t *)call->offsets)[at];
}

static int64_t smaller(int64_t value, int64_t most) { return value < most ? value : most; }

static void hash_block(void *context, int64_t block) {
    hash_call *call = context;
    const int64_t first = block * BLOCK, remaining = call->count - first;
    const int64_t last = first + (remaining < BLOCK ? remaining : BLOCK);
    int64_t from = offset_at(call, first);
    for (int64_t i = first; i < last; i++) {
        const int64_t to = offset_at(call, i + 1);
        if (from < 0 || to < from || to > call->n_bytes) {
            int64_t bad = __atomic_load_n(&call->bad, __ATOMIC_RELAXED);
            while (i < bad && !__atomic_compare_exchange_n(&call->bad, &bad, i, true, __ATOMIC_RELAXED,
                                                           __ATOMIC_RELAXED));
            return;
        }
        call->hashes[i] = (int64_t)string_hash(call->bytes + from, to - from, call->seed);
        from = to;
    }
}

rf_status rf_hash_strings_cpu(const void *bytes, int64_t n_bytes, const void *offsets,
                              rf_int_type offset_type, int64_t count, uint64_t seed, int64_t *hashes,
                              const rf_executor *executor) {
    static const char operator_name[] = "hash_strings";
    RF__REFUSE_IF(count < 0 || n_bytes < 0, RF_ERR_VALUE,
                  RF__I64 " strings of " RF__I64 " bytes are given; expected 0 or more of both", count,
                  n_bytes);
    RF__REFUSE_IF(offset_type != RF_INT32 && offset_type != RF_INT64, RF_ERR_TYPE,
                  "offset_type is %d; expected int32 or int64", (int)offset_type);
    if (count == 0) return RF_OK;
    RF__REFUSE_IF(offsets == NULL || hashes == NULL || (bytes == NULL && n_bytes > 0), RF_ERR_VALUE,
                  "%s is NULL with " RF__I64 " strings of " RF__I64 " bytes",
                  offsets == NULL  ? "offsets"
                  : hashes == NULL ? "hashes"
                                   : "bytes",
                  count, n_bytes);
    hash_call call = {bytes, n_bytes, offsets, offset_type, count, seed, hashes, count};
    const int64_t cost = smaller(count, MOST_WORK) * STRING_WORK + smaller(n_bytes, MOST_WORK);
    const int64_t workers = rf__tasks_workers(executor, cost);
    RF_CHECK(rf__tasks_run(operator_name, (count - 1) / BLOCK + 1, workers, hash_block, &call, executor));
    RF__REFUSE_IF(call.bad < count, RF_ERR_VALUE,
                  "string " RF__I64 " lies from offset " RF__I64 " to " RF__I64
                  "; expected offsets that never decrease, from 0 or more to at most the " RF__I64 " bytes",
                  call.bad, offset_at(&call, call.bad), offset_at(&call, call.bad + 1), n_bytes);
    return RF_OK;
}
