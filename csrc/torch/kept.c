/* Blocks of memory that lie ready, each in a place that one atomic exchange empties or fills: no lock, so nothing that a fork
 * could leave locked. */
#define _DEFAULT_SOURCE /* madvise */
#include "torch/kept.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "cpu/huge_pages.h"

enum {
    PLACES = 4,
    HUGE_PAGE = 2 << 20,
    LEAST =
        32
        << 20, /* bytes that are worth it: glibc has smaller blocks itself, larger ones always from the system */
    ROOM = 8 /* one part of so many more than asked for: gradients of steps differ a little */
};

typedef struct block {
    void *data;
    size_t bytes;
} block;

static _Atomic(block *) places[PLACES];
static atomic_uint turn; /* whose block goes when there is no empty place */

static void block_free(block *old) {
    if (old == NULL) return;
    free(old->data);
    free(old);
}

/* What the system cannot take back is not kept. */
static bool offer(const block *old) {
#ifdef MADV_FREE
    return madvise(old->data, old->bytes, MADV_FREE) == 0;
#else
    (void)old;
    return false;
#endif
}

static void block_keep(block *old) {
    for (int i = 0; i < PLACES; i++) {
        block *empty = NULL;
        if (atomic_compare_exchange_strong(&places[i], &empty, old)) return;
    }
    block_free(atomic_exchange(&places[atomic_fetch_add(&turn, 1) % PLACES], old));
}

/* A deleter of torch's. */
static void give_back(void *data, void *context) {
    (void)data; /* the block's */
    block *old = context;
    if (offer(old)) {
        block_keep(old);
    } else {
        block_free(old);
    }
}

static bool fits(const block *found, size_t bytes) {
    return found->bytes >= bytes && found->bytes / 2 <= bytes;
}

static block *block_take(size_t bytes) {
    for (int i = 0; i < PLACES; i++) {
        block *found = atomic_exchange(&places[i], NULL);
        if (found == NULL) continue;
        if (fits(found, bytes)) return found;
        block_keep(found); /* whatever place is empty by now */
    }
    return NULL;
}

static block *block_new(size_t bytes) {
    block *made = malloc(sizeof *made);
    if (made == NULL) return NULL;
    made->bytes = (bytes + bytes / ROOM + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    made->data = aligned_alloc(HUGE_PAGE, made->bytes);
    if (made->data == NULL) {
        free(made);
        return NULL;
    }
    rf__huge_pages_ask(made->data, (int64_t)made->bytes);
    return made;
}

/* Where it fails the block is lost: torch may or may not have given it back already. */
static rf_status tensor_of(block *memory, int64_t dim, const int64_t *sizes, int32_t dtype,
                           AtenTensorHandle *tensor) {
    int64_t strides[RF__MAX_DIM];
    rf__strides_of(dim, sizes, strides);
    const rf__torch_device cpu = rf__device_cpu();
    RF__TORCH_CHECK(torch_from_blob(memory->data, dim, sizes, strides, 0, dtype, cpu.type, cpu.index, tensor,
                                    aoti_torch_layout_strided(), NULL, 0, give_back, memory));
    return RF_OK;
}

rf_status rf__tensor_new_kept(int64_t dim, const int64_t *sizes, int32_t dtype, AtenTensorHandle *tensor,
                              void **data) {
    size_t bytes = aoti_torch_dtype_element_size(dtype);
    for (int64_t d = 0; d < dim; d++) bytes *= (size_t)sizes[d];
    if (bytes < LEAST || dim > RF__MAX_DIM)
        return rf__tensor_new(dim, sizes, dtype, rf__device_cpu(), tensor, data);
    block *memory = block_take(bytes);
    if (memory == NULL) memory = block_new(bytes);
    RF_FAIL_IF(memory == NULL, RF_ERR_MEMORY, "no memory for %zu bytes", bytes);
    *data = memory->data;
    return tensor_of(memory, dim, sizes, dtype, tensor);
}
