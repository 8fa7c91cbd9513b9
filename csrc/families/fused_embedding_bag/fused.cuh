/* Shared by the kernels of the fused embedding bag: reads of indices and offsets, and reports of invalid
 * ones.
 *
 * Positions of lookups count from `indices`, rounded down to a multiple of four elements, so that
 * staged/staged.cu loads four indices by one aligned load. The first lookup has the position `lead`; `end` is
 * past the last.
 */
#ifndef RECFUSE_FUSED_CUH
#define RECFUSE_FUSED_CUH

#include "gpu/device/element.cuh"
#include "gpu/device/sums.cuh"

#ifndef RF_POSITION
#define RF_POSITION int /* type of a position; rf_i64 for 2^31 lookups and more */
#endif
#ifndef RF_CALLERS_MAPPING
#define RF_CALLERS_MAPPING 0 /* the caller gives the mapping: kernels check its tasks */
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
#define RF_OUTPUT RF_FLOAT32
#endif
#ifndef RF_WITH_STAGED
#define RF_WITH_STAGED 0 /* runs concurrently with staged/staged.cu: launched after it, ends after it */
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

/* Returns true if the offsets of a bag are valid. Only the task that has the very first offset checks that it
 * is 0. */
RF_INLINE bool rf_good_bag(const rf_fused_args &args, RF_OFFSET begin, RF_OFFSET end) {
    typedef rf_unsigned<sizeof(RF_OFFSET)>::type number; /* a negative offset is larger than `lookups` */
    return (number)begin <= (number)end && (number)end <= (number)(args.end - args.lead);
}

/* Returns true if the task has the very first offset and it is not 0. */
RF_INLINE bool rf_bad_start(const rf_fused_args &args, int feature, int first_bag) {
    return RF_CHECK && feature == 0 && first_bag == 0 && rf_load(args.offsets) != 0;
}

/* Checks a task of the caller's mapping. Invalid parts are skipped without a report. */
RF_INLINE bool rf_is_feature(const rf_fused_args &args, int feature) {
    return !RF_CALLERS_MAPPING || (rf_u32)feature < (rf_u32)args.n_features;
}

/* Returns the bag of two offsets. Invalid offsets are counted and give an empty bag. */
RF_INLINE rf_bag rf_bag_of(const rf_fused_args &args, RF_OFFSET begin, RF_OFFSET end, int &bad) {
    rf_bag bag_bounds = {0, 0};
    if (RF_CHECK && !rf_good_bag(args, begin, end)) {
        bad++;
        return bag_bounds;
    }
    bag_bounds.begin = (RF_POSITION)begin + args.lead;
    bag_bounds.end = (RF_POSITION)end + args.lead;
    return bag_bounds;
}

/* Returns bag `bag` of a feature, or an empty bag past the last. */
RF_INLINE rf_bag rf_load_bag(const rf_fused_args &args, const RF_OFFSET *offsets, int bag, int last_bag,
                             int &bad) {
    if (bag >= last_bag) return {0, 0};
    const RF_OFFSET begin = rf_load(offsets + bag), end = rf_load(offsets + bag + 1);
    return rf_bag_of(args, begin, end, bad);
}

/* The number of rows of a table that indices of this type can address. */
typedef rf_unsigned<sizeof(RF_INDEX)>::type rf_rows;
RF_INLINE rf_rows rf_rows_of(const rf_fused_descriptor &feature) {
    const rf_i64 most = sizeof(RF_INDEX) == 4 ? 0x80000000ll : 0x7fffffffffffffffll;
    const rf_i64 rows = rf_load(&feature.rows);
    return (rf_rows)(rows < most ? rows : most);
}
RF_INLINE bool rf_in_table(RF_INDEX index, rf_rows rows) { return (rf_rows)index < rows; }

