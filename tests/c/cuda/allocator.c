#include "allocator.h"

#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "program.h"

allocations given = {.lock = PTHREAD_MUTEX_INITIALIZER};

static rf_status allocate(void *context, int64_t bytes, bool lasts, const rf_cuda_stream *stream,
                          void **memory, void **handle) {
    CHECK(context == &given && context_depth() == 0, "a context is entered while memory is made");
    pthread_mutex_lock(&given.lock);
    const rf_status status = given.n_blocks < MOST_BLOCKS ? given.status : RF_ERR_MEMORY;
    if (status == RF_OK) {
        block *one = &given.blocks[given.n_blocks++];
        *one = (block){malloc((size_t)bytes), stream->stream, lasts, false};
        if (one->memory == NULL) exit(1);
        memset(one->memory, 0xee, (size_t)bytes);
        *memory = one->memory;
        *handle = one;
        given.live++;
        *(lasts ? &given.lasting : &given.brief) += 1;
    }
    pthread_mutex_unlock(&given.lock);
    return status;
}

static void release(void *context, void *handle) {
    block *one = handle;
    CHECK(context == &given && context_depth() == 0, "a context is entered while memory is released");
    pthread_mutex_lock(&given.lock);
    CHECK(!one->free, "released twice");
    one->free = true;
    free(one->memory);
    given.live--;
    pthread_mutex_unlock(&given.lock);
}

const rf_cuda_allocator noting_allocator = {&given, allocate, release};

int waits(void) {
    return driver_calls("cuMemFree_v2") + driver_calls("cuStreamSynchronize") +
           driver_calls("cuCtxSynchronize") + driver_calls("cuEventSynchronize") +
           driver_calls("cuMemFreeHost") + driver_calls("cuModuleUnload");
}
