/* Simulates a block of threads on the host, for kernels compiled for it. A thread is a context that runs
 * until a barrier or an exchange of its warp or of some lanes. The next thread is drawn at random among those
 * that do not wait. An atomic operation may yield. Blocks of a launch run one after another. Requires
 * tests/c/torch/host or tests/c/warps/host before csrc in the include path. */
#ifndef TESTS_WARPS_H
#define TESTS_WARPS_H

#include <setjmp.h>
#include <ucontext.h>

#include "gpu/device/common.cuh" /* the host's version */

#undef RF_INLINE
#define RF_INLINE inline /* also for member functions */
#define _Alignas alignas /* for headers in C */
#define __shared__ thread_local /* of the only real thread; may be static or extern */
#define RF_FULL_WARP 0xffffffffu

enum {
    MOST_THREADS = 512,
    STACK =
        (1 << 16) + 192, /* no power of two: the ends of all stacks would share a few lines of the cache */
    LEVELS = 6 /* 1, 2 ... 32 lanes that meet */
};

struct int2 {
    int x, y;
};
struct alignas(8) uint2 {
    rf_u32 x, y;
};
struct uint4 {
    rf_u32 x, y, z, w;
};
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline uint2 make_uint2(rf_u32 x, rf_u32 y) { return {x, y}; }
static inline uint4 make_uint4(rf_u32 x, rf_u32 y, rf_u32 z, rf_u32 w) { return {x, y, z, w}; }

/* A rendezvous: each thread waits for the last, then all continue. */
struct meeting_t {
    unsigned here, times;
};
static struct {
    unsigned threads, current, ended, n_ready;
    unsigned ready[MOST_THREADS]; /* threads that may continue, except for the current thread */
    rf_u64 random;
    void (*kernel)(const void *);
    const void *args;
    jmp_buf host, place[MOST_THREADS]; /* where each continues, without the system call of a context switch */
    ucontext_t context[MOST_THREADS]; /* in which each began */
    bool begun[MOST_THREADS];
    meeting_t block, lanes[LEVELS][MOST_THREADS]; /* indexed by the first thread */
    rf_u64 given[LEVELS][2][MOST_THREADS]; /* of this exchange and the previous one */
    unsigned found[2]; /* by threads of the block, at this barrier and the previous one */
    alignas(16) char stack[MOST_THREADS][STACK];
} simulated;
static host_index gridDim = {};

static inline unsigned drawn(unsigned below) {
    simulated.random = simulated.random * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(simulated.random >> 33) % below;
}

static void thread_main();

/* Starts or continues another thread instead of the caller. */
[[noreturn, gnu::noinline]] static void go_to(unsigned thread) {
    simulated.current = threadIdx.x = thread;
    if (simulated.begun[thread]) _longjmp(simulated.place[thread], 1);
    simulated.begun[thread] = true;
    ucontext_t &context = simulated.context[thread];
    getcontext(&context);
    context.uc_stack.ss_sp = simulated.stack[thread];
    context.uc_stack.ss_size = STACK;
    makecontext(&context, thread_main, 0);
    setcontext(&context);
    abort();
}

/* Returns a thread that may continue. */
static inline unsigned drawn_thread() {
    if (simulated.n_ready == 0) fprintf(stderr, "threads wait for ever\n"), abort();
    unsigned *found = &simulated.ready[drawn(simulated.n_ready)];
    const unsigned thread = *found;
    *found = simulated.ready[--simulated.n_ready];
    return thread;
}

/* Continues another thread; returns when this thread continues. */
[[gnu::noinline]] static void leave() {
    if (_setjmp(simulated.place[simulated.current]) == 0) go_to(drawn_thread());
}

static inline void may_go_on(unsigned thread) { simulated.ready[simulated.n_ready++] = thread; }

/* Continues another thread or this thread. */
static inline void yield_to_any() {
    may_go_on(simulated.current);
    leave();
}

/* Waits for `count` threads from `first` on. */
static inline void meet(meeting_t &meeting, unsigned first, unsigned count) {
    if (++meeting.here < count) return leave();
    meeting.here = 0;
    meeting.times++;
    for (unsigned thread = first; thread < first + count; thread++)
        if (thread != simulated.current) may_go_on(thread);
}
static inline void __syncthreads() { meet(simulated.block, 0, simulated.threads); }
static inline int __syncthreads_count(int own) {
    const unsigned turn = simulated.block.times % 2;
    if (simulated.block.here == 0) simulated.found[turn] = 0;
    simulated.found[turn] += own != 0;
    __syncthreads();
    return (int)simulated.found[turn];
}
static inline int __syncthreads_or(int own) { return __syncthreads_count(own) != 0; }

