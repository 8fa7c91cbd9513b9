/* Descriptions: the part of a lowering that many batches share, with the data that kernels read of it on the
 * device.
 *
 * A family describes a call once (features, tasks, lists), and lowers each batch by the description. The
 * descriptions of all families are cached in one list per device, most recently used first, with bounds on
 * their number and on their bytes on the device.
 *
 * Memory of a description's upload. It comes from the caller's allocator, and belongs to one stream: that
 * stream orders the copy, all launches that read it and its release, so nothing waits. The same call on
 * another stream has its own description. A captured call has a resident description (gpu/driver/memory.h),
 * which stays until the process ends, because its graphs read it.
 *
 * Locks. The device's lock (gpu/driver/memory.h) guards lists and counts of users. Nothing is described,
 * copied or freed under it: if two threads describe the same call, one of them frees its own. A description
 * that is dropped while in use is freed by its last user.
 */
#ifndef RECFUSE_CUDA_DESCRIPTION_H
#define RECFUSE_CUDA_DESCRIPTION_H

#include "gpu/driver/memory.h"

/* A family's description of a problem. `data` must not change later, except for fields under the device's
 * lock. */
typedef struct rf__description {
    void *data; /* of the family; free_data frees it */
    void (*free_data)(void *data);
    const void
        *upload; /* [upload_bytes], of data: copied to the device before rf__description_acquire returns */
    int64_t upload_bytes;
    bool frees_upload; /* `upload` is no part of data but from malloc, and freed when it is copied */
} rf__description;

/* Describes a problem for a GPU: a pure function that allocates only on the host. On failure it leaves
 * nothing to free. */
typedef rf_status (*rf__description_make)(const rf__gpu *gpu, const void *problem, rf__description *to);

enum { RF__KEY_PARTS = 4 };
typedef struct rf__key_part {
    const void *data; /* compared bytewise; NULL and data are different */
    size_t bytes;
    /* Of items with padding: their size, and the leading bytes that are compared. 0: no padding. */
    size_t item_bytes, compared_bytes;
} rf__key_part;

/* All inputs of a description except the GPU. */
typedef struct rf__description_key {
    rf__description_make make; /* another kind has another function */
    uint64_t parent; /* number of the description that this one belongs to, or 0 */
    rf__key_part parts[RF__KEY_PARTS]; /* unused parts are zeros */
} rf__description_key;

typedef struct rf__described {
    const void *data; /* of rf__description */
    rf__cu_pointer upload; /* address on the device; 0 if empty or if the device is described */
    uint64_t number; /* of this description in the process, from 1 */
    struct rf__described_node *node; /* description.c's */
} rf__described;

/* Rounds up a size that batches differ in, by a sixteenth at most, so that many batches share a
 * description. */
static inline int64_t rf__description_round(int64_t size) {
    int64_t step = 1;
    while (size / step >= 32) step *= 2;
    return (size + step - 1) / step * step;
}

/* Finds or makes the description of a problem, and holds it. */
rf_status rf__description_acquire(const rf__cuda_store *store, const rf__description_key *key,
                                  const void *problem, rf__described *described);
/* Creates and holds an uncached description; of a resident store it stays. */
rf_status rf__description_make_uncached(const rf__cuda_store *store, rf__description_make make,
                                        const void *problem, rf__described *described);
/* Ends its use, when the launches are in the stream. Zeros are fine. */
void rf__description_release(rf__described *described);
/* Drops descriptions of the store's stream in driver memory, whose release waits for the device, so that no
 * later call waits. For callers that wait anyway. */
void rf__description_forget(const rf__cuda_store *store);

#endif
