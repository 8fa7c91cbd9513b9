/* Fused calls that are prepared once and launched often.
 *
 * A description is what the kernels read of a call beside its lookups: features, mappings by number of bags, and what
 * the kernel that maps needs. It is made at the first call and found at those that follow, which is a look-up and a
 * launch.
 *
 * Where it is. In memory of the caller's allocator (torch's), and of one stream: the copy to the device, all launches
 * and the release are ordered by that stream, so nobody waits for any of them. The same call on another stream has a
 * description of its own. A captured call has one that is resident (memory.h): its graphs read it on any stream, as long
 * as they live, which nobody tells us; so it stays until the process ends.
 *
 * How much. The calls used last stay, and of their mappings those used last: see call.c. What is dropped while a
 * thread launches with it is dropped by that thread.
 *
 * Locks. One a device (memory.h), for the lists and the counts of users. Nothing is made or freed under it: memory,
 * copies, mappings and kernels are made before, and if two threads make the same, one of them drops its own. */
#ifndef RECFUSE_CUDA_FUSED_CALL_H
#define RECFUSE_CUDA_FUSED_CALL_H

#include "cuda/driver/memory.h"
#include "cuda/fused_embedding_bag/kernel.h"
#include "cuda/fused_embedding_bag/partition/device.h"
#include "cuda/fused_embedding_bag/partition/partition.h"

typedef struct rf__fused_call rf__fused_call;
typedef struct rf__fused_mapped rf__fused_mapped;

typedef struct rf__fused_kernel_slot {
    rf__fused_variant variant;
    const rf__kernel *kernel;
} rf__fused_kernel_slot;

/* What a description is made for, but for what pointers lead to; without padding. */
typedef struct rf__fused_call_key {
    uint64_t stream_id, allocate;
    int64_t n_features, n_buffers, output_dim, output_stride, output_alignment;
    int32_t output_dtype, weighted;
} rf__fused_call_key;

/* A description. What it is made for and of never changes; lists and counts are under the device's lock. */
struct rf__fused_call {
    rf__fused_call *next; /* used less recently */
    rf__cuda_store store; /* where its memory is */
    int32_t users; /* launches under way */
    bool dropped; /* from the list: the last user frees it */
    /* What it was made for. */
    rf_feature *given; /* [n_features] */
    rf_fused_schedule *schedules; /* [n_features], or NULL */
    rf_buffer *buffers; /* [n_buffers] */
    rf__fused_call_key key;
    /* What was made of it. */
    rf__fused_described *described; /* features and their classes */
    bool all_expected, wide_rows;
    rf__cuda_block features; /* [n_features] rf_fused_descriptor */
    /* Under the lock. */
    int64_t *columns; /* [n_buffers] that rf__check_fused_rows has found right */
    bool rows_checked;
    rf__fused_kernel_slot kernels[8];
    uint32_t n_kernels; /* that were put there, each eighth over the same */
    rf__fused_mapped *mapped;
    rf__fused_map_table *map_table; /* NULL until it is needed; then for ever */
};

/* A mapping that is on the device. */
struct rf__fused_mapped {
    rf__fused_mapped *next;
    rf__fused_mapping head;
    rf__fused_staged staged; /* depth 0: no tables are */
    int64_t bags; /* it is for at most so many; of a caller's -1 */
    bool may_stage; /* as the batch that it was made for */
    bool alone; /* in no list: its user frees it */
    int32_t users;
    int64_t bytes;
    uint64_t used; /* when last, in calls of the device that looked for a mapping */
    rf__cuda_store store;
    rf__cuda_block block;
};

/* Holds the call's mapping for so many bags, or the resident one of a caller's with this head (bags -1); NULL if there
 * is none. */
rf__fused_mapped *rf__fused_mapped_find(rf__fused_call *call, int64_t bags, bool may_stage,
                                        const rf__fused_mapping *head);
/* Copies a mapping of so many rows to the device, adds it to the call and holds it; or the one like it that is there. A
 * caller's (bags -1) is of this launch alone, unless the call is resident. Drops what is too much. */
rf_status rf__fused_mapped_add(rf__fused_call *call, int64_t bags, bool may_stage,
                               const rf__fused_mapping *mapping, int64_t rows, rf__fused_mapped **mapped);
/* Finds or makes the description of these, and holds it. */
rf_status rf__fused_call_acquire(const rf__cuda_store *store, const rf_fused_embedding_bag_params *params,
                                 const rf_fused_plan *plan, rf__fused_call **call);

/* Ends the use of a call and of its mapping, which may be NULL; frees what is dropped and has no other user. */
void rf__fused_call_release(rf__fused_call *call, rf__fused_mapped *mapped);
/* Drops the descriptions of the store's stream that are in memory of the driver, which waits for the device to free it:
 * so that no later call has to. For who waits anyway. */
void rf__fused_forget(const rf__cuda_store *store);

#endif
