/* torch's CUDA part, which lies in a library that need not be there. */
#define _GNU_SOURCE /* RTLD_NOLOAD */
#include <dlfcn.h>
#include <stdatomic.h>

#include "torch/ops.h"

typedef int32_t (*current_stream)(int32_t device, void **stream);

rf_status rf__torch_stream(const rf__place *place, rf_cuda_stream *stream) {
    static _Atomic(current_stream) known; /* atomic; the same value whoever writes it */
    current_stream get = atomic_load_explicit(&known, memory_order_acquire);
    rf_status status = RF_OK;
    if (get == NULL) {
        /* A tensor on a GPU has come: torch has loaded it. */
        void *library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
        if (library != NULL) *(void **)&get = dlsym(library, "aoti_torch_get_current_cuda_stream");
        if (get == NULL) {
            return rf__fail(RF_ERR_UNSUPPORTED,
                            "this torch has no CUDA streams that recfuse can find (libtorch_cuda.so "
                            "with aoti_torch_get_current_cuda_stream); install a CUDA build of "
                            "torch 2.11 or newer, or move the tensors to the CPU");
        }
        atomic_store_explicit(&known, get, memory_order_release);
    }
    stream->device = place->index;
    RF__TORCH_TRY(get(place->index, &stream->stream));
out:
    return status;
}
