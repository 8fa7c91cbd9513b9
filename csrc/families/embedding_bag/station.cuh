/* Stations hold the rows in flight until they are added (Jain et al., MICRO'24, section IV-B and figure 7). A
 * lane loads and adds only its own columns of its slot's row, so no station needs a barrier.
 *
 *   none, register, local   batches: load RF_DISTANCE rows per slot, then add them
 *   shared, l1              rolling: add a row, then fetch the row RF_DISTANCE later into its position
 *
 * Each station is a struct with fetch(columns, u, row, valid) and add(columns, u, row, valid, scale, sum);
 * `u` is the position in the ring, 0 ... RF_DISTANCE - 1. Rows that are not valid are not accessed. A rolling
 * station also has fetched(), called after each fetch, and wait(), called before each add.
 *
 * The bulk copies of sm_90 (cp.async.bulk) bypass L1, and copies of one hot row serialise in L2: they are
 * slower on an H200.
 */
#ifndef RECFUSE_STATION_CUH
#define RECFUSE_STATION_CUH

#include "families/embedding_bag/bag.cuh"

template <class SHAPE>
RF_INLINE void rf_add(const typename SHAPE::vector &from, int v, float scale, typename SHAPE::sums &to) {
#pragma unroll
    for (int e = 0; e < SHAPE::ELEMENTS; e++) {
        const float value = SHAPE::element::get(from, e);
        float &sum = to.of[v * SHAPE::ELEMENTS + e];
        if (SHAPE::POOLING == RF_MAX) {
            sum = fmaxf(sum, value);
        } else if (SHAPE::WEIGHTED) {
            sum = fmaf(scale, value, sum);
        } else {
            sum += value;
        }
    }
}

/* Station in registers; with a distance of 1 it is the plain loop. LOCAL: in local memory, because the
 * compiler cannot keep a ring with an unknown position in registers. */
template <class SHAPE, bool LOCAL> struct rf_in_thread {
    enum { ROLLING = 0 };
    typename SHAPE::vector ring[SHAPE::DISTANCE][SHAPE::VECTORS];
    int zero;

    RF_INLINE rf_in_thread(rf_u8 *) {
        if (LOCAL) asm volatile("mov.u32 %0, 0;" : "=r"(zero));
    }
    template <class ROW> RF_INLINE void fetch(const rf_columns<SHAPE> &columns, int u, ROW row, bool valid) {
        const rf_u8 *from = columns.address(row);
#pragma unroll
        for (int v = 0; v < SHAPE::VECTORS; v++) {
            if (valid && columns.inside(v))
                ring[LOCAL ? u + zero : u][v] =
                    rf_load((const typename SHAPE::vector *)from + v * SHAPE::LANES);
        }
    }
    template <class ROW>
    RF_INLINE void add(const rf_columns<SHAPE> &columns, int u, ROW, bool valid, float scale,
                       typename SHAPE::sums &to) {
#pragma unroll
        for (int v = 0; v < SHAPE::VECTORS; v++) {
            if (valid && columns.inside(v)) rf_add<SHAPE>(ring[LOCAL ? u + zero : u][v], v, scale, to);
        }
    }
};

/* Station in L1: fetch prefetches a row, add loads it. */
template <class SHAPE> struct rf_in_l1 {
    enum { ROLLING = 1 };

    RF_INLINE rf_in_l1(rf_u8 *) {}
    template <class ROW> RF_INLINE void fetch(const rf_columns<SHAPE> &columns, int, ROW row, bool valid) {
        const rf_u8 *from = columns.address(row);
#pragma unroll
        for (int v = 0; v < SHAPE::VECTORS; v++) {
            if (valid && columns.inside(v)) {
                asm volatile("prefetch.global.L1 [%0];" ::"l"(from + v * SHAPE::LANES * SHAPE::ALIGN));
            }
        }
    }
    RF_INLINE void fetched() {}
    RF_INLINE void wait() {}
    template <class ROW>
    RF_INLINE void add(const rf_columns<SHAPE> &columns, int, ROW row, bool valid, float scale,
                       typename SHAPE::sums &to) {
        const rf_u8 *from = columns.address(row);
#pragma unroll
        for (int v = 0; v < SHAPE::VECTORS; v++) {
            if (valid && columns.inside(v)) {
                rf_add<SHAPE>(rf_load((const typename SHAPE::vector *)from + v * SHAPE::LANES), v, scale, to);
            }
        }
    }
};

/* Station in shared memory: asynchronous copies of a lane's own columns. [distance][vectors][threads]. */
template <class SHAPE> struct rf_in_shared_memory {
    enum { ROLLING = 1 };
    typename SHAPE::vector *ring; /* this thread's elements */

    RF_INLINE rf_in_shared_memory(rf_u8 *shared) : ring((typename SHAPE::vector *)shared + threadIdx.x) {}
    RF_INLINE typename SHAPE::vector *at(int u, int v) {
        return ring + (u * SHAPE::VECTORS + v) * SHAPE::BLOCK;
    }
    template <class ROW> RF_INLINE void fetch(const rf_columns<SHAPE> &columns, int u, ROW row, bool valid) {
        const rf_u8 *from = columns.address(row);
#pragma unroll
        for (int v = 0; v < SHAPE::VECTORS; v++) {
            if (valid && columns.inside(v)) {
                asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(
                                 (rf_u32)__cvta_generic_to_shared(at(u, v))),
                             "l"(from + v * SHAPE::LANES * SHAPE::ALIGN), "n"((int)SHAPE::ALIGN)
                             : "memory");
            }
        }
    }
    /* Each fetch commits a group, even an empty group, so that the oldest of RF_DISTANCE groups is the row to
     * add. */
    RF_INLINE void fetched() { asm volatile("cp.async.commit_group;" ::: "memory"); }
    RF_INLINE void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(SHAPE::DISTANCE - 1) : "memory"); }
    template <class ROW>
    RF_INLINE void add(const rf_columns<SHAPE> &columns, int u, ROW, bool valid, float scale,
                       typename SHAPE::sums &to) {
#pragma unroll
        for (int v = 0; v < SHAPE::VECTORS; v++) {
            if (valid && columns.inside(v)) rf_add<SHAPE>(*at(u, v), v, scale, to);
        }
    }
};

/* The struct of a station, by its rf_station. NONE is REGISTER with a distance of 1. */
template <class SHAPE, int STATION> struct rf_station_of;
template <class SHAPE> struct rf_station_of<SHAPE, RF_STATION_NONE> {
    typedef rf_in_thread<SHAPE, false> type;
};
template <class SHAPE> struct rf_station_of<SHAPE, RF_STATION_REGISTER> {
    typedef rf_in_thread<SHAPE, false> type;
};
template <class SHAPE> struct rf_station_of<SHAPE, RF_STATION_SHARED> {
    typedef rf_in_shared_memory<SHAPE> type;
};
template <class SHAPE> struct rf_station_of<SHAPE, RF_STATION_LOCAL> {
    typedef rf_in_thread<SHAPE, true> type;
};
template <class SHAPE> struct rf_station_of<SHAPE, RF_STATION_L1> {
    typedef rf_in_l1<SHAPE> type;
};

#endif
