/* Shared by the cases of both operators. */
#include "cases.h"

#include <math.h>

enum { ARENA_BYTES = 1 << 21, SMALL_ARENA_BYTES = 1 << 18 };

arena arena_new(void) {
    arena memory;
    for (int i = 0; i < MOST_BUFFERS; i++) memory.weights[i] = region_new(ARENA_BYTES);
    memory.indices = region_new(SMALL_ARENA_BYTES);
    memory.offsets = region_new(SMALL_ARENA_BYTES);
    memory.samples = region_new(SMALL_ARENA_BYTES);
    memory.output = region_new(ARENA_BYTES);
    return memory;
}

void arena_free(arena *memory) {
    for (int i = 0; i < MOST_BUFFERS; i++) region_free(&memory->weights[i]);
    region_free(&memory->indices);
    region_free(&memory->offsets);
    region_free(&memory->samples);
    region_free(&memory->output);
}

void *arena_place(randomness *random, const region *memory, size_t bytes) {
    return random_chance(random, 0.75) ? region_at_end(memory, bytes) : region_at_start(memory, bytes);
}

int64_t arena_offsets(randomness *random, int64_t *offsets, int64_t bags, bool empty) {
    const double absent = random_chance(random, 0.2) ? 0.9 : 0.2;
    int64_t at = 0;
    for (int64_t bag = 0; bag < bags; bag++) {
        offsets[bag] = at;
        if (empty || random_chance(random, absent)) continue;
        at += random_chance(random, 0.03) ? random_between(random, 64, 300) : random_between(random, 1, 20);
    }
    offsets[bags] = at;
    return at;
}

rf_dtype random_dtype(randomness *random) {
    return (rf_dtype)random_between(random, RF_FLOAT32, RF_BFLOAT16);
}

int64_t random_dim(randomness *random) {
    static const int64_t special[] = {0,  1,  2,  3,  4,  7,  8,  15, 16,  17,
                                      24, 31, 32, 33, 48, 63, 64, 65, 128, 256};
    if (random_chance(random, 0.4)) return random_between(random, 1, 300);
    return special[random_between(random, 0, sizeof special / sizeof special[0] - 1)];
}

int32_t random_distance(randomness *random) {
    static const int32_t distances[] = {-1, -1, 0, 1, 5, 32, 100000};
    return distances[random_between(random, 0, sizeof distances / sizeof distances[0] - 1)];
}

void fill_normal(randomness *random, void *data, int64_t elements, rf_dtype dtype) {
    for (int64_t i = 0; i < elements; i++) element_set(data, i, dtype, random_normal(random));
}

void fill_poison(void *data, int64_t from, int64_t elements, rf_dtype dtype) {
    for (int64_t i = from; i < from + elements; i++) element_set(data, i, dtype, NAN);
}
