/* A driver without a GPU, for tests of what recfuse does with one: two devices of compute capability 9.0 and
 * 8.0, memory of the host, modules that must be ELF files. It holds callers to a current context.
 *
 * FAKE_CUDA_FAIL=name:code makes that function fail with that result, FAKE_CUDA_FAIL=name:code:count only
 * its first calls. FAKE_CUDA_HELPER=1 makes cuInit slow, and start another process, as the real one may.
 * In a child of the process that called cuInit every call fails, as with the real one. */
#ifndef RECFUSE_TESTS_FAKE_CUDA_H
#define RECFUSE_TESTS_FAKE_CUDA_H

#include "gpu/driver/cuda_abi.h"

/* How often a function was called. */
int fake_cuda_calls(const char *name); /* NULL: of all functions */
/* Blocks of device memory, streams and modules that were made and are still there. */
int fake_cuda_live(void);
/* Contexts on this thread's stack. */
int fake_cuda_depth(void);
/* A stream on which a capture is going on. */
rf__cu_stream fake_cuda_capturing_stream(void);

/* What this thread's last launch, and its last tensor map, were given. */
typedef struct fake_launch {
    rf__cu_launch_config config;
    rf__cu_launch_attribute attributes[8]; /* [config.n_attributes] */
    char first_word[8];                    /* of the argument */
} fake_launch;
typedef struct fake_tensor_map {
    int type, dimensions, interleave, swizzle, promotion, fill;
    const void *data;
    uint64_t sizes[5], pitches[4];
    uint32_t box[5], steps[5];
} fake_tensor_map;
const fake_launch *fake_cuda_last_launch(void);
const fake_tensor_map *fake_cuda_last_tensor_map(void);

/* Calls `run` once, when `name` is called next, on the caller's thread and before anything is done. */
void fake_cuda_hook(const char *name, void (*run)(void));
/* From now on freed memory is not used again, and a launch whose first argument points to some fails with 700. */
void fake_cuda_watch(void);
/* Whether events are still to come, but for those that cuEventSynchronize was called with since they were recorded. */
void fake_cuda_busy(int busy);

/* Counts a call; the result it must fail with, or 0. */
rf__cu_result fake_cuda_call(const char *name);

#define FAKE_CUDA_DECLARE(result, name, parameters) result name parameters;
RF__CUDA_LIST(FAKE_CUDA_DECLARE)

#endif
