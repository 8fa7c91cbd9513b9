/* What the kernels of the fused embedding bag share: how indices and offsets are read, and how bad ones are reported.
 *
 * Positions of lookups are counted from `indices`, which is rounded down to a multiple of four elements, so
 * that four indices are one aligned load in staged/staged.cu: the first lookup is number `lead`, behind the last is `end`.
 */
#ifndef RECFUSE_FUSED_CUH
#define RECFUSE_FUSED_CUH

#include "gpu/device/element.cuh"
#include "gpu/device/sums.cuh"

#ifndef RF_POSITION
#define RF_POSITION int /* holds a position; rf_i64 for 2^31 lookups and more */
#endif
#ifndef RF_CALLERS_MAPPING
#define RF_CALLERS_MAPPING 0 /* the mapping is the caller's: tasks are checked before they are done */
#endif
#ifndef RF_WIDE_ROWS
#define RF_WIDE_ROWS 0 /* a table has 2^32 rows or more */
#endif
#ifndef RF_WEIGHTED
#define RF_WEIGHTED 0
#endif
#ifndef RF_CHECK
#define RF_CHECK 1
#endif
#ifndef RF_OUTPUT
#define RF_OUTPUT 0 /* rf_dtype */
#endif
#ifndef RF_WITH_STAGED
#define RF_WITH_STAGED 0 /* runs with staged/staged.cu, which came before it, and ends after it */
#endif
#ifndef RF_BLOCK
#define RF_BLOCK 64
#endif

#include "families/fused_embedding_bag/fused_args.h"

template <int BYTES> struct rf_unsigned;
template <> struct rf_unsigned<4> {
    typedef rf_u32 type;
};
template <> struct rf_unsigned<8> {
    typedef rf_u64 type;
};

RF_INLINE void rf_load_words(int (&to)[4], const int *from) {
    asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "l"(from));
}
RF_INLINE void rf_load_words(rf_i64 (&to)[4], const rf_i64 *from) {
    asm volatile("ld.global.nc.v2.s64 {%0, %1}, [%2];" : "=l"(to[0]), "=l"(to[1]) : "l"(from));
    asm volatile("ld.global.nc.v2.s64 {%0, %1}, [%2];" : "=l"(to[2]), "=l"(to[3]) : "l"(from + 2));
}

/* The lookups of a bag. */
struct rf_bag {
    RF_POSITION begin, end;
};

/* Whether the offsets of a bag are what they may be; of the very first one only the task that has it says more. */
RF_INLINE bool rf_good_bag(const rf_fused_args &args, RF_OFFSET begin, RF_OFFSET end) {
    typedef rf_unsigned<sizeof(RF_OFFSET)>::type number; /* less than zero is more than there are lookups */
    return (number)begin <= (number)end && (number)end <= (number)(args.end - args.lead);
}

/* Whether a task's offsets begin with the very first, and that is not 0. */
RF_INLINE bool rf_bad_start(const rf_fused_args &args, int feature, int first_bag) {
    return RF_CHECK && feature == 0 && first_bag == 0 && rf_load(args.offsets) != 0;
}

/* A mapping that is the caller's is checked as lookups are, but what is wrong is left out without a word. */
RF_INLINE bool rf_is_feature(const rf_fused_args &args, int feature) {
    return !RF_CALLERS_MAPPING || (rf_u32)feature < (rf_u32)args.n_features;
}

/* The bag of two offsets; empty where they are bad, which counts. */
RF_INLINE rf_bag rf_bag_of(const rf_fused_args &args, RF_OFFSET begin, RF_OFFSET end, int &bad) {
    rf_bag found = {0, 0};
    if (RF_CHECK && !rf_good_bag(args, begin, end)) {
        bad++;
        return found;
    }
    found.begin = (RF_POSITION)begin + args.lead;
    found.end = (RF_POSITION)end + args.lead;
    return found;
}

/* Bag `bag` of a feature; empty where it is not there. */
RF_INLINE rf_bag rf_load_bag(const rf_fused_args &args, const RF_OFFSET *offsets, int bag, int last_bag,
                             int &bad) {
    if (bag >= last_bag) return {0, 0};
    const RF_OFFSET begin = rf_load(offsets + bag), end = rf_load(offsets + bag + 1);
    return rf_bag_of(args, begin, end, bad);
}

/* The rows that indices of this type can name, of a table. */
typedef rf_unsigned<sizeof(RF_INDEX)>::type rf_rows;
RF_INLINE rf_rows rf_rows_of(const rf_fused_descriptor &feature) {
    const rf_i64 most = sizeof(RF_INDEX) == 4 ? 0x80000000ll : 0x7fffffffffffffffll;
    const rf_i64 rows = rf_load(&feature.rows);
    return (rf_rows)(rows < most ? rows : most);
}
RF_INLINE bool rf_in_table(RF_INDEX index, rf_rows rows) { return (rf_rows)index < rows; }

