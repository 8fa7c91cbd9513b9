/* The ring of tables of the schedule "staged" (staged/staged.cu). Helpers (staged/producer.cuh) write it,
 * warps pool from it.
 *
 * A table begins at the end of the previous table and may wrap around the end of the ring. Its turn is its
 * position in the block's list of tasks. Two turns are active: one is pooled while the next is copied. Each
 * turn has a list of its bags by length, longest first: bags that a warp pools together then have about equal
 * lengths, and short bags fill the end. Each turn has three barriers: `bags_listed` and `full`, the list and the
 * table are complete; `empty`, all warps have released them.
 */
#ifndef RECFUSE_FUSED_RING_CUH
#define RECFUSE_FUSED_RING_CUH

#include "families/fused_embedding_bag/fused.cuh"

constexpr int SLOTS = 2; /* tables in the ring or on their way */
constexpr rf_u32 COPY = 16384; /* bytes of one copy */
constexpr rf_u32 LINE = 128; /* alignment of a table, so that no row wraps around the end of the ring */
constexpr rf_u32 WORD = 16; /* alignment of copies */
constexpr int WARPS = RF_BLOCK / 32; /* pooling warps */
constexpr int HELPERS = RF_FUSED_STAGED_HELPERS; /* producer threads */
constexpr int MOST_BAGS = RF_FUSED_STAGED_BAGS;
constexpr int LENGTHS = 128; /* classes of length: eight an octave, from 1 to 65,535 */

/* The bags of a task, longest first. */
struct bag_list {
    rf_bag bags[MOST_BAGS];
    rf_u16 numbers[MOST_BAGS]; /* relative to the first bag of the task */
};

/* A task in the ring, as the pooling warps need it. */
struct staged_task {
    int feature; /* -1: end of the list */
    int first_bag, last_bag, schedule;
    rf_u8 *output; /* of the feature's first column, for bag 0 */
    rf_rows rows;
    RF_INDEX padding;
    rf_u32 base; /* begin of the table in the ring */
};

struct ring {
    rf_u8 bytes[RF_FUSED_STAGED_RING];
    rf_u8 zeros[LINE]; /* the row of invalid and missing lookups */
    bag_list lists[SLOTS];
    int starts[LENGTHS]; /* begins of the length classes of the list being built */
    RF_OFFSET offsets[MOST_BAGS + 2]; /* of the bags of the task */
    rf_u64 bags_listed[SLOTS], full[SLOTS], empty[SLOTS];
    staged_task tasks[SLOTS];
    int claims[2 * SLOTS]; /* next bag to claim, a counter per turn: see lay_out */
};
static_assert(sizeof(ring) <= RF_FUSED_STAGED_SHARED, "as fused_args.h says");
static_assert(LENGTHS == HELPERS && MOST_BAGS % HELPERS == 0, "each helper has as much to do");
static_assert(RF_FUSED_STAGED_RING % LINE == 0, "so that rows lie in one piece");
static_assert(sizeof(RF_POSITION) == 4, "calls with more lookups have no tables staged");

extern __shared__ __align__(1024) rf_u8 shared[];

RF_INLINE int helper() { return threadIdx.x - RF_BLOCK; }
RF_INLINE ring &the_ring() { return *(ring *)shared; }
RF_INLINE rf_u32 address_of(const void *in_shared) { return (rf_u32)__cvta_generic_to_shared(in_shared); }

RF_INLINE void barrier_new(rf_u64 *barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_of(barrier)), "r"(arrivals)
                 : "memory");
}
RF_INLINE void barrier_arrive(rf_u64 *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address_of(barrier)) : "memory");
}
RF_INLINE void barrier_expect(rf_u64 *barrier, rf_u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_of(barrier)),
                 "r"(bytes)
                 : "memory");
}
RF_INLINE void barrier_wait(rf_u64 *barrier, rf_u32 parity) {
    rf_u32 completed = 0;
    while (!completed) {
        asm volatile("{\n\t.reg .pred finished;\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 finished, [%1], %2, 100000;\n\t"
                     "selp.u32 %0, 1, 0, finished;\n\t}"
                     : "=r"(completed)
                     : "r"(address_of(barrier)), "r"(parity)
                     : "memory");
    }
}

/* Starts a bulk copy that completes on `barrier`. Addresses and sizes are multiples of WORD. L2 evicts its
 * lines first. */
RF_INLINE void copy_bulk(void *to, const rf_u8 *from, rf_u32 bytes, rf_u64 *barrier) {
    rf_u64 read_once;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(read_once));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(address_of(to)),
                 "l"(from), "r"(bytes), "r"(address_of(barrier)), "l"(read_once)
                 : "memory");
}

/* Starts a copy of an element of 4 or 8 bytes; copies_wait waits for all copies of this thread. */
template <class T> RF_INLINE void copy_element(T *to, const T *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address_of(to)), "l"(from), "n"(sizeof(T))
                 : "memory");
}
RF_INLINE void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

RF_INLINE void ring_new() {
    ring &to = the_ring();
    if (threadIdx.x < LINE / 4) ((int *)to.zeros)[threadIdx.x] = 0;
    if (threadIdx.x < 2 * SLOTS) to.claims[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            barrier_new(&to.bags_listed[i], HELPERS);
            barrier_new(&to.full[i], 1);
            barrier_new(&to.empty[i], WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
}

#endif
