#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "core/threads/parker.h"

#include <time.h>

enum { LOOKS = 32 /* between looks at the clock */ };

void rf__parker_reset(rf__parker *parker) {
    parker->n_watching = parker->n_asleep = 0;
    (void)sem_init(&parker->posts, 0, 0);
}

int64_t rf__parker_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

/* Decrements a count unless it is 0. */
static bool claim(int32_t *count) {
    int32_t unclaimed = __atomic_load_n(count, __ATOMIC_SEQ_CST);
    while (unclaimed > 0)
        if (__atomic_compare_exchange_n(count, &unclaimed, unclaimed - 1, false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST))
            return true;
    return false;
}

void rf__parker_wake(rf__parker *parker, int32_t threads) {
    if (threads > 0 && claim(&parker->n_watching)) threads--;
    for (; threads > 0 && claim(&parker->n_asleep); threads--) (void)sem_post(&parker->posts);
}

void rf__parker_begin_watch(rf__parker *parker) {
    __atomic_store_n(&parker->n_watching, 1, __ATOMIC_SEQ_CST);
}

void rf__parker_end_watch(rf__parker *parker) { (void)claim(&parker->n_watching); }

static void pause_shortly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void rf__parker_watch(rf__parker *parker, int64_t until) {
    do {
        for (int i = 0; i < LOOKS; i++, pause_shortly())
            if (__atomic_load_n(&parker->n_watching, __ATOMIC_ACQUIRE) == 0) return;
    } while (rf__parker_now() < until);
    rf__parker_end_watch(parker);
}

void rf__parker_begin_sleep(rf__parker *parker) {
    __atomic_fetch_add(&parker->n_asleep, 1, __ATOMIC_SEQ_CST);
}

void rf__parker_sleep(rf__parker *parker) {
    while (sem_wait(&parker->posts) != 0) { /* a signal's */
    }
}

/* A claimed thread has a post, which no other thread may take. */
void rf__parker_end_sleep(rf__parker *parker) {
    if (!claim(&parker->n_asleep)) rf__parker_sleep(parker);
}
