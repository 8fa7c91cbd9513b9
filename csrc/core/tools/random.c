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
    /* value = power * ln 2 + reduced, |reduced| < 0.35; ln2_high has 32 bits, so its product is exact. */
    const double power = floor(value * 1.4426950408889634 + 0.5);
    const double reduced = (value - power * ln2_high) - power * ln2_low;
    double sum = 1;
    for (int term = 14; term > 0; term--) sum = 1 + sum * reduced / term;
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
        const int64_t alternative = rf__random_below(random, i + 1);
        order[i] = order[alternative];
        order[alternative] = i;
    }
}

rf_status rf__alias_build(rf__alias *alias, const double *weights, int64_t count) {
    rf_status status = RF_OK;
    double *scaled = malloc((size_t)count * sizeof *scaled);
    uint32_t *stack = malloc((size_t)count * sizeof *stack);
    rf__alias_free(alias);
    alias->threshold = malloc((size_t)count * sizeof *alias->threshold);
    alias->alternative = malloc((size_t)count * sizeof *alias->alternative);
    if (scaled == NULL || stack == NULL || alias->threshold == NULL || alias->alternative == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory for a table of %lld weights", (long long)count);
        goto out;
    }
    double total = 0;
    for (int64_t i = 0; i < count; i++) total += weights[i];

    /* One stack from both ends: slots below 1 at the bottom, the others at the top. */
    int64_t small = 0, large = count;
    for (int64_t i = 0; i < count; i++) {
        scaled[i] = weights[i] / total * (double)count;
        if (scaled[i] < 1)
            stack[small++] = (uint32_t)i;
        else
            stack[--large] = (uint32_t)i;
    }
    while (small > 0 && large < count) {
        const uint32_t poor = stack[--small], rich = stack[large];
        alias->threshold[poor] = (uint32_t)(scaled[poor] * 4294967295.0);
        alias->alternative[poor] = rich;
        scaled[rich] -= 1 - scaled[poor];
        if (scaled[rich] < 1) {
            large++;
            stack[small++] = rich;
        }
    }
    /* The remaining items are 1 up to rounding. */
    while (small > 0) {
        const uint32_t item = stack[--small];
        alias->threshold[item] = UINT32_MAX;
        alias->alternative[item] = item;
    }
    for (; large < count; large++) {
        alias->threshold[stack[large]] = UINT32_MAX;
        alias->alternative[stack[large]] = stack[large];
    }
    alias->count = count;
out:
    free(stack);
    free(scaled);
    if (status != RF_OK) rf__alias_free(alias);
    return status;
}

void rf__alias_free(rf__alias *alias) {
    free(alias->alternative);
    free(alias->threshold);
    *alias = (rf__alias){0};
}
