/* The kernels of families/ikbo_attention/packed/packed.cu on the host, for vectors of RF_VECTOR bytes. */
#include "gpu/device/common.cuh"

#define JOIN(name, vector) name##_##vector
#define NAMED(name, vector) JOIN(name, vector)
#define rf_attention_prepare NAMED(rf_attention_prepare, RF_VECTOR)
#define rf_attention_cut NAMED(rf_attention_cut, RF_VECTOR)
#define rf_attention_pack NAMED(rf_attention_pack, RF_VECTOR)
#define rf_attention_unpack NAMED(rf_attention_unpack, RF_VECTOR)
#include "families/ikbo_attention/packed/packed.cu"

/* Runs a kernel, one thread after another. Returns false for an unknown name. */
extern "C" bool NAMED(host_run, RF_VECTOR)(const char *entry, unsigned blocks, unsigned threads,
                                           const void *arguments) {
#define KERNEL(suffix)                                                                                \
    if (strcmp(entry, "rf_attention_" #suffix) == 0) {                                                \
        for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)                                       \
            for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)                               \
                rf_attention_##suffix(*static_cast<const rf_attention_##suffix##_args *>(arguments)); \
        return true;                                                                                  \
    }
    KERNEL(prepare)
    KERNEL(cut)
    KERNEL(pack)
    KERNEL(unpack)
    return false;
}
