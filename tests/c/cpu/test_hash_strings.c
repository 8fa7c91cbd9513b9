/* rf_hash_strings_cpu: known hashes, strings that begin or end at guard pages, and errors. */
#include <string.h>

#include "check.h"

enum { PATTERN_BYTES = 200, MOST_STRINGS = 5000, REGION_BYTES = 1 << 18 };

/* Hashes of the first `bytes` of the pattern, from the reference implementation of xxHash. */
static const uint64_t other_seed = UINT64_MAX - 2;
static const struct {
    int64_t bytes;
    uint64_t seed_zero, seed_other;
} vectors[] = {
    {0, 0xef46db3751d8e999u, 0xb1a00bada8f2c852u},   {1, 0xa96c7f0ce858bbb7u, 0x615b65ca37fbba43u},
    {2, 0xc22c6a70ad56bba6u, 0x765e9b22c0187506u},   {3, 0xbed43740ee6332bbu, 0xa3364b7f66a1623eu},
    {4, 0xfa212ae44b3bb23du, 0x3c5f7f47f202b3c6u},   {5, 0xd339dcc9ac8e6776u, 0x06d889f01c5dda6au},
    {7, 0x2744460dd675d2c0u, 0x98952686511052d2u},   {8, 0x994b676b71ce94ddu, 0x1793ab4427d9a9c9u},
    {9, 0x572b84c18b983af8u, 0x348ebe76a69c9043u},   {12, 0xb92f588ce720786eu, 0xb7e62b911ac13f45u},
    {15, 0x09e6451ed2ff8b1du, 0x8861ae75737e6913u},  {16, 0x94ad0095e72b24d5u, 0x4bd24b16cb9eb231u},
    {23, 0xcf65b69586b05fabu, 0x4e36ff302844b79bu},  {24, 0x0a3b0194f3afe0b8u, 0x2a9f66af70aa5cc2u},
    {28, 0x01a6f3d224fa7d3bu, 0x98b8be64265f1d9cu},  {31, 0x6711d55e306b5d8fu, 0x827e9e30f9ee0d28u},
    {32, 0x07f7b8e3bc5d6e25u, 0x4d8f61a15a7d52c6u},  {33, 0x09f85eeb4e1cbe9fu, 0x8e09b48389397ca4u},
    {40, 0xd25150177ba46490u, 0x6bb2197e723b3b66u},  {47, 0x79bd9d6dd8c15570u, 0x6f7a6001a1598939u},
    {63, 0xb7c9968c066cb6a5u, 0x79cdd471d8415e1cu},  {64, 0x50d4159a0411632eu, 0xcbb339e68cd2f51fu},
    {65, 0xd277176bff863efcu, 0xf4c468a137e39c96u},  {100, 0x9ddada11d3dc2d8fu, 0x7098631c857c5489u},
    {127, 0x54cf771b5423f6a7u, 0x3b684ba693143297u}, {200, 0x3b8cc7eaa63f107eu, 0x554e882add5486ceu},
};
enum { N_VECTORS = sizeof vectors / sizeof vectors[0] };

static void pattern_write(unsigned char *at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i++) at[i] = (unsigned char)(i * 131 + 7);
}

void test_hash_strings_vectors(void) {
    region memory = region_new(REGION_BYTES);
    for (int at = 0; at < N_VECTORS; at++) {
        const int64_t bytes = vectors[at].bytes, offsets[] = {0, bytes};
        for (int side = 0; side < 4; side++) {
            unsigned char *string =
                side & 1 ? region_at_start(&memory, (size_t)bytes) : region_at_end(&memory, (size_t)bytes);
            const uint64_t seed = side & 2 ? other_seed : 0;
            const uint64_t want = side & 2 ? vectors[at].seed_other : vectors[at].seed_zero;
            int64_t hash = 0;
            pattern_write(string, bytes);
            const rf_status status =
                rf_hash_strings_cpu(string, bytes, offsets, RF_INT64, 1, seed, &hash, NULL);
            CHECK(status == RF_OK && (uint64_t)hash == want, "%lld bytes: %016llx instead of %016llx: %s",
                  (long long)bytes, (unsigned long long)hash, (unsigned long long)want, rf_last_error());
        }
    }
    region_free(&memory);
}

/* Integers have the hash of their bytes, low byte first. */
void test_hash_strings_integers(void) {
    randomness random = {31};
    for (int round = 0; round < 100; round++) {
        const int64_t words[] = {(int64_t)random_bits(&random),
                                 round % 3 ? (int64_t)random_bits(&random) : -round};
        const int64_t offsets[] = {0, 8, 16}, both[] = {0, 16};
        const uint64_t seed = round % 2 ? random_bits(&random) : 0;
        int64_t hashes[2], hash;
        rf_status status = rf_hash_strings_cpu(words, 16, offsets, RF_INT64, 2, seed, hashes, NULL);
        if (status == RF_OK) status = rf_hash_strings_cpu(words, 16, both, RF_INT64, 1, seed, &hash, NULL);
        CHECK(status == RF_OK, "%s", rf_last_error());
        for (int i = 0; i < 2; i++)
            CHECK((uint64_t)hashes[i] == rf_hash_integer(words[i], seed), "%lld", (long long)words[i]);
        CHECK((uint64_t)hash == rf_hash_integers(words[0], words[1], seed), "%lld and %lld",
              (long long)words[0], (long long)words[1]);
    }
}

