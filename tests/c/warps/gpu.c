/* A GPU whose kernels run on the host, one block after another (warps.h), for the host's code of a family and
 * csrc/gpu/launches: it replaces csrc/gpu/driver and csrc/gpu/jit. Its memory is the host's, filled with
 * garbage. A kernel is compiled at its first launch with given options, by the command that gpu_begin
 * receives. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/driver/error_check.h"
#include "gpu/driver/memory.h"
#include "gpu/launches/explain.h"

enum { MOST_KERNELS = 256, TEXT = 10000, SMS = 5, RUBBISH = 0xab };

typedef void (*kernel_run)(const void *args, const uint32_t *grid, uint32_t threads, uint64_t seed);

static struct {
    char command[TEXT], folder[512];
    rf__cuda_driver driver;
    rf__cuda_device device;
    struct {
        char options[TEXT];
        rf__kernel kernel;
    } kernels[MOST_KERNELS];
    int n_kernels;
    uint64_t seed;
    rf_u32 claimed;
    rf_error_record record;
} gpu;

#define EXPORTED __attribute__((visibility("default")))

static rf__cu_result write_words(rf__cu_pointer to, unsigned value, size_t count, rf__cu_stream stream) {
    (void)stream;
    for (size_t i = 0; i < count; i++) ((unsigned *)(uintptr_t)to)[i] = value;
    return 0;
}
static rf__cu_result write_bytes(rf__cu_pointer to, unsigned char value, size_t count, rf__cu_stream stream) {
    (void)stream;
    memset((void *)(uintptr_t)to, value, count);
    return 0;
}
static rf__cu_result copy_back(void *to, rf__cu_pointer from, size_t bytes, rf__cu_stream stream) {
    (void)stream;
    memcpy(to, (const void *)(uintptr_t)from, bytes);
    return 0;
}
static rf__cu_result wait_for(rf__cu_stream stream) {
    (void)stream;
    return 0;
}

/* Every kernel is the shared library `command -DKERNEL... -o folder/N.so`. */
EXPORTED void gpu_begin(const char *command, const char *folder, uint64_t seed) {
    snprintf(gpu.command, sizeof gpu.command, "%s", command);
    snprintf(gpu.folder, sizeof gpu.folder, "%s", folder);
    gpu.seed = seed;
    gpu.driver.cuMemsetD32Async = write_words;
    gpu.driver.cuMemsetD8Async = write_bytes;
    gpu.driver.cuMemcpyDtoHAsync_v2 = copy_back;
    gpu.driver.cuStreamSynchronize = wait_for;
    gpu.device = (rf__cuda_device){.driver = &gpu.driver,
                                   .gpu = {.sms = SMS,
                                           .cc_major = 9,
                                           .arch = "sm_90a",
                                           .shared_per_sm = 228 << 10,
                                           .shared_per_block_optin = 227 << 10,
                                           .reserved_shared_per_block = 1 << 10,
                                           .registers_per_sm = 65536,
                                           .threads_per_sm = 2048,
                                           .blocks_per_sm = 32}};
}

rf_status rf__cuda_device_get(int32_t ordinal, const rf__cuda_device **device) {
    (void)ordinal;
    *device = &gpu.device;
    return RF_OK;
}
rf_status rf__cuda_enter(const rf__cuda_device *device) {
    (void)device;
    return RF_OK;
}
void rf__cuda_leave(void) {}
rf_status rf__cuda_leave_with(rf_status status) { return status; }
rf_status rf__cuda_status(rf__cu_result result, const char *call) {
    return result == 0 ? RF_OK : rf__fail(RF_ERR_CUDA, "%s", call);
}

rf_status rf__cuda_store_of(const rf__cuda_device *device, void *stream, const rf_cuda_allocator *allocator,
                            rf__cuda_store *store) {
    (void)allocator;
    *store = (rf__cuda_store){.device = device, .stream = stream};
    return RF_OK;
}
rf_status rf__cuda_is_capturing(const rf__cuda_device *device, void *stream, bool *capturing) {
    (void)device, (void)stream;
    *capturing = false;
    return RF_OK;
}
rf_status rf__cuda_room_new(const rf__cuda_store *store, size_t bytes, rf__cuda_block *block) {
    (void)store;
    *block = (rf__cuda_block){0};
    if (bytes == 0) return RF_OK;
    void *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (memory == NULL) return rf__fail(RF_ERR_OUT_OF_MEMORY, "%zu bytes", bytes);
    memset(memory, RUBBISH, bytes);
    block->memory = (uintptr_t)memory;
    return RF_OK;
}
void rf__cuda_room_free(const rf__cuda_store *store, rf__cuda_block *block) {
    (void)store;
    free((void *)(uintptr_t)block->memory);
    *block = (rf__cuda_block){0};
}
rf_status rf__cuda_block_new(const rf__cuda_store *store, const void *from, size_t bytes, bool lasts,
                             rf__cuda_block *block) {
    (void)lasts;
    RF_CHECK(rf__cuda_room_new(store, bytes, block));
    if (bytes > 0) memcpy((void *)(uintptr_t)block->memory, from, bytes);
    return RF_OK;
}
void rf__cuda_lock(const rf__cuda_device *device) { (void)device; }
void rf__cuda_unlock(const rf__cuda_device *device) { (void)device; }
void rf__cuda_block_free(const rf__cuda_store *store, rf__cuda_block *block) {
    rf__cuda_room_free(store, block);
}

