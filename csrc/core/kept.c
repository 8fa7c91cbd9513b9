/* Cached blocks are in slots, which an atomic exchange empties or fills. There is no lock that a fork could
 * leave locked. */
#define _DEFAULT_SOURCE /* madvise */
#include "core/kept.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>

enum {
    PLACES = 4,
    HUGE_PAGE = 2 << 20,
    ROOM =
        8 /* blocks are larger than requested by this fraction, because gradients of steps differ slightly */
};

/* Atomic: each exchange transfers the ownership of a block. */
static _Atomic(rf__kept *) places[PLACES];
/* Atomic: the slot whose block is replaced if no slot is empty. */
static atomic_uint turn;

static void block_free(rf__kept *block) {
    if (block == NULL) return;
    free(block->data);
    free(block);
}

/* Returns true if the system may take the pages of the block until they are written again. */
static bool offer(const rf__kept *block) {
#ifdef MADV_FREE
    return madvise(block->data, block->bytes, MADV_FREE) == 0;
#else
    (void)block;
    return false;
#endif
}

static void block_keep(rf__kept *block) {
    for (int i = 0; i < PLACES; i++) {
        rf__kept *empty = NULL;
        if (atomic_compare_exchange_strong(&places[i], &empty, block)) return;
    }
    block_free(atomic_exchange(&places[atomic_fetch_add(&turn, 1) % PLACES], block));
}

void rf__kept_give(rf__kept *block) {
    if (offer(block)) {
        block_keep(block);
    } else {
        block_free(block);
    }
}

static bool fits(const rf__kept *block, size_t bytes) {
    return block->bytes >= bytes && block->bytes / 2 <= bytes;
}

static rf__kept *block_new(size_t bytes) {
    rf__kept *block = malloc(sizeof *block);
    if (block == NULL) return NULL;
    block->bytes = (bytes + bytes / ROOM + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    block->data = aligned_alloc(HUGE_PAGE, block->bytes);
    if (block->data == NULL) {
        free(block);
        return NULL;
    }
    return block;
}

rf__kept *rf__kept_take(size_t bytes) {
    for (int i = 0; i < PLACES; i++) {
        rf__kept *block = atomic_exchange(&places[i], NULL);
        if (block == NULL) continue;
        if (fits(block, bytes)) return block;
        block_keep(block); /* into any slot that is empty by now */
    }
    return block_new(bytes);
}
