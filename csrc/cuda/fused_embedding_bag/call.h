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

#include "cuda/fused_embedding_bag/partition/map_device.h"
#include "cuda/driver/memory.h"

typedef struct rf__fused_call rf__fused_call;
typedef struct rf__fused_mapped rf__fused_mapped;

/* All that a launch needs to know; zeros are nothing. */
typedef struct rf__fused_ready {
    const rf__kernel *kernel;
    int32_t shared_bytes;
    rf__cu_pointer features;
    rf__fused_mapping mapping;
    rf__cu_pointer mapping_on_device;
    rf__fused_staged staged;
    const rf__kernel *staged_kernel; /* if there are such tables */
    rf__fused_device_map map; /* with a kernel: it makes the mapping, in the workspace */
    int64_t workspace_bytes;
    /* What must not be dropped before the launch is in the stream. */
    rf__fused_call *call;
    rf__fused_mapped *mapped;
} rf__fused_ready;

/* Finds or makes the description, the kernels and the mapping of a call: RF_ERR_VALUE and so on where an argument is
 * bad. To be released, also where it fails. */
rf_status rf__fused_prepare(const rf__cuda_store *store, const rf_fused_embedding_bag_params *params,
                            const rf_fused_plan *plan, rf__fused_ready *ready);
/* The same with the kernel that times its blocks and has these classes; without a mapping. */
rf_status rf__fused_prepare_timed(const rf__cuda_store *store, const rf_fused_embedding_bag_params *params,
                                  const rf_fused_plan *plan, const rf__fused_classes *classes,
                                  rf__fused_ready *ready);
/* When the launch is in the stream. Zeros are fine, and left. */
void rf__fused_release(rf__fused_ready *ready);

/* Drops the descriptions of the store's stream that are in memory of the driver, which waits for the device to free it:
 * so that no later call has to. For who waits anyway. */
void rf__fused_forget(const rf__cuda_store *store);

/* rf__check_fused_rows for the features of `ready`, which it remembers: the same columns are not checked again. */
rf_status rf__fused_check_rows(const rf__fused_ready *ready, const rf_fused_embedding_bag_params *params,
                               const int64_t *columns);

/* rf_fused_embedding_bag_cuda with an allocator, and rf__check_fused_rows. */
rf_status rf__fused_pool(const rf_fused_embedding_bag_params *params, const int64_t *columns,
                         const rf_fused_plan *plan, const rf_cuda_stream *stream);

/* Bytes of workspace that a mapping needs. */
int64_t rf__fused_workspace(const rf__fused_mapping *mapping);
/* Puts the work into the stream, in the device's context. `cycles`: uint64_t [n_features] on the device, if blocks are
 * timed. */
rf_status rf__fused_launch(const rf__cuda_device *device, const rf__fused_ready *ready,
                           const rf_fused_embedding_bag_params *params, void *workspace,
                           rf__cu_pointer cycles, void *stream);

/* Raises what earlier calls with these tables left. */
rf_status rf__fused_pending(const rf__cuda_device *device, const rf_fused_embedding_bag_params *params,
                            void *stream);

/* ---- call.c for ready.c */

typedef struct rf__fused_kernel_slot {
    rf__fused_variant variant;
    bool staged;
    const rf__kernel *kernel;
} rf__fused_kernel_slot;

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
    int64_t n_features, n_buffers, output_dim, output_stride;
    int32_t output_alignment, output_dtype;
    bool weighted;
    /* What was made of it. */
    rf__fused_described *known; /* features and their classes */
    bool all_expected, wide_rows;
    rf__cuda_block features; /* [n_features] rf__fused_device_feature */
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
/* Adds a new one of the call's store and holds it, or else the one that another thread has added; drops what is too
 * much. */
rf__fused_mapped *rf__fused_mapped_add(rf__fused_call *call, rf__fused_mapped *made);
/* Copies a mapping of so many rows to the device; in no list yet. */
rf_status rf__fused_mapped_new(const rf__fused_call *call, const rf__fused_mapping *mapping, int64_t rows,
                               bool lasts, rf__fused_mapped **made);
/* Holds the description that these have, in `ready->call`. */
rf_status rf__fused_call_acquire(const rf__cuda_store *store, const rf_fused_embedding_bag_params *params,
                                 const rf_fused_plan *plan, rf__fused_call **call);

#endif
