/* Random numbers that are the same on every platform: see random.h. */
#include "core/tools/random.h"

#include <math.h>
#include <stdlib.h>

#include "core/status.h"

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

double rf__exp(double value) {
    const double ln2_high = 0x1.62e42feep-1, ln2_low = 0x1.a39ef35793c76p-33;
    if (value < -700) return 0;
    if (value > 700) value = 700;
    /* value = power * ln 2 + rest, |rest| < 0.35; ln2_high has 32 bits, so its product is exact. */
    const double power = floor(value * 1.4426950408889634 + 0.5);
    const double rest = (value - power * ln2_high) - power * ln2_low;
    double sum = 1;
    for (int term = 14; term > 0; term--) sum = 1 + sum * rest / term;
    return ldexp(sum, (int)power);
}

double rf__log(double value) {
    int power;
    double fraction = frexp(value, &power);
    if (fraction < 0.70710678118654752) {
        fraction *= 2;
        power--;
    }
    /* log f = 2 atanh((f - 1) / (f + 1)), |argument| < 0.172. */
    const double s = (fraction - 1) / (fraction + 1), square = s * s;
    double sum = 0;
    for (int term = 23; term > 0; term -= 2) sum = sum * square + 1.0 / term;
    return power * 0.69314718055994531 + 2 * s * sum;
}

double rf__random_normal(rf__random *random) {
    for (;;) {
        const double x = 2 * rf__random_uniform(random) - 1;
        const double y = 2 * rf__random_uniform(random) - 1;
        const double radius = x * x + y * y;
        if (radius > 0 && radius < 1) return x * sqrt(-2 * rf__log(radius) / radius);
    }
}

void rf__random_permutation(rf__random *random, int64_t *order, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t other = rf__random_below(random, i + 1);
        order[i] = order[other];
        order[other] = i;
    }
}

rf_status rf__alias_build(rf__alias *alias, const double *weights, int64_t count) {
    rf_status status = RF_OK;
    double *share = malloc((size_t)count * sizeof *share);
    uint32_t *stack = malloc((size_t)count * sizeof *stack);
    rf__alias_free(alias);
    alias->keep = malloc((size_t)count * sizeof *alias->keep);
    alias->other = malloc((size_t)count * sizeof *alias->other);
    if (share == NULL || stack == NULL || alias->keep == NULL || alias->other == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory for a table of %lld weights", (long long)count);
        goto out;
    }
    double total = 0;
    for (int64_t i = 0; i < count; i++) total += weights[i];

    /* One stack from both ends: slots with less than their share at the bottom, the others at the top. */
    int64_t small = 0, large = count;
    for (int64_t i = 0; i < count; i++) {
        share[i] = weights[i] / total * (double)count;
        if (share[i] < 1)
            stack[small++] = (uint32_t)i;
        else
            stack[--large] = (uint32_t)i;
    }
    while (small > 0 && large < count) {
        const uint32_t poor = stack[--small], rich = stack[large];
        alias->keep[poor] = (uint32_t)(share[poor] * 4294967295.0);
        alias->other[poor] = rich;
        share[rich] -= 1 - share[poor];
        if (share[rich] < 1) {
            large++;
            stack[small++] = rich;
        }
    }
    /* The remaining items have a share of 1 up to rounding. */
    while (small > 0) {
        const uint32_t item = stack[--small];
        alias->keep[item] = UINT32_MAX;
        alias->other[item] = item;
    }
    for (; large < count; large++) {
        alias->keep[stack[large]] = UINT32_MAX;
        alias->other[stack[large]] = stack[large];
    }
    alias->count = count;
out:
    free(stack);
    free(share);
    if (status != RF_OK) rf__alias_free(alias);
    return status;
}

void rf__alias_free(rf__alias *alias) {
    free(alias->other);
    free(alias->keep);
    *alias = (rf__alias){0};
}