/* Many strings at once, each a prefix of the pattern; the offsets end at a guard page too. */
void test_hash_strings_random(void) {
    static int64_t hashes[MOST_STRINGS + 1];
    static int chosen[MOST_STRINGS];
    randomness random = {30};
    region bytes = region_new(MOST_STRINGS * PATTERN_BYTES), places = region_new(REGION_BYTES);
    for (int round = 0; round < check_rounds / 8 + 1; round++) {
        const int64_t count = random_between(&random, 0, round % 2 ? MOST_STRINGS : 40);
        const int64_t before = random_between(&random, 0, 3) * random_between(&random, 0, 9);
        const rf_int_type type = (rf_int_type)random_between(&random, RF_INT32, RF_INT64);
        int64_t total = before;
        for (int64_t i = 0; i < count; i++) {
            chosen[i] = (int)random_between(&random, 0, round % 3 ? 13 : N_VECTORS - 1);
            total += vectors[chosen[i]].bytes;
        }
        unsigned char *at = region_at_end(&bytes, (size_t)total), *next = at + before;
        void *offsets = region_at_end(&places, (size_t)(count + 1) * integer_size(type));
        integer_set(offsets, 0, type, before);
        for (int64_t i = 0; i < count; i++) {
            pattern_write(next, vectors[chosen[i]].bytes);
            next += vectors[chosen[i]].bytes;
            integer_set(offsets, i + 1, type, next - at);
        }
        const bool seeded = random_chance(&random, 0.5);
        hashes[count] = 42;
        const rf_status status = rf_hash_strings_cpu(at, total, offsets, type, count, seeded ? other_seed : 0,
                                                     hashes, executor_any(&random));
        CHECK(status == RF_OK && hashes[count] == 42, "round %d: %s", round, rf_last_error());
        for (int64_t i = 0; i < count; i++) {
            const uint64_t want = seeded ? vectors[chosen[i]].seed_other : vectors[chosen[i]].seed_zero;
            CHECK((uint64_t)hashes[i] == want, "round %d, string %lld of %lld: %016llx instead of %016llx",
                  round, (long long)i, (long long)count, (unsigned long long)hashes[i],
                  (unsigned long long)want);
        }
    }
    region_free(&places);
    region_free(&bytes);
}

/* A valid call, modified by a statement, returns a status and a message with these words. */
#define HASH(want, words, change)                                                                            \
    do {                                                                                                     \
        const char *bytes = "abcdef";                                                                        \
        int64_t offsets[] = {0, 2, 2, 6}, hashes[3], *to = hashes, count = 3, n_bytes = 6;                   \
        const void *from = offsets;                                                                          \
        rf_int_type type = RF_INT64;                                                                         \
        const rf_executor *executor = NULL;                                                                  \
        change;                                                                                              \
        const rf_status status = rf_hash_strings_cpu(bytes, n_bytes, from, type, count, 0, to, executor);    \
        CHECK(status == (want) && (status == RF_OK || strstr(rf_last_error(), words) != NULL), "%s: %s, %s", \
              #change, rf_status_text(status), rf_last_error());                                             \
    } while (0)

void test_hash_strings_errors(void) {
    static int64_t many[MOST_STRINGS + 1], hashed[MOST_STRINGS];
    HASH(RF_OK, "", (void)0);
    HASH(RF_OK, "", (count = 0, from = NULL, bytes = NULL, to = NULL));
    HASH(RF_OK, "", (offsets[3] = 2, n_bytes = 2));
    HASH(RF_OK, "", (memset(offsets, 0, sizeof offsets), n_bytes = 0, bytes = NULL));
    HASH(RF_ERR_VALUE, "recfuse.hash_strings: string 0 lies from offset -1 to 2", offsets[0] = -1);
    HASH(RF_ERR_VALUE, "string 1 lies from offset 2 to 1; expected offsets that never decrease",
         offsets[2] = 1);
    HASH(RF_ERR_VALUE, "string 2 lies from offset 2 to 7", offsets[3] = 7);
    HASH(RF_ERR_VALUE, "to at most the 5 bytes", n_bytes = 5);
    HASH(RF_ERR_VALUE, "string 1 lies from offset 2 to 9223372036854775807", offsets[2] = INT64_MAX);
    HASH(RF_ERR_VALUE, "-1 strings of 6 bytes", count = -1);
    HASH(RF_ERR_VALUE, "3 strings of -1 bytes", n_bytes = -1);
    HASH(RF_ERR_TYPE, "offset_type is 2", type = (rf_int_type)2);
    HASH(RF_ERR_VALUE, "offsets is NULL with 3 strings", from = NULL);
    HASH(RF_ERR_VALUE, "hashes is NULL with 3 strings", to = NULL);
    HASH(RF_ERR_VALUE, "bytes is NULL with 3 strings of 6 bytes", bytes = NULL);
    /* The first of several invalid strings is named, for any order of threads. */
    many[MOST_STRINGS - 1] = -1, many[4000] = 1, many[1500] = 5;
    HASH(RF_ERR_VALUE, "string 1500 lies from offset 5 to 0",
         (executor = &executor_threads, from = many, to = hashed, count = MOST_STRINGS));
    HASH(RF_ERR_INTERNAL, "the thread pool failed",
         (memset(many, 0, sizeof many), executor = &executor_failing, from = many, to = hashed,
          count = MOST_STRINGS));
}
