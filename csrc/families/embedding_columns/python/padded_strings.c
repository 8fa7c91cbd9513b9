/* rf__hash_padded_strings: a block of strings is written one after another, and then hashed. */
#include "families/embedding_columns/python/padded_strings.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/status.h"

enum {
    BLOCK = 256,              /* strings of a block, at most */
    BLOCK_BYTES = 1 << 16,    /* and their bytes, unless a single string is longer */
    THREAD_BYTES = 1 << 18,   /* that pay for a thread */
};

typedef struct hash_call {
    const rf__padded_strings *strings;
    uint64_t seed;
    int64_t *hashes;
    int64_t string_bytes; /* more than any string has */
    int64_t block;        /* strings of a block */
    int64_t bad;    /* atomic: the first string that is not text; count: no such string */
    int32_t failed; /* atomic: a thread had no memory */
} hash_call;

/* Writes a character; returns its bytes, or 0 for an invalid one. */
static int64_t character_write(uint32_t point, unsigned char *to) {
    if (point < 0x80) {
        to[0] = (unsigned char)point;
        return 1;
    }
    if (point > 0x10ffff || (point >= 0xd800 && point < 0xe000)) return 0;
    const int64_t bytes = point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
    static const unsigned char leads[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (int64_t i = bytes - 1; i > 0; i--, point >>= 6) to[i] = (unsigned char)(0x80 | (point & 0x3f));
    to[0] = (unsigned char)(leads[bytes] | point);
    return bytes;
}

/* Writes a string; returns its bytes, -1: it is no text. */
static int64_t string_write(const rf__padded_strings *strings, int64_t at, unsigned char *to) {
    int64_t length = strings->width, bytes = 0;
    if (!strings->code_points) {
        const unsigned char *from = (const unsigned char *)strings->data + at * length;
        while (length > 0 && from[length - 1] == 0) length--;
        memcpy(to, from, (size_t)length);
        return length;
    }
    const uint32_t *from = (const uint32_t *)strings->data + at * length;
    while (length > 0 && from[length - 1] == 0) length--;
    for (int64_t i = 0; i < length; i++) {
        const int64_t n_written = character_write(from[i], to + bytes);
        if (n_written == 0) return -1;
        bytes += n_written;
    }
    return bytes;
}

static void bad_keep(hash_call *call, int64_t string) {
    int64_t bad = __atomic_load_n(&call->bad, __ATOMIC_RELAXED);
    while (string < bad &&
           !__atomic_compare_exchange_n(&call->bad, &bad, string, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

static void hash_blocks(int64_t from, int64_t to, void *context) {
    hash_call *call = context;
    const rf__padded_strings *strings = call->strings;
    int64_t offsets[BLOCK + 1] = {0};
    unsigned char *bytes = malloc((size_t)(call->block * call->string_bytes));
    if (bytes == NULL) {
        __atomic_store_n(&call->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t block = from; block < to; block++) {
        const int64_t first = block * call->block, remaining = strings->count - first;
        const int64_t count = remaining < call->block ? remaining : call->block;
        int64_t i = 0;
        for (; i < count; i++) {
            const int64_t n_written = string_write(strings, first + i, bytes + offsets[i]);
            if (n_written < 0) break;
            offsets[i + 1] = offsets[i] + n_written;
        }
        if (i < count) {
            bad_keep(call, first + i);
            break;
        }
        rf_hash_strings_cpu(bytes, offsets[count], offsets, RF_INT64, count, call->seed, call->hashes + first,
                            NULL); /* its arguments are good */
    }
    free(bytes);
}

static rf_status report(const hash_call *call) {
    const uint32_t *point = (const uint32_t *)call->strings->data + call->bad * call->strings->width;
    unsigned char scratch[4];
    while (character_write(*point, scratch) > 0) point++;
    return rf__fail(RF_ERR_VALUE,
                    "strings[%" PRId64 "] has the code point 0x%" PRIx32 ", which is no character", call->bad,
                    *point);
}

rf_status rf__hash_padded_strings(const rf__padded_strings *strings, uint64_t seed, int64_t *hashes,
                                  const rf_executor *executor) {
    const int64_t string_bytes = strings->width * (strings->code_points ? 4 : 1);
    const int64_t fitting = BLOCK_BYTES / (string_bytes + 1);
    const int64_t block = fitting < 1 ? 1 : fitting > BLOCK ? BLOCK : fitting;
    hash_call call = {strings, seed, hashes, string_bytes + 1, block, strings->count, 0};
    const int64_t blocks = (strings->count + block - 1) / block;
    const int64_t useful = strings->count * call.string_bytes / THREAD_BYTES + 1;
    const int64_t threads = useful < executor->threads ? useful : executor->threads;
    RF_FAIL_IF(executor->parallel_for(0, blocks, (blocks + threads - 1) / threads, hash_blocks, &call) != 0,
               RF_ERR_INTERNAL, "the thread pool failed");
    RF_FAIL_IF(call.failed, RF_ERR_MEMORY, "no memory for a block of strings");
    return call.bad < strings->count ? report(&call) : RF_OK;
}