/* The number of a row that is in its table. */
#if RF_WIDE_ROWS
typedef rf_u64 rf_row_number;
#else
typedef rf_u32 rf_row_number; /* a table has less than 2^32 rows */
#endif
constexpr rf_row_number RF_NO_ROW = ~(rf_row_number)0;
struct __align__(16) rf_four_rows {
    rf_row_number number[4];
};
RF_INLINE const rf_u8 *rf_row(const rf_u8 *table, rf_row_number row, rf_u32 pitch) {
    return table + (rf_u64)row * pitch;
}

/* Reports the first that is bad in the bags of a feature from `bag` on, each `step`-th: all is read again, since this
 * hardly ever runs, and whoever found it need not keep what would be said of it. */
static __device__ __noinline__ void rf_report_bags(const rf_fused_args &args, int number, int bag,
                                                   int last_bag, int step) {
    const rf_i64 rows = rf_load(&args.features[number].rows), lookups = args.end - args.lead;
    for (; bag < last_bag; bag += step) {
        const rf_i64 place = (rf_i64)number * args.bags + bag;
        const RF_OFFSET begin = rf_load(args.offsets + place), end = rf_load(args.offsets + place + 1);
        if (!rf_good_bag(args, begin, end) || (place == 0 && begin != 0)) {
            const bool first = begin < 0 || begin > lookups || (place == 0 && begin != 0);
            rf_report<RF_OPERATOR_fused_embedding_bag>(args.errors,
                                                       {RF_ARGUMENT_offsets, first ? place : place + 1, bag,
                                                        first ? begin : end, first ? 0 : begin, lookups},
                                                       number);
            return;
        }
        for (rf_i64 i = begin; i < end; i++) {
            const rf_i64 index = rf_load(args.indices + args.lead + i);
            if ((rf_u64)index < (rf_u64)rows) continue;
            rf_report<RF_OPERATOR_fused_embedding_bag>(
                args.errors, {RF_ARGUMENT_indices, i, bag, index, rows, lookups}, number);
            return;
        }
    }
}

/* The same for the task of this block, or for this lane's feature where it is a tile's. The task is read again: to
 * keep it takes registers from the rows in flight. */
static __device__ __noinline__ void rf_report_task(const rf_fused_args &args, bool tiled) {
    const rf_fused_task *task = args.tasks + blockIdx.x;
    const int number = rf_load(&task->feature);
    const int feature = tiled ? args.lanes[(rf_i64)number * 32 + threadIdx.x % 32].feature : number;
    rf_report_bags(args, feature, rf_load(&task->first_bag), min(rf_load(&task->last_bag), args.bags), 1);
}

/* The quotient to the last bit but one at worst; without the call that a division is. */
RF_INLINE float rf_divide(float value, float divisor) {
    float inverse;
    asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(divisor));
    const float near = value * inverse, rest = fmaf(-near, divisor, value);
    /* Where it is no number already, the rest would be none. */
    return rest == rest ? fmaf(rest, inverse, near) : near;
}

/* Before anything is read or written that a kernel before this one may write or read; as often as one likes. */
RF_INLINE void rf_wait_for_inputs() {
    if (!RF_WITH_STAGED) rf_wait_for_previous_kernel();
}

/* A task. NUMBER makes loads by different schedules different: see fused_embedding_bag.cu. */
template <int NUMBER> RF_INLINE rf_fused_task rf_load_task(const rf_fused_task *at) {
    rf_fused_task task;
    asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4]; // schedule %5"
                 : "=r"(task.feature), "=r"(task.first_bag), "=r"(task.last_bag), "=r"(task.schedule)
                 : "l"(at), "n"(NUMBER));
    asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4 + 16]; // schedule %5"
                 : "=r"(task.slice), "=r"(task.share), "=r"(task.group), "=r"(task.partials)
                 : "l"(at), "n"(NUMBER));
    return task;
}

/* N elements of the output from `to` on, which is aligned to STORE bytes. */
template <int STORE, int N> RF_INLINE void rf_store(rf_u8 *to, const float *values) {
    constexpr int BYTES = rf_element<RF_OUTPUT>::BYTES, EACH = N * BYTES < STORE ? N : STORE / BYTES;
#pragma unroll
    for (int at = 0; at < N; at += EACH)
        *(rf_elements<RF_OUTPUT, EACH> *)(to + at * BYTES) = rf_elements_of<RF_OUTPUT, EACH>(values + at);
}

#endif
