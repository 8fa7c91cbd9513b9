/* How lookups are grouped by row, on the host: keys.cu, the pass of sort.cu and backward_group.cu, as general.c launches them. With RF_ITEMS,
 * RF_VALUE and types of lookups. */
#include "warps.h"

#include <vector>

#define RF_GROUPED 1
#define RF_DIGIT_BITS RF_BACKWARD_MOST_DIGIT_BITS
#define RF_ENTRIES RF_ENTRIES_DIRECT
#include "gpu/device/bags.cuh"
#include "families/fused_backward/sort/ranks.cuh"

thread_local __align__(16) rf_u8 memory[256 << 10]; /* a block's dynamic shared memory */

/* Names of one are not seen by the others. */
namespace keys {
#include "families/fused_backward/keys.cu"
}
namespace sort {
#include "families/fused_backward/sort/sort.cu"
}
namespace group {
#include "families/fused_backward/sort/backward_group.cu"
}

static void keys_block(const void *args) {
    keys::rf_backward_keys(*static_cast<const rf_backward_keys_args *>(args));
}
static void places_block(const void *args) {
    sort::rf_backward_places(*static_cast<const rf_backward_sort_args *>(args));
}
static void sort_block(const void *args) {
    sort::rf_backward_sort(*static_cast<const rf_backward_sort_args *>(args));
}
static void group_block(const void *args) {
    group::rf_backward_group(*static_cast<const rf_backward_group_args *>(args));
}

/* Memory of whatever contents, and behind it some that nobody may write to. */
template <typename T> struct room_t {
    enum { BEHIND = 256, ANY = 0xcd };
    size_t bytes;
    std::vector<rf_u64> words;
    explicit room_t(size_t count)
        : bytes(count * sizeof(T)), words((bytes + BEHIND) / 8 + 3, UINT64_C(0xcdcdcdcdcdcdcdcd)) {}
    T *at() { return (T *)(((uintptr_t)words.data() + 15) / 16 * 16); }
    bool is_kept() {
        const rf_u8 *behind = (const rf_u8 *)at() + bytes;
        for (int i = 0; i < BEHIND; i++)
            if (behind[i] != ANY) return false;
        return true;
    }
};

/* What a call is. */
struct call_t {
    rf_backward_keys_args lookups; /* without memory of the call */
    rf_i32 tile, part_blocks;
};

/* Entries to `grouped`: [lookups]. Returns how many, or -1: something was written behind its memory. */
extern "C" __attribute__((visibility("default"))) rf_i64 group_lookups(const call_t *call,
                                                                       rf_backward_entry *grouped,
                                                                       rf_u64 seed) {
    const size_t digits = (size_t)1 << RF_DIGIT_BITS, n = (size_t)call->lookups.lookups;
    const size_t segments = (size_t)call->lookups.segments.count, parts = RF_BACKWARD_MOST_PARTS(n);
    const size_t chunks = (n + CHUNK_ENTRIES - 1) / CHUNK_ENTRIES + segments - 1;
    const size_t tiles = (n + (size_t)call->tile - 1) / (size_t)call->tile + segments - 1;
    const rf_i32 part_blocks = call->part_blocks < (rf_i32)parts ? call->part_blocks : (rf_i32)parts;
    room_t<rf_backward_entry> first(n), second(n), third(n);
    room_t<rf_u32> sums(2 * RF_BACKWARD_MOST_SEGMENTS + segments * digits), places(digits * chunks);
    room_t<rf_u32> begins(segments * (digits + 1)), zeros(2 + 2 * parts);
    room_t<rf_backward_part> list(parts);
    room_t<rf_i64> count(1);
    rf_u32 *const totals = sums.at() + RF_BACKWARD_MOST_SEGMENTS;
    const rf_backward_counts counts = {sums.at(),   totals, totals + RF_BACKWARD_MOST_SEGMENTS,
                                       places.at(), 0,      RF_DIGIT_BITS};
    const rf_backward_groups groups = {begins.at(),    list.at(),      zeros.at(),
                                       zeros.at() + 1, zeros.at() + 2, zeros.at() + 2 + parts};
    rf_backward_keys_args keys = call->lookups;
    keys.entries = first.at();
    keys.counts = counts;
    keys.zeros = zeros.at();
    keys.n_zeros = (rf_i64)(2 + 2 * parts);
    const rf_backward_sort_args sort = {first.at(),    second.at(), count.at(), keys.trash,
                                        keys.segments, counts,      groups};
    const rf_backward_group_args group = {second.at(), third.at(),  keys.segments, counts,
                                          groups,      part_blocks, call->tile};
    run_blocks(keys_block, &keys, (unsigned)chunks, RF_BACKWARD_SORT_BLOCK, seed);
    run_blocks(places_block, &sort, (unsigned)(segments * (digits / RF_BACKWARD_PLACES_DIGITS)),
               RF_BACKWARD_SORT_BLOCK, seed + 1);
    run_blocks(sort_block, &sort, (unsigned)chunks, RF_BACKWARD_SORT_BLOCK, seed + 2);
    run_blocks(group_block, &group, (unsigned)part_blocks + (unsigned)tiles, RF_BACKWARD_BLOCK, seed + 3);
    memcpy(grouped, third.at(), n * sizeof *grouped);
    const bool kept = first.is_kept() && second.is_kept() && third.is_kept() && sums.is_kept() &&
                      places.is_kept() && begins.is_kept() && zeros.is_kept() && list.is_kept() &&
                      count.is_kept();
    return kept ? *count.at() : -1;
}
