/* A call as a value: its kernels, their arguments, and their common workspace.
 *
 * A family lowers a problem to launches (rf__X_lower): a pure function of a GPU's description and the
 * problem, which needs no GPU, takes no lock and allocates no device memory. The launches are then run
 * (below), compiled ahead, explained (explain.h) or simulated. Pointers of the problem are in the arguments
 * already. Objects that do not exist during the lowering are named, and bound when the launches run:
 * positions in the workspace and in uploads, the error word, tensor maps.
 */
#ifndef RECFUSE_CUDA_LAUNCHES_H
#define RECFUSE_CUDA_LAUNCHES_H

#include "gpu/driver/device.h"
#include "gpu/driver/tensor_map.h"
#include "gpu/jit/jit.h"

enum {
    RF__MOST_LAUNCHES = 40,
    RF__MOST_BINDINGS = 192,
    RF__MOST_TENSOR_MAPS = 16,
    RF__MOST_UPLOADS = 4,
    RF__INLINE_BYTES = 6144,
    RF__ARGUMENTS_ALIGNMENT = _Alignof(rf_tensor_map)
};

/* When a kernel may begin before its stream's last kernel has ended (Hopper and newer;
 * rf_wait_for_previous_kernel). */
typedef enum rf__overlap {
    RF__OVERLAP_NEVER,
    RF__OVERLAP_ALWAYS,
    /* If its blocks load SMs evenly: they fill one wave, or at least as many waves as an SM runs blocks. */
    RF__OVERLAP_EVEN
} rf__overlap;

/* A kernel, or a fill of memory with zeros. Grid, block and cluster: blocks, threads, blocks; 0 counts as 1,
 * a cluster of zeros is no cluster. */
typedef struct rf__kernel_launch {
    const rf__kernel_source
        *source; /* NULL: a fill of `fill_bytes` at the address in its arguments, a uint64_t */
    rf__kernel_describe describe; /* its key -> the canonical -D options */
    int64_t fill_bytes;
    uint32_t grid[3], block[3], cluster[3];
    uint32_t shared_bytes; /* dynamic, a block */
    /* Not 0: dynamic shared memory that limits an SM to `most_blocks`, used if registers allow more. */
    uint32_t limiting_shared_bytes, most_blocks;
    rf__overlap overlap;
    bool cooperative; /* all blocks run at once, or the launch fails */
    bool resident; /* the grid is cut to the clusters that the GPU runs at once */
    /* Not 0: a cooperative launch that fails is repeated without, with 1 in this int32_t of the arguments. */
    uint32_t uncooperative_at;
    /* The least that must pass: bytes read and written, each row of a table once at most; operations. */
    int64_t read_bytes, written_bytes;
    double flops, tensor_flops;
    /* Written by rf__launches_add: places in `bytes`. */
    uint32_t key, key_bytes, arguments, argument_bytes;
} rf__kernel_launch;

/* A uint64_t of a launch's arguments that gains the address of something. */
typedef enum rf__bound { RF__BOUND_WORKSPACE, RF__BOUND_ERRORS, RF__BOUND_UPLOAD } rf__bound;
typedef struct rf__binding {
    uint32_t at; /* byte of `bytes` */
    uint16_t bound; /* rf__bound; of uploads the first, then their numbers */
} rf__binding;

typedef struct rf__map_binding {
    uint32_t at;
    rf__tensor_map_params params;
} rf__map_binding;

/* On the stack: rf__launches_init, any number of additions, rf__launches_free. */
typedef struct rf__launches {
    const char *name; /* of the operator, for messages and explanations; static */
    int32_t count, n_bindings, n_maps;
    int64_t workspace_bytes; /* aligned to 16 */
    /* Earlier errors of these tables are raised first if `checks`; kernels report to the word of owner and
     * shape. */
    const void *owner;
    uint64_t shape;
    bool checks;
    uint32_t n_bytes, capacity;
    unsigned char *bytes; /* keys and arguments; `inline_bytes` until they need more */
    rf__kernel_launch launches[RF__MOST_LAUNCHES];
    rf__binding bindings[RF__MOST_BINDINGS];
    rf__map_binding maps[RF__MOST_TENSOR_MAPS];
    _Alignas(RF__ARGUMENTS_ALIGNMENT) unsigned char inline_bytes[RF__INLINE_BYTES];
} rf__launches;

RF__SHARED void rf__launches_init(rf__launches *launches, const char *name);
RF__SHARED void rf__launches_free(rf__launches *launches);

/* Adds a launch with copies of its key (compared bytewise, so without padding) and of the kernel's one
 * parameter. The functions below are about the launch added last; `at` is a byte of its arguments.
 * RF_ERR_MEMORY, RF_ERR_INTERNAL. */
rf_status rf__launches_add(rf__launches *launches, const rf__kernel_launch *launch, const void *key,
                           size_t key_bytes, const void *arguments, size_t argument_bytes);
/* As above, with the bound arguments of the previous launch, which must exist. */
rf_status rf__launches_add_alike(rf__launches *launches, const rf__kernel_launch *launch, const void *key,
                                 size_t key_bytes);
/* The uint64_t there is a position in the workspace, or in upload `number`. */
void rf__launches_bind_workspace(rf__launches *launches, size_t at);
void rf__launches_bind_upload(rf__launches *launches, int32_t number, size_t at);
/* The rf_error_word there is the call's. */
void rf__launches_bind_errors(rf__launches *launches, size_t at);
/* The rf_tensor_map there is encoded from these params. */
void rf__launches_bind_map(rf__launches *launches, size_t at, const rf__tensor_map_params *params);
/* Adds a fill with zeros: of the workspace from a position on, or of memory at an address. */
rf_status rf__launches_fill(rf__launches *launches, uint64_t address, bool in_workspace, int64_t bytes);

/* The arguments and the key of a launch. */
static inline void *rf__launches_arguments(const rf__launches *launches, int32_t launch) {
    return launches->bytes + launches->launches[launch].arguments;
}
static inline const void *rf__launches_key(const rf__launches *launches, int32_t launch) {
    return launches->bytes + launches->launches[launch].key;
}

/* Raises earlier errors of the call's tables. RF_OK for a described device. */
rf_status rf__launches_pending(const rf__cuda_device *device, const rf__launches *launches, void *stream);
/* Raises earlier errors, takes the workspace from the allocator (NULL: the driver), binds, finds kernels and
 * puts the launches into the stream; never waits. `uploads` [RF__MOST_UPLOADS]: addresses, NULL without
 * uploads. On a described device nothing runs. Only once, because it binds. */
rf_status rf__launches_run(const rf__cuda_device *device, rf__launches *launches, const uint64_t *uploads,
                           const rf_cuda_allocator *allocator, void *stream);
/* Runs launches as above, without uploads, if `lowered` is RF_OK, and frees them. Returns the first failure:
 * return rf__launches_finish(rf__X_lower(params, &launches), device, &launches, NULL, stream->stream). */
rf_status rf__launches_finish(rf_status lowered, const rf__cuda_device *device, rf__launches *launches,
                              const rf_cuda_allocator *allocator, void *stream);
/* As rf__launches_run, with the caller's workspace of launches->workspace_bytes, and without a check of earlier
 * errors. */
rf_status rf__launches_run_in(const rf__cuda_device *device, rf__launches *launches, const uint64_t *uploads,
                              uint64_t workspace, void *stream);

#endif
