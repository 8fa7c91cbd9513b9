/* Selects the instruction set once: the best of the CPU, or that of RECFUSE_CPU_ISA. */
#include "core/isa.h"

#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

extern const struct rf__pool_kernels rf__pool_avx512, rf__pool_avx2, rf__pool_neon, rf__pool_scalar;
extern const struct rf__column_kernels rf__column_avx512, rf__column_avx2, rf__column_plain;

static bool always(void) { return true; }

#if defined(__x86_64__)
static bool has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

static bool has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

/* Best first; the last one runs everywhere. */
static const rf__isa isas[] = {
#if defined(__x86_64__)
    {"avx512", &rf__pool_avx512, &rf__column_avx512, has_avx512},
    {"avx2", &rf__pool_avx2, &rf__column_avx2, has_avx2},
#elif defined(__aarch64__)
    {"neon", &rf__pool_neon, &rf__column_plain, always},
#endif
    {"scalar", &rf__pool_scalar, &rf__column_plain, always},
};

/* Written once, under pthread_once. */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static const rf__isa *in_use;

static void choose(void) {
    const char *requested = getenv("RECFUSE_CPU_ISA");
    for (size_t i = 0; i < sizeof isas / sizeof isas[0]; i++) {
        if (!isas[i].present()) continue;
        if (in_use == NULL) in_use = &isas[i];
        if (requested != NULL && strcmp(requested, isas[i].name) == 0) in_use = &isas[i];
    }
}

const rf__isa *rf__isa_in_use(void) {
    pthread_once(&once, choose);
    return in_use;
}

const char *rf_cpu_isa(void) { return rf__isa_in_use()->name; }