/* One word for all tables; only gpu_error raises it. */
rf__cuda_error_word rf__cuda_error_word_of(const rf__cuda_error_words *words, const void *weight,
                                           uint64_t shape) {
    (void)words, (void)weight, (void)shape;
    return (rf__cuda_error_word){{&gpu.claimed, &gpu.record}, &gpu.record};
}
rf_status rf__cuda_check_word(const rf__cuda_device *device, rf__cuda_error_word word, void *stream) {
    (void)device, (void)word, (void)stream;
    return RF_OK;
}
/* Returns the first report of the kernels since the last call; false without any. */
EXPORTED bool gpu_error(rf_error_record *record) {
    *record = gpu.record;
    gpu.record = (rf_error_record){0};
    gpu.claimed = 0;
    return record->ready == RF_ERROR_READY;
}

const char *rf__kernel_integer(int32_t int_type) { return int_type == RF_INT64 ? "rf_i64" : "int"; }

/* Returns the library of these options; builds it if necessary. */
static kernel_run library_of(const char *options, int number) {
    char path[1024], command[3 * TEXT];
    snprintf(path, sizeof path, "%s/%d.so", gpu.folder, number);
    snprintf(command, sizeof command, "%s %s -o %s", gpu.command, options, path);
    if (system(command) != 0) return NULL;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) return NULL;
    return (kernel_run)(uintptr_t)dlsym(library, "kernel_run");
}

rf_status rf__jit_kernel(const rf__cuda_device *device, const rf__kernel_source *source, const void *key,
                         size_t key_size, rf__kernel_describe describe, const rf__kernel **kernel) {
    static rf__kernel_options described;
    char options[TEXT];
    (void)device, (void)key_size;
    memset(&described, 0, sizeof described);
    RF_CHECK(describe(key, &described));
    snprintf(options, sizeof options, "-DKERNEL_FILE='\"%s\"' -DKERNEL=%s %s", source->file, source->entry,
             described.defines);
    int at = 0;
    while (at < gpu.n_kernels && strcmp(gpu.kernels[at].options, options) != 0) at++;
    if (at == MOST_KERNELS) return rf__fail(RF_ERR_INTERNAL, "more than %d kernels", MOST_KERNELS);
    if (at == gpu.n_kernels) {
        const kernel_run run = library_of(options, at);
        if (run == NULL) return rf__fail(RF_ERR_COMPILE, "%s", options);
        memcpy(gpu.kernels[at].options, options, sizeof options);
        gpu.kernels[at].kernel = (rf__kernel){.function = (rf__cu_function)(uintptr_t)run};
        gpu.n_kernels++;
    }
    *kernel = &gpu.kernels[at].kernel;
    return RF_OK;
}
rf_status rf__jit_compile(const rf__kernel_source *source, const rf__kernel_options *options,
                          const char *arch, void **cubin, int64_t *cubin_bytes, rf__kernel_info *info) {
    (void)source, (void)options, (void)arch, (void)cubin, (void)cubin_bytes, (void)info;
    return RF_OK;
}
rf_status rf__kernel_clusters(const rf__cuda_device *device, const rf__kernel *kernel,
                              const rf__launch_config *config, int32_t *clusters) {
    (void)device, (void)kernel;
    *clusters = SMS / (int32_t)config->cluster[0];
    return RF_OK;
}
rf_status rf__tensor_map_encode(const rf__cuda_driver *driver, const rf__tensor_map_params *params,
                                rf__cu_tensor_map *map) {
    (void)driver, (void)params, (void)map;
    return rf__fail(RF_ERR_UNSUPPORTED, "tensor maps are not simulated");
}
bool rf__explains(void) { return false; }
rf_status rf__explain_record(const rf__gpu *described, const rf__launches *launches) {
    (void)described, (void)launches;
    return RF_OK;
}

rf_status rf__launch(const rf__cuda_device *device, const rf__launch_config *config, const void *arguments) {
    (void)device;
    if (config->grid[0] == 0 || config->block[0] % 32 != 0)
        return rf__fail(RF_ERR_CUDA, "a grid of %u blocks of %u", config->grid[0], config->block[0]);
    ((kernel_run)(uintptr_t)config->function)(arguments, config->grid, config->block[0], gpu.seed++);
    return RF_OK;
}
