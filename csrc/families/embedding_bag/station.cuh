/* Stations: where the rows that are in flight wait until they are summed (Jain et al., MICRO'24, section
 * IV-B and figure 7). A lane loads and later adds its own columns of its slot's row, so no station needs a
 * barrier among threads.
 *
 *   none, register, local   batches: RF_DISTANCE rows a slot are loaded, then all are added
 *   shared, l1              rolling: a row is added, then the one RF_DISTANCE later takes its place
 *
 * Each is a struct with fetch(columns, u, row, valid) and add(columns, u, row, valid, scale, sum); `u` is the place in
 * the ring, 0 ... RF_DISTANCE - 1. Rows that are not valid are not touched. A rolling station also has
 * fetched(), after each fetch, and wait(), before each add.
 *
 * Rows copied by the bulk engine of sm_90 (cp.async.bulk, one copy a row) were tried and are slower on an
 * H200: they pass L1 by, and copies of one hot row wait for each other in L2.
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

/* Registers; with a distance of 1 this is the plain loop. LOCAL: local memory, since a place that the compiler cannot
 * know keeps the ring out of registers. */
template <class SHAPE, bool LOCAL> struct rf_in_thread {
    enum { ROLLING = 0 };
    typename SHAPE::vector ring[SHAPE::AHEAD][SHAPE::VECTORS];
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

/* The first-level cache: rows are asked for early and loaded when they are due. */
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

/* Shared memory, by asynchronous copies of a lane's own columns: [distance][vectors][threads]. */
template <class SHAPE> struct rf_in_shared_memory {
    enum { ROLLING = 1 };
    typename SHAPE::vector *ring; /* this thread's part */

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
    /* Every step is a group, also an empty one, so that the oldest of RF_DISTANCE groups is the row due. */
    RF_INLINE void fetched() { asm volatile("cp.async.commit_group;" ::: "memory"); }
    RF_INLINE void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(SHAPE::AHEAD - 1) : "memory"); }
    template <class ROW>
    RF_INLINE void add(const rf_columns<SHAPE> &columns, int u, ROW, bool valid, float scale,
                       typename SHAPE::sums &to) {
#pragma unroll
        for (int v = 0; v < SHAPE::VECTORS; v++) {
            if (valid && columns.inside(v)) rf_add<SHAPE>(*at(u, v), v, scale, to);
        }
    }
};

#endif
