/* The host part of ikbo_attention: checks of arguments and contents, candidates by user, and chunks. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "families/ikbo_attention/ikbo_attention_sizes.h"
#include "families/ikbo_attention/check_ikbo_attention.h"
#include "check.h"
#include "families/ikbo_attention/packed/attention_packed_args.h"

enum { MOST_CANDIDATES = 60, MOST_USERS = 9 };

/* The chunks of ordered candidates: each number once, ascending, none too long, each candidate in its own
 * chunk. */
static void check_chunks(const rf_attention_items *items) {
    const int64_t chunks = rf_attention_chunks(items);
    int64_t begins[MOST_CANDIDATES + MOST_USERS + 3], users[MOST_CANDIDATES + MOST_USERS + 3];
    for (int64_t i = 0; i < chunks; i++) begins[i] = -1;
    for (int64_t at = 0; at < chunks; at++) {
        const rf_attention_chunk chunk = rf_attention_chunk_at(items, at);
        CHECK(chunk.number >= 0 && chunk.number < chunks && begins[chunk.number] < 0, "chunk %lld is %lld",
              (long long)at, (long long)chunk.number);
        if (chunk.number < 0 || chunk.number >= chunks) return;
        begins[chunk.number] = chunk.begin;
        users[chunk.number] = chunk.user;
    }
    begins[chunks] = items->count;
    for (int64_t i = 0; i < chunks; i++)
        CHECK(begins[i] <= begins[i + 1] && begins[i + 1] - begins[i] <= (items->most > 0 ? items->most : 1),
              "chunk %lld has items %lld to %lld", (long long)i, (long long)begins[i],
              (long long)begins[i + 1]);
    for (int64_t i = 0; i < items->count; i++) {
        const int64_t user = rf_attention_user_of(items, i), chunk = rf_attention_chunk_of(items, i, user);
        CHECK(chunk >= 0 && chunk < chunks && users[chunk] == user && begins[chunk] <= i &&
                  i < begins[chunk + 1],
              "item %lld of user %lld in chunk %lld", (long long)i, (long long)user, (long long)chunk);
    }
}

void test_ikbo_attention_groups(void) {
    randomness random = {31};
    int64_t starts[MOST_USERS + 1], order[MOST_CANDIDATES + 1];
    int32_t sorted[MOST_CANDIDATES + 1];
    region memory = region_new(MOST_CANDIDATES * sizeof(int64_t));
    for (int round = 0; round < check_rounds; round++) {
        const rf_int_type type = (rf_int_type)random_between(&random, RF_INT32, RF_INT64);
        const int64_t users = random_between(&random, 1, MOST_USERS);
        const int64_t count = random_between(&random, 0, MOST_CANDIDATES);
        void *map = region_at_end(&memory, (size_t)count * integer_size(type));
        for (int64_t i = 0; i < count; i++) integer_set(map, i, type, random_between(&random, 0, users - 1));
        const rf_ikbo_attention_params params = {
            .candidates = {.count = count}, .n_users = users, .cand_to_user = map, .cand_to_user_type = type};
        CHECK(rf__ikbo_attention_check_contents(&params) == RF_OK, "%s", rf_last_error());
        rf__ikbo_attention_group(&params, starts, order);
        CHECK(starts[0] == 0 && starts[users] == count, "%lld to %lld", (long long)starts[0],
              (long long)starts[users]);
        for (int64_t u = 0; u < users; u++) {
            for (int64_t i = starts[u]; i < starts[u + 1]; i++) {
                CHECK(integer_get(map, order[i], type) == u && (i == starts[u] || order[i - 1] < order[i]),
                      "round %d: item %lld of user %lld", round, (long long)order[i], (long long)u);
                sorted[i] = (int32_t)u;
            }
        }
        /* The last users may be invalid, as after an invalid map. */
        rf_attention_items items = {.users = sorted,
                                    .count = count,
                                    .n_users = users - 1,
                                    .most = random_between(&random, 1, 12),
                                    .rows = 1};
        check_chunks(&items);
        items.most = 0;
        check_chunks(&items);
    }
    region_free(&memory);
}

/* Keys as kernels find them, with contents that may be bad. */
void test_ikbo_attention_keys(void) {
    const int32_t lengths[] = {3, -1, 9, 5};
    const int64_t offsets[] = {2, 5, 4, 6, 9, 7};
    rf_attention_users users = {
        .lengths = {lengths, 0}, .offsets = {NULL, 0}, .count = 4, .positions = 5, .pitch = 10};
    const rf_attention_keys want[] = {{0, 3}, {10, 0}, {20, 5}, {30, 5}, {0, 0}};
    for (int64_t u = 0; u < 5; u++) {
        const rf_attention_keys got = rf_attention_keys_of(&users, u);
        CHECK(got.count == want[u].count && (got.count == 0 || got.first == want[u].first), "user %lld: %lld",
              (long long)u, (long long)got.count);
    }
    users = (rf_attention_users){.offsets = {offsets, 1}, .count = 5, .positions = 8};
    const rf_attention_keys jagged[] = {{2, 3}, {0, 0}, {4, 2}, {0, 0}, {0, 0}};
    for (int64_t u = 0; u < 5; u++) {
        const rf_attention_keys got = rf_attention_keys_of(&users, u);
        CHECK(got.count == jagged[u].count && got.first == jagged[u].first, "jagged user %lld: %lld",
              (long long)u, (long long)got.count);
    }
}

