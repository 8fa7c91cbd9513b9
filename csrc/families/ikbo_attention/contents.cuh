/* Checks of maps, lengths and offsets for both paths: the user of a candidate, and the reports of invalid
 * values. */
#ifndef RECFUSE_IKBO_ATTENTION_CONTENTS_CUH
#define RECFUSE_IKBO_ATTENTION_CONTENTS_CUH

#include "gpu/device/common.cuh"
#include "families/ikbo_attention/attention_keys_args.h"

/* The destination of errors. */
struct reporter_t {
    const rf_error_word &errors;
    bool reports;
};
RF_INLINE void report(const reporter_t &to, rf_argument argument, rf_i64 at, rf_i64 value, rf_i64 limit,
                      rf_i64 end) {
    if (to.reports) rf_report<RF_OPERATOR_ikbo_attention>(to.errors, {argument, at, -1, value, limit, end});
}

/* Returns the user of candidate `at` of n_items, or keys.count for an invalid user. */
RF_INLINE rf_i32 user_at(const rf_integers &map, const rf_attention_users &keys, rf_i64 at) {
    const rf_i64 user = rf_integer_at(&map, at);
    return (rf_i32)((rf_u64)user < (rf_u64)keys.count ? user : keys.count);
}

RF_INLINE void check_map(const rf_integers &map, const rf_attention_users &keys, rf_i64 at, rf_i64 n_items,
                         const reporter_t &to) {
    const rf_i64 user = rf_integer_at(&map, at);
    if ((rf_u64)user >= (rf_u64)keys.count)
        report(to, RF_ARGUMENT_attending_to, at, user, keys.count, n_items);
}

/* Checks the length or the offset of user `at`; for offsets also the last one, at keys.count. */
RF_INLINE void check_keys(const rf_attention_users &keys, rf_i64 at, const reporter_t &to) {
    if (keys.lengths.data != nullptr && at < keys.count) {
        const rf_i64 length = rf_integer_at(&keys.lengths, at);
        if (length < 0 || length > keys.positions)
            report(to, RF_ARGUMENT_kv_lengths, at, length, 0, keys.positions);
    }
    if (keys.offsets.data != nullptr && at <= keys.count) {
        const rf_i64 offset = rf_integer_at(&keys.offsets, at);
        rf_i64 before = at > 0 ? rf_integer_at(&keys.offsets, at - 1) : 0;
        if (before < 0 || before > keys.positions) before = 0; /* that offset is reported itself */
        if (offset < before || offset > keys.positions)
            report(to, RF_ARGUMENT_kv_offsets, at, offset, before, keys.positions);
    }
}

#endif