/* Returns the values of the lanes of a mask, by lane; the lanes are adjacent, and a power of two. */
template <typename T> static inline const rf_u64 *exchanged(T own, rf_u32 mask = RF_FULL_WARP) {
    const unsigned thread = threadIdx.x, warp = thread / 32 * 32;
    const unsigned first = warp + (unsigned)__builtin_ctz(mask), count = (unsigned)__builtin_popcount(mask);
    const unsigned level = (unsigned)__builtin_ctz(count);
    meeting_t &meeting = simulated.lanes[level][first];
    rf_u64 *given = simulated.given[level][meeting.times % 2];
    memcpy(&(given[thread] = 0), &own, sizeof own);
    meet(meeting, first, count);
    return given + warp;
}
template <typename T> static inline T exchanged_as(rf_u32 mask, T own, unsigned lane) {
    memcpy(&own, exchanged(own, mask) + lane, sizeof own);
    return own;
}
static inline void __syncwarp(rf_u32 mask = RF_FULL_WARP) { exchanged(0, mask); }
template <typename T> static inline T __shfl_sync(rf_u32 mask, T own, int lane) {
    return exchanged_as(mask, own, (unsigned)lane);
}
template <typename T> static inline T __shfl_up_sync(rf_u32 mask, T own, int step) {
    const int lane = (int)threadIdx.x % 32;
    return exchanged_as(mask, own, (unsigned)(lane < step ? lane : lane - step));
}
template <typename T> static inline T __shfl_xor_sync(rf_u32 mask, T own, int apart) {
    return exchanged_as(mask, own, threadIdx.x % 32 ^ (unsigned)apart);
}
template <typename T> static inline rf_u32 __match_any_sync(rf_u32, T own) {
    rf_u64 bits = 0;
    memcpy(&bits, &own, sizeof own);
    const rf_u64 *all = exchanged(own);
    rf_u32 same = 0;
    for (int i = 0; i < 32; i++) same |= (rf_u32)(all[i] == bits) << i;
    return same;
}
static inline rf_u32 __ballot_sync(rf_u32, bool own) {
    const rf_u64 *all = exchanged(own);
    rf_u32 who = 0;
    for (int i = 0; i < 32; i++) who |= (rf_u32)(all[i] != 0) << i;
    return who;
}
static inline bool __any_sync(rf_u32 mask, bool own) { return __ballot_sync(mask, own) != 0; }
static inline bool __all_sync(rf_u32 mask, bool own) { return __ballot_sync(mask, !own) == 0; }
static inline int __ffs(rf_u32 x) { return __builtin_ffs((int)x); }
static inline int __popc(rf_u32 x) { return __builtin_popcount(x); }
static inline rf_u32 __funnelshift_r(rf_u32 low, rf_u32 high, rf_u32 shift) {
    return (rf_u32)(((rf_u64)high << 32 | low) >> shift % 32);
}
static inline rf_u32 __dp4a(rf_u32 a, rf_u32 b, rf_u32 sum) {
    for (int i = 0; i < 32; i += 8) sum += (a >> i & 0xff) * (b >> i & 0xff);
    return sum;
}
static inline rf_u32 __byte_perm(rf_u32 low, rf_u32 high, rf_u32 selector) {
    rf_u32 to = 0;
    for (int i = 0; i < 4; i++)
        to |= (rf_u32)(((rf_u64)high << 32 | low) >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return to;
}
static inline int __clz(rf_u32 x) { return x != 0 ? __builtin_clz(x) : 32; }

template <typename T> static inline T atomic_before(T *to, T after) {
    const T before = *to;
    *to = after;
    return before;
}
template <typename T, typename M> static inline T atomicAdd(T *to, M more) {
    if (drawn(4) == 0) yield_to_any();
    return atomic_before(to, (T)(*to + (T)more));
}
template <typename T, typename M> static inline T atomicOr(T *to, M more) {
    return atomic_before(to, (T)(*to | (T)more));
}
template <typename T> static inline T atomicMax(T *to, T other) {
    return atomic_before(to, other > *to ? other : *to);
}
template <typename T> static inline T atomicMin(T *to, T other) {
    return atomic_before(to, other < *to ? other : *to);
}
template <typename T> static inline T __ldcg(const T *from) { return *from; }
template <typename T> static inline T __ldcs(const T *from) { return *from; }
template <typename T> static inline T __ldca(const T *from) { return *from; }
template <typename T> static inline void __stcs(T *to, T value) { *to = value; }
template <typename T> static inline void __stwb(T *to, T value) { *to = value; }
static inline void __threadfence() {}
template <typename A, typename B> static inline auto min(A a, B b) -> decltype(a + b) {
    return a < b ? a : b;
}
template <typename A, typename B> static inline auto max(A a, B b) -> decltype(a + b) {
    return a > b ? a : b;
}

/* Ends the kernel of a thread: the last thread returns to the caller of the block. Returns in the next
 * block. */
[[gnu::noinline]] static void end() {
    if (_setjmp(simulated.place[simulated.current]) != 0) return;
    if (++simulated.ended == simulated.threads) _longjmp(simulated.host, 1);
    go_to(drawn_thread());
}

/* A thread of all blocks, one after another. */
static void thread_main() {
    for (;;) {
        simulated.kernel(simulated.args);
        end();
    }
}

/* Runs a block of threads, in whole warps. */
static inline void run_block(void (*kernel)(const void *), const void *args, unsigned threads, rf_u64 seed) {
    if (gridDim.x == 0) gridDim.x = 1;
    simulated.kernel = kernel;
    simulated.args = args;
    simulated.threads = threads;
    simulated.random = seed;
    simulated.block = {0, 0};
    memset(simulated.lanes, 0, sizeof simulated.lanes);
    simulated.ended = simulated.n_ready = 0;
    for (unsigned i = 0; i < threads; i++) may_go_on(i);
    if (_setjmp(simulated.host) == 0) go_to(drawn_thread());
}

/* Runs the blocks of a launch, in any order. */
static inline void run_blocks(void (*kernel)(const void *), const void *args, unsigned blocks,
                              unsigned threads, rf_u64 seed) {
    const unsigned first = blocks > 0 ? (unsigned)(seed % blocks) : 0;
    gridDim.x = blocks;
    for (unsigned i = 0; i < blocks; i++) {
        blockIdx.x = (first + i) % blocks;
        run_block(kernel, args, threads, seed + i);
    }
}

#endif
