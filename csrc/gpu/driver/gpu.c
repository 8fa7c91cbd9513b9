/* The table of GPUs: NVIDIA's architecture whitepapers and data sheets, and the drivers' reports of these
 * devices. */
#include "gpu/driver/gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define KIB(n) ((int64_t)(n) << 10)
#define MIB(n) ((int64_t)(n) << 20)

/* Compute capability, threads and blocks of an SM, shared memory of an SM in KiB (a block may have 1 KiB
 * less, which the driver reserves), FLOPs a clock of an SM without and with tensor cores. */
#define ARCH(name, major, minor, threads, blocks, shared, flops, tensor_flops)             \
    .arch = (name), .cc_major = (major), .cc_minor = (minor), .threads_per_sm = (threads), \
    .blocks_per_sm = (blocks), .registers_per_sm = 65536, .shared_per_sm = KIB(shared),    \
    .shared_per_block_optin = KIB((shared) - 1), .reserved_shared_per_block = KIB(1),      \
    .flops_per_clock = (flops), .tensor_flops_per_clock = (tensor_flops)
#define AMPERE ARCH("sm_80", 8, 0, 2048, 32, 164, 128, 2048)
#define AMPERE_GRAPHICS ARCH("sm_86", 8, 6, 1536, 16, 100, 256, 512)
#define ADA ARCH("sm_89", 8, 9, 1536, 24, 100, 256, 1024)
#define HOPPER ARCH("sm_90a", 9, 0, 2048, 32, 228, 256, 4096)
#define BLACKWELL ARCH("sm_100", 10, 0, 2048, 32, 228, 256, 8192)

static const rf__gpu gpus[] = {
    {.name = "A100", AMPERE, .sms = 108, .l2_bytes = MIB(40), .clock = 1.41e9, .bytes_per_second = 2.04e12},
    {.name = "A30", AMPERE, .sms = 56, .l2_bytes = MIB(24), .clock = 1.44e9, .bytes_per_second = 0.93e12},
    {.name = "A40",
     AMPERE_GRAPHICS,
     .sms = 84,
     .l2_bytes = MIB(6),
     .clock = 1.74e9,
     .bytes_per_second = 0.70e12},
    {.name = "RTX 3090",
     AMPERE_GRAPHICS,
     .sms = 82,
     .l2_bytes = MIB(6),
     .clock = 1.70e9,
     .bytes_per_second = 0.94e12},
    {.name = "A10",
     AMPERE_GRAPHICS,
     .sms = 72,
     .l2_bytes = MIB(6),
     .clock = 1.70e9,
     .bytes_per_second = 0.60e12},
    {.name = "L40S", ADA, .sms = 142, .l2_bytes = MIB(96), .clock = 2.52e9, .bytes_per_second = 0.86e12},
    {.name = "RTX 4090", ADA, .sms = 128, .l2_bytes = MIB(72), .clock = 2.52e9, .bytes_per_second = 1.01e12},
    {.name = "L4", ADA, .sms = 58, .l2_bytes = MIB(48), .clock = 2.04e9, .bytes_per_second = 0.30e12},
    {.name = "H200", HOPPER, .sms = 132, .l2_bytes = MIB(60), .clock = 1.83e9, .bytes_per_second = 4.80e12},
    {.name = "H100", HOPPER, .sms = 132, .l2_bytes = MIB(50), .clock = 1.83e9, .bytes_per_second = 3.35e12},
    {.name = "H100 PCIe",
     HOPPER,
     .sms = 114,
     .l2_bytes = MIB(50),
     .clock = 1.62e9,
     .bytes_per_second = 2.04e12},
    {.name = "H20", HOPPER, .sms = 78, .l2_bytes = MIB(60), .clock = 1.83e9, .bytes_per_second = 4.00e12},
    {.name = "B200",
     BLACKWELL,
     .sms = 148,
     .l2_bytes = MIB(126),
     .clock = 1.85e9,
     .bytes_per_second = 8.00e12},
};
enum { COUNT = sizeof gpus / sizeof gpus[0] };

const rf__gpu *rf__gpus(int32_t *count) {
    *count = COUNT;
    return gpus;
}

