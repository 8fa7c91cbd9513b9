/* A driver without a GPU, for tests of calls on a GPU: two devices of compute capability 9.0 and 8.0, memory
 * of the host, modules that must be ELF files. It requires a current context.
 *
 * FAKE_CUDA_FAIL=name:code makes that function fail with that result, FAKE_CUDA_FAIL=name:code:count only its
 * first calls. FAKE_CUDA_HELPER=1 makes cuInit slow, and makes it start another process, as the real cuInit
 * may. In a child of the process that called cuInit every call fails, as with the real driver.
 */
#ifndef RECFUSE_TESTS_FAKE_CUDA_H
#define RECFUSE_TESTS_FAKE_CUDA_H

#include "gpu/driver/cuda_abi.h"

/* Returns the number of calls of a function. */
int fake_cuda_calls(const char *name); /* NULL: of all functions */
/* Returns the number of live blocks of device memory, streams and modules. */
int fake_cuda_live(void);
/* Contexts on this thread's stack. */
int fake_cuda_depth(void);
/* Returns a stream that is being captured. */
rf__cu_stream fake_cuda_capturing_stream(void);

/* The arguments of this thread's last launch, and of its last tensor map. */
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
/* From now on freed memory is not reused, and a launch whose first argument points to freed memory fails with
 * 700. */
void fake_cuda_watch(void);
/* Sets whether events are pending, except those for which cuEventSynchronize was called since they were
 * recorded. */
void fake_cuda_busy(int busy);

/* Counts a call; the result it must fail with, or 0. */
rf__cu_result fake_cuda_call(const char *name);

#define FAKE_CUDA_DECLARE(result, name, parameters) result name parameters;
RF__CUDA_LIST(FAKE_CUDA_DECLARE)

#endif
