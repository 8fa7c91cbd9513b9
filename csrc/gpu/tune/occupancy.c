#include "gpu/tune/occupancy.h"

enum { WARP = 32, REGISTER_GRAIN = 256, SHARED_GRAIN = 128 };

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t rf__occupancy_by_registers(const rf__gpu *gpu, int32_t registers, int32_t threads) {
    const int64_t a_warp = (registers * WARP + REGISTER_GRAIN - 1) / REGISTER_GRAIN * REGISTER_GRAIN;
    return gpu->registers_per_sm / (a_warp * (threads / WARP));
}

int64_t rf__occupancy(const rf__gpu *gpu, int32_t registers, int32_t threads, int64_t shared_bytes) {
    const int64_t by_registers = rf__occupancy_by_registers(gpu, registers, threads);
    const int64_t by_threads = gpu->threads_per_sm / threads;
    const int64_t by_shared = gpu->shared_per_sm / (shared_bytes + gpu->reserved_shared_per_block + 1);
    return smaller(smaller(by_registers, by_threads), smaller(by_shared, gpu->blocks_per_sm));
}

int32_t rf__occupancy_limit(const rf__gpu *gpu, int32_t blocks, int32_t shared_bytes) {
    const int64_t least_excluding =
        gpu->shared_per_sm / (blocks + 1) - gpu->reserved_shared_per_block + SHARED_GRAIN;
    const int64_t requested =
        smaller(least_excluding, gpu->shared_per_block_optin) / SHARED_GRAIN * SHARED_GRAIN;
    return requested > shared_bytes ? (int32_t)requested : shared_bytes;
}
