#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "core/threads/waiting.h"

#include <time.h>

enum { LOOKS = 32 /* between looks at the clock */ };

void rf__waiting_reset(rf__waiting *of) {
    of->n_watching = of->n_asleep = 0;
    (void)sem_init(&of->posts, 0, 0);
}

int64_t rf__waiting_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

/* Decrements a count unless it is 0. */
static bool claim(int32_t *count) {
    int32_t found = __atomic_load_n(count, __ATOMIC_SEQ_CST);
    while (found > 0)
        if (__atomic_compare_exchange_n(count, &found, found - 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return true;
    return false;
}

void rf__waiting_wake(rf__waiting *of, int32_t threads) {
    if (threads > 0 && claim(&of->n_watching)) threads--;
    for (; threads > 0 && claim(&of->n_asleep); threads--) (void)sem_post(&of->posts);
}

void rf__waiting_begin_watch(rf__waiting *of) { __atomic_store_n(&of->n_watching, 1, __ATOMIC_SEQ_CST); }

void rf__waiting_end_watch(rf__waiting *of) { (void)claim(&of->n_watching); }

static void pause_shortly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void rf__waiting_watch(rf__waiting *of, int64_t until) {
    do {
        for (int i = 0; i < LOOKS; i++, pause_shortly())
            if (__atomic_load_n(&of->n_watching, __ATOMIC_ACQUIRE) == 0) return;
    } while (rf__waiting_now() < until);
    rf__waiting_end_watch(of);
}

void rf__waiting_begin_sleep(rf__waiting *of) { __atomic_fetch_add(&of->n_asleep, 1, __ATOMIC_SEQ_CST); }

void rf__waiting_sleep(rf__waiting *of) {
    while (sem_wait(&of->posts) != 0) { /* a signal's */
    }
}

/* A claimed thread has a post, which no other thread may take. */
void rf__waiting_end_sleep(rf__waiting *of) {
    if (!claim(&of->n_asleep)) rf__waiting_sleep(of);
}
