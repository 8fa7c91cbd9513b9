/* One block of threads on the host, for kernels that are compiled for it: a thread is a context that runs until a barrier or
 * an exchange of its warp, and the next one to run is drawn anew each time. An atomic operation may let others go first.
 * With tests/c/torch/host before csrc/cuda among the folders of headers. */
#ifndef TESTS_WARPS_H
#define TESTS_WARPS_H

#include <ucontext.h>

#include "device/common.cuh"

#undef RF_INLINE
#define RF_INLINE inline /* of a struct's functions too */
#define _Alignas alignas /* of headers in C */
#define __shared__ static
#define RF_FULL_WARP 0xffffffffu

enum { MOST_THREADS = 128, STACK = 1 << 16 };

struct int2 {
    int x, y;
};
struct uint4 {
    rf_u32 x, y, z, w;
};
static inline int2 make_int2(int x, int y) { return {x, y}; }

/* All who meet; one may be there again only when the last has come. */
struct meeting_t {
    unsigned here, times;
};
static struct {
    unsigned threads, current, moves;
    rf_u64 random;
    void (*kernel)(const void *);
    const void *args;
    ucontext_t host, context[MOST_THREADS];
    bool ended[MOST_THREADS];
    meeting_t block, warp[MOST_THREADS / 32];
    rf_u64 given[2][MOST_THREADS]; /* of this exchange and the one before */
    alignas(16) char stack[MOST_THREADS][STACK];
} simulated;
static host_index gridDim = {1};

static inline unsigned drawn(unsigned below) {
    simulated.random = simulated.random * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(simulated.random >> 33) % below;
}

/* Goes on with another thread, or with this one. */
static inline void yield_to_any() {
    const unsigned own = simulated.current;
    unsigned next = drawn(simulated.threads);
    while (simulated.ended[next]) next = (next + 1) % simulated.threads;
    if (next == own) return;
    simulated.current = threadIdx.x = next;
    swapcontext(&simulated.context[own], &simulated.context[next]);
}

static inline void meet(meeting_t &meeting, unsigned all) {
    const unsigned times = meeting.times;
    simulated.moves = 0;
    if (++meeting.here == all) meeting.here = 0, meeting.times++;
    while (meeting.times == times) {
        if (simulated.moves++ > 1000 * simulated.threads) fprintf(stderr, "threads wait for ever\n"), abort();
        yield_to_any();
    }
}
static inline void __syncthreads() { meet(simulated.block, simulated.threads); }

/* What the lanes of this thread's warp gave, by lane. */
template <typename T> static inline const rf_u64 *exchanged(T own) {
    const unsigned thread = threadIdx.x, warp = thread / 32;
    rf_u64 *given = simulated.given[simulated.warp[warp].times % 2];
    given[thread] = (rf_u64)own;
    meet(simulated.warp[warp], 32);
    return given + warp * 32;
}
static inline void __syncwarp() { exchanged(0); }
static inline int __shfl_sync(rf_u32, int own, int lane) { return (int)exchanged(own)[lane]; }
static inline rf_u64 __shfl_sync(rf_u32, rf_u64 own, int lane) { return exchanged(own)[lane]; }
static inline int __shfl_up_sync(rf_u32, int own, int step) {
    const int lane = (int)threadIdx.x % 32;
    return (int)exchanged(own)[lane < step ? lane : lane - step];
}
static inline rf_u32 __match_any_sync(rf_u32, int own) {
    const rf_u64 *all = exchanged(own);
    rf_u32 same = 0;
    for (int i = 0; i < 32; i++) same |= (rf_u32)((int)all[i] == own) << i;
    return same;
}
static inline rf_u32 __ballot_sync(rf_u32, bool own) {
    const rf_u64 *all = exchanged(own);
    rf_u32 who = 0;
    for (int i = 0; i < 32; i++) who |= (rf_u32)(all[i] != 0) << i;
    return who;
}
static inline int __ffs(rf_u32 x) { return __builtin_ffs((int)x); }
static inline int __popc(rf_u32 x) { return __builtin_popcount(x); }
static inline int __clz(rf_u32 x) { return x != 0 ? __builtin_clz(x) : 32; }

static inline int atomicAdd(int *to, int more) {
    if (drawn(4) == 0) yield_to_any();
    const int before = *to;
    *to += more;
    return before;
}
static inline int atomicMax(int *to, int other) {
    const int before = *to;
    if (other > before) *to = other;
    return before;
}
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }

static inline void thread_main() {
    simulated.kernel(simulated.args);
    unsigned next = simulated.current;
    simulated.ended[next] = true;
    for (unsigned i = 0; i < simulated.threads && simulated.ended[next]; i++)
        next = (next + 1) % simulated.threads;
    if (simulated.ended[next]) setcontext(&simulated.host);
    simulated.current = threadIdx.x = next;
    setcontext(&simulated.context[next]);
}

/* Runs a block of threads, whole warps of them. */
static inline void run_block(void (*kernel)(const void *), const void *args, unsigned threads, rf_u64 seed) {
    simulated.kernel = kernel;
    simulated.args = args;
    simulated.threads = threads;
    simulated.random = seed;
    simulated.block = {0, 0};
    for (unsigned i = 0; i < threads; i++) {
        simulated.warp[i / 32] = {0, 0};
        simulated.ended[i] = false;
        getcontext(&simulated.context[i]);
        simulated.context[i].uc_stack.ss_sp = simulated.stack[i];
        simulated.context[i].uc_stack.ss_size = STACK;
        makecontext(&simulated.context[i], thread_main, 0);
    }
    simulated.current = threadIdx.x = drawn(threads);
    swapcontext(&simulated.host, &simulated.context[simulated.current]);
}

#endif
