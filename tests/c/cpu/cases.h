/* Random valid calls of each operator, run and compared with the reference. */
#ifndef RECFUSE_TESTS_CASES_H
#define RECFUSE_TESTS_CASES_H

#include "check.h"

enum { MOST_BUFFERS = 3 };

/* The memory of one thread's cases; each array lies against an inaccessible page. */
typedef struct arena {
    region weights[MOST_BUFFERS], indices, offsets, samples, output;
} arena;

arena arena_new(void);
void arena_free(arena *memory);

/* `bytes` at one edge of the region, the far edge more often. */
void *arena_place(randomness *random, const region *memory, size_t bytes);

/* Lengths of `bags` bags, many empty and a few long (all empty where there are no rows), as rising
 * offsets [bags + 1]; the last one is returned. */
int64_t arena_offsets(randomness *random, int64_t *offsets, int64_t bags, bool empty);

/* One call of rf_embedding_bag_cpu with this dtype, pooling and dim and all else random. */
void embedding_bag_case(randomness *random, arena *memory, rf_dtype dtype, rf_pooling pooling, int64_t dim);
/* One call of rf_fused_embedding_bag_cpu, all random. */
void fused_embedding_bag_case(randomness *random, arena *memory);

rf_dtype random_dtype(randomness *random);
/* A dim from 0 to 300, often one of those that kernels treat apart. */
int64_t random_dim(randomness *random);
/* Off, the default, short, and longer than any bag. */
int32_t random_distance(randomness *random);

/* A name for the case in failures: what the parts that matter most are. */
enum { LABEL_BYTES = 160 };

/* Fills `elements` of a dtype with normal numbers. */
void fill_normal(randomness *random, void *data, int64_t elements, rf_dtype dtype);
/* Sets `elements` from `from` on to NaN: what must not be read. */
void fill_poison(void *data, int64_t from, int64_t elements, rf_dtype dtype);

#endif