/* Reads "sm_90a", or "sm_90a:114:50" with SMs and MiB of L2, which are 0 if absent. */
static bool arch_read(const char *text, rf__gpu *to) {
    enum {
        OLDEST_ARCH =
            80 /* kernels prefetch into L2 with an eviction priority, which older GPUs do not have */
    };
    int number = 0, sms = 0, mib = 0, end = 0;
    const char *suffix = text + 3;
    if (strncmp(text, "sm_", 3) != 0 || strspn(suffix, "0123456789") > 3) return false;
    suffix += strspn(suffix, "0123456789");
    if (*suffix == 'a' || *suffix == 'f') suffix++;
    number = atoi(text + 3);
    if (number < OLDEST_ARCH) return false;
    if (*suffix != '\0' &&
        (strspn(suffix, ":0123456789") != strlen(suffix) ||
         sscanf(suffix, ":%9d:%9d%n", &sms, &mib, &end) != 2 || suffix[end] != '\0' || sms < 1))
        return false;
    *to = (rf__gpu){.cc_major = number / 10, .cc_minor = number % 10, .sms = sms, .l2_bytes = MIB(mib)};
    memcpy(to->arch, text, (size_t)(suffix - text));
    return true;
}

/* Returns the typical known GPU of an architecture, or of the nearest previous architecture. */
static const rf__gpu *nearest_gpu(const rf__gpu *requested) {
    const rf__gpu *best = &gpus[0];
    for (int32_t i = 0; i < COUNT; i++) {
        const int32_t number = 10 * gpus[i].cc_major + gpus[i].cc_minor;
        if (number <= 10 * requested->cc_major + requested->cc_minor &&
            number > 10 * best->cc_major + best->cc_minor)
            best = &gpus[i];
    }
    return best;
}

rf_status rf__gpu_find(const char *name, rf__gpu *gpu) {
    char names[512] = "";
    rf__gpu requested;
    for (int32_t i = 0; i < COUNT; i++) {
        const size_t length = strlen(names);
        if (strcasecmp(name, gpus[i].name) == 0) {
            *gpu = gpus[i];
            return RF_OK;
        }
        snprintf(names + length, sizeof names - length, "%s%.24s", i == 0 ? "" : ", ", gpus[i].name);
    }
    RF_FAIL_IF(
        !arch_read(name, &requested), RF_ERR_VALUE,
        "gpu is \"%.64s\"; expected one of %s, or an architecture from sm_80 on such as \"sm_90a\" for "
        "its typical GPU, or \"sm_90a:114:50\" for one with that many SMs and MiB of L2",
        name, names);
    *gpu = *nearest_gpu(&requested);
    gpu->cc_major = requested.cc_major;
    gpu->cc_minor = requested.cc_minor;
    memcpy(gpu->arch, requested.arch, sizeof gpu->arch);
    if (requested.sms == 0) return RF_OK;
    gpu->sms = requested.sms;
    gpu->l2_bytes = requested.l2_bytes;
    return RF_OK;
}

void rf__gpu_add_rates(rf__gpu *gpu) {
    const rf__gpu *best = NULL;
    for (int32_t i = 0; i < COUNT; i++) {
        if (gpus[i].cc_major != gpu->cc_major || gpus[i].cc_minor != gpu->cc_minor) continue;
        const int64_t distance = gpus[i].sms > gpu->sms ? gpus[i].sms - gpu->sms : gpu->sms - gpus[i].sms;
        const int64_t least_distance = best == NULL           ? INT64_MAX
                                       : best->sms > gpu->sms ? best->sms - gpu->sms
                                                              : gpu->sms - best->sms;
        /* For GPUs with equal numbers of SMs the memory decides: the driver's name contains the table's. */
        if (distance < least_distance ||
            (distance == least_distance && strstr(gpu->name, gpus[i].name) != NULL))
            best = &gpus[i];
    }
    if (best == NULL) return;
    gpu->clock = best->clock;
    gpu->bytes_per_second = best->bytes_per_second;
    gpu->flops_per_clock = best->flops_per_clock;
    gpu->tensor_flops_per_clock = best->tensor_flops_per_clock;
}
