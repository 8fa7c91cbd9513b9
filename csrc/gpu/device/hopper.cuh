/* Shared by kernels for compute capability 9.0: barriers in shared memory, copies by the tensor memory
 * accelerator (TMA) that complete on them, clusters.
 *
 * Addresses of shared memory have 32 bits (rf_shared). The phase of a barrier ends after the number of
 * arrivals for which it was initialised and the copies of all announced bytes. A waiting thread passes the
 * parity of the phase: the first is 0, and waiting for parity 1 of a new barrier returns at once. A wait
 * never gives up. It has no trap for a phase that does not end: with a trap in the loop the compiler
 * serialises all wgmma of the kernel (its warning C7512).
 */
#ifndef RECFUSE_HOPPER_CUH
#define RECFUSE_HOPPER_CUH

#include "gpu/device/common.cuh"
#include "gpu/device/tensor_map_type.h"

RF_INLINE rf_u32 rf_shared(const void *address) { return (rf_u32)__cvta_generic_to_shared(address); }

RF_INLINE void rf_barrier_init(rf_u32 barrier, rf_u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
/* After the initialisations, by the thread that made them; followed by a barrier of the cluster (or
 * block). */
RF_INLINE void rf_barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

RF_INLINE void rf_barrier_wait(rf_u32 barrier, rf_u32 parity) {
    rf_u32 arrived = 0;
    while (!arrived) {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(arrived)
            : "r"(barrier), "r"(parity)
            : "memory");
    }
}
RF_INLINE void rf_barrier_arrive(rf_u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
RF_INLINE void rf_barrier_arrive_times(rf_u32 barrier, rf_u32 times) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(times) : "memory");
}
/* Arrives once, and announces a number of bytes. */
RF_INLINE void rf_barrier_expect(rf_u32 barrier, rf_u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
/* Arrives at the same address in block `rank` of the cluster. Without .release, which compiles to a fence of
 * the whole GPU (a microsecond): the signal means that this thread has read, so it publishes nothing. */
RF_INLINE void rf_barrier_arrive_at(rf_u32 barrier, rf_u32 rank) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

/* All threads of all blocks of the cluster; needs no convergence. */
RF_INLINE void rf_cluster_sync() {
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}
/* Threads of the block that name the same barrier; `id` 1 ... 15. */
RF_INLINE void rf_group_sync(rf_u32 id, rf_u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* The lines that leave L2 first, and last. */
#define RF_L2_FIRST 0x12F0000000000000ull
#define RF_L2_NORMAL 0x1000000000000000ull
#define RF_L2_LAST 0x14F0000000000000ull

/* `bytes` (a multiple of 16, both addresses too) to shared memory, counted by `barrier`. */
RF_INLINE void rf_copy(rf_u32 to, const void *from, rf_u32 bytes, rf_u32 barrier, rf_u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
}
/* The box at (x, y, z) of a tensor, to this block; or to the same address in both blocks of a cluster of two,
 * and counted by the barrier at the same address in each. */
RF_INLINE void rf_copy_box(rf_u32 to, const rf_tensor_map *map, int x, int y, int z, rf_u32 barrier,
                           rf_u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy)
        : "memory");
}
/* As above, with four dimensions. */
RF_INLINE void rf_copy_box(rf_u32 to, const rf_tensor_map *map, int x, int y, int z, int w, rf_u32 barrier,
                           rf_u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(policy)
        : "memory");
}
RF_INLINE void rf_copy_box_to_both(rf_u32 to, const rf_tensor_map *map, int x, int y, int z, rf_u32 barrier,
                                   rf_u64 policy) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6, %7;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"((rf_u16)3), "l"(policy)
                 : "memory");
}
/* Prefetches the box at (x, y, z) of a tensor into L2. */
RF_INLINE void rf_prefetch_box(const rf_tensor_map *map, int x, int y, int z) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(x),
                 "r"(y), "r"(z)
                 : "memory");
}
/* As above, with four dimensions. */
RF_INLINE void rf_prefetch_box(const rf_tensor_map *map, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(x),
                 "r"(y), "r"(z), "r"(w)
                 : "memory");
}
/* A map is fetched, so that the first copy by it need not wait. */
RF_INLINE void rf_prefetch_map(const rf_tensor_map *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
/* Stores a box from shared memory, as a group of this thread; rf_stores_wait<N> returns when all groups
 * except the last N have been read. Ordinary stores are visible to it after rf_async_fence. */
RF_INLINE void rf_store_box(const rf_tensor_map *map, int x, int y, int z, rf_u32 from) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
        "r"(from), "r"(x), "r"(y), "r"(z)
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
RF_INLINE void rf_store_box(const rf_tensor_map *map, int x, int y, int z, int w, rf_u32 from) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
        "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int N> RF_INLINE void rf_stores_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
RF_INLINE void rf_stores_finish() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
/* Between ordinary accesses and those of copies: to shared memory; to global memory too. */
RF_INLINE void rf_async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
RF_INLINE void rf_async_fence_global() { asm volatile("fence.proxy.async;" ::: "memory"); }

/* A count in global memory by which blocks tell each other that something is done. */
RF_INLINE void rf_count_up(rf_u32 *count) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}
RF_INLINE rf_u32 rf_count(const rf_u32 *count) {
    rf_u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
    return value;
}
RF_INLINE void rf_count_wait(const rf_u32 *count, rf_u32 least) {
    while (rf_count(count) < least) continue;
}

#endif