/* A check refuses a valid call, modified by a statement, with a message that has these words. */
#define REFUSED(check, want, words, change)                                                       \
    do {                                                                                          \
        float numbers[64] = {0};                                                                  \
        int32_t map[] = {1, 0, 1}, lengths[] = {2, 0}, offsets[] = {0, 1, 2};                     \
        rf_ikbo_attention_params call = {.candidates = {numbers, {2, 2, 1}, 3, 1, numbers, NULL}, \
                                         .users = {numbers, {2, 2, 1}, 2, 1, numbers, NULL},      \
                                         .k = numbers,                                            \
                                         .v = numbers,                                            \
                                         .n_users = 2,                                            \
                                         .positions = 2,                                          \
                                         .heads = 2,                                              \
                                         .kv_heads = 1,                                           \
                                         .dim = 1,                                                \
                                         .cand_to_user = map,                                     \
                                         .scale = 1,                                              \
                                         .check_bounds = true};                                   \
        (void)lengths, (void)offsets;                                                             \
        CHECK(check(&call) == RF_OK, "a good call: %s", rf_last_error());                         \
        change;                                                                                   \
        const rf_status status = check(&call);                                                    \
        CHECK(status == (want) && strstr(rf_last_error(), "recfuse.ikbo_attention: ") != NULL &&  \
                  strstr(rf_last_error(), words) != NULL,                                         \
              "%s: %s, %s", #change, rf_status_text(status), rf_last_error());                    \
    } while (0)
#define BAD(want, words, change) REFUSED(rf__check_ikbo_attention, want, words, change)
#define BAD_CONTENTS(want, words, change) REFUSED(rf__ikbo_attention_check_contents, want, words, change)

void test_ikbo_attention_errors(void) {
    BAD(RF_ERR_TYPE, "dtype is 4", call.dtype = (rf_dtype)4);
    BAD(RF_ERR_VALUE, "expected sizes of 0 or more", call.n_users = -1);
    BAD(RF_ERR_VALUE, "expected sizes of 0 or more", call.dim = -1);
    BAD(RF_ERR_VALUE, "expected a multiple", call.kv_heads = 3);
    BAD(RF_ERR_VALUE, "expected a multiple", call.kv_heads = 0);
    BAD(RF_ERR_VALUE, "keys have 2 users, 2305843009213693951 positions", call.positions = INT64_MAX / 4);
    BAD(RF_ERR_VALUE, "scale is 0; expected a positive", call.scale = 0);
    BAD(RF_ERR_VALUE, "scale is -1; expected a positive", call.scale = -1);
    BAD(RF_ERR_VALUE, "expected a positive, normal number", call.scale = (double)NAN);
    BAD(RF_ERR_VALUE, "normal number of float32", call.scale = 1e-40);
    BAD(RF_ERR_VALUE, "normal number of float32", call.scale = 1e40);
    BAD(RF_ERR_VALUE, "up to 1.7", call.scale = 2e38); /* times log2(e) it overflows */
    BAD(RF_ERR_VALUE, "the number of candidates is -1, of 1 queries", call.candidates.count = -1);
    BAD(RF_ERR_VALUE, "fits int64", call.candidates.queries = INT64_MAX / 4);
    BAD(RF_ERR_VALUE, "q of candidates is NULL", call.candidates.q = NULL);
    BAD(RF_ERR_VALUE, "out of candidates is NULL", call.candidates.out = NULL);
    BAD(RF_ERR_VALUE, "out of users is NULL", call.users.out = NULL);
    BAD(RF_ERR_VALUE, "users.count is 3; expected n_users, 2", call.users.count = 3);
    BAD(RF_ERR_TYPE, "kv_lengths_type 7", call.kv_lengths_type = (rf_int_type)7);
    BAD(RF_ERR_VALUE, "both given", (call.kv_lengths = lengths, call.kv_offsets = offsets));
    BAD(RF_ERR_VALUE, "cand_to_user is NULL", call.cand_to_user = NULL);
    BAD(RF_ERR_VALUE, "k is NULL", call.k = NULL);
    BAD(RF_ERR_VALUE, "v is NULL", call.v = NULL);
    BAD_CONTENTS(RF_ERR_INDEX, "cand_to_user[1] is 2; expected 0 to 1", map[1] = 2);
    BAD_CONTENTS(RF_ERR_INDEX, "cand_to_user[2] is -1", map[2] = -1);
    BAD_CONTENTS(RF_ERR_INDEX, "no index is valid", call.n_users = 0);
    BAD_CONTENTS(RF_ERR_VALUE, "kv_lengths[0] is 3; expected 0 to 2",
                 (call.kv_lengths = lengths, lengths[0] = 3));
    BAD_CONTENTS(RF_ERR_VALUE, "kv_lengths[1] is -2", (call.kv_lengths = lengths, lengths[1] = -2));
    BAD_CONTENTS(RF_ERR_VALUE, "kv_offsets[0] is -1", (call.kv_offsets = offsets, offsets[0] = -1));
    BAD_CONTENTS(RF_ERR_VALUE, "kv_offsets[2] is 0; expected 1", (call.kv_offsets = offsets, offsets[2] = 0));
    BAD_CONTENTS(RF_ERR_VALUE, "kv_offsets[2] is 3", (call.kv_offsets = offsets, offsets[2] = 3));
}