/* A valid row index. */
#if RF_WIDE_ROWS
typedef rf_u64 rf_row_number;
#else
typedef rf_u32 rf_row_number; /* all tables have less than 2^32 rows */
#endif
constexpr rf_row_number RF_NO_ROW = ~(rf_row_number)0;
struct __align__(16) rf_four_rows {
    rf_row_number number[4];
};
RF_INLINE const rf_u8 *rf_row(const rf_u8 *table, rf_row_number row, rf_u32 pitch) {
    return table + (rf_u64)row * pitch;
}

/* Reports the first invalid value in the bags `bag`, bag + step, ... of a feature. It reads all values again,
 * because this is rare and the caller then keeps no details. */
static __device__ __noinline__ void rf_report_bags(const rf_fused_args &args, int number, int bag,
                                                   int last_bag, int step) {
    const rf_i64 rows = rf_load(&args.features[number].rows), lookups = args.end - args.lead;
    for (; bag < last_bag; bag += step) {
        const rf_i64 first_offset = (rf_i64)number * args.bags + bag;
        const RF_OFFSET begin = rf_load(args.offsets + first_offset),
                        end = rf_load(args.offsets + first_offset + 1);
        if (!rf_good_bag(args, begin, end) || (first_offset == 0 && begin != 0)) {
            const bool first = begin < 0 || begin > lookups || (first_offset == 0 && begin != 0);
            rf_report<RF_OPERATOR_fused_embedding_bag>(args.errors,
                                                       {RF_ARGUMENT_offsets,
                                                        first ? first_offset : first_offset + 1, bag,
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

/* Reports the first invalid value of this block's task, or, for a tile, of this lane's feature. It reads the
 * task again, because keeping it would take registers from the rows in flight. */
static __device__ __noinline__ void rf_report_task(const rf_fused_args &args, bool tiled) {
    const rf_fused_task *task = args.tasks + blockIdx.x;
    const int number = rf_load(&task->feature);
    const int feature = tiled ? args.lanes[(rf_i64)number * 32 + threadIdx.x % 32].feature : number;
    rf_report_bags(args, feature, rf_load(&task->first_bag), min(rf_load(&task->last_bag), args.bags), 1);
}

/* Divides with an error of at most one unit in the last place, without the call of an exact division. */
RF_INLINE float rf_divide(float value, float divisor) {
    float inverse;
    asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(divisor));
    const float quotient = value * inverse, residual = fmaf(-quotient, divisor, value);
    /* if the quotient is inf or NaN, the remainder is NaN */
    return residual == residual ? fmaf(residual, inverse, quotient) : quotient;
}

/* Waits before the first access to memory that a previous kernel may access. Repeated calls are allowed. */
RF_INLINE void rf_wait_for_inputs() {
    if (!RF_WITH_STAGED) rf_wait_for_previous_kernel();
}

/* Loads a task. A different NUMBER keeps the compiler from merging the loads of two schedules: see
 * fused_embedding_bag.cu. */
template <int NUMBER> RF_INLINE rf_fused_task rf_load_task(const rf_fused_task *at) {
    rf_fused_task task;
    asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4]; // schedule %5"
                 : "=r"(task.feature), "=r"(task.first_bag), "=r"(task.last_bag), "=r"(task.schedule)
                 : "l"(at), "n"(NUMBER));
    asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4 + 16]; // schedule %5"
                 : "=r"(task.slice), "=r"(task.split), "=r"(task.group), "=r"(task.partials)
                 : "l"(at), "n"(NUMBER));
    return task;
}

/* Stores N elements to the output at `to`, which is aligned to STORE bytes. */
template <int STORE, int N> RF_INLINE void rf_store(rf_u8 *to, const float *values) {
    constexpr int BYTES = rf_element<RF_OUTPUT>::BYTES,
                  VALUES_A_STORE = N * BYTES < STORE ? N : STORE / BYTES;
#pragma unroll
    for (int at = 0; at < N; at += VALUES_A_STORE)
        *(rf_elements<RF_OUTPUT, VALUES_A_STORE> *)(to + at * BYTES) =
            rf_elements_of<RF_OUTPUT, VALUES_A_STORE>(values + at);
}

#endif
