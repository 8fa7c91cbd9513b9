/* Random valid calls of each operator, run and compared with the reference. */
#ifndef RECFUSE_TESTS_CASES_H
#define RECFUSE_TESTS_CASES_H

#include "check.h"

enum { MOST_BUFFERS = 3 };

/* The memory of the cases of a thread; each array ends at an inaccessible page. */
typedef struct arena {
    region weights[MOST_BUFFERS], indices, offsets, samples, output;
} arena;

arena arena_new(void);
void arena_free(arena *memory);

/* Returns `bytes` at an edge of the region, more often at its end. */
void *arena_place(randomness *random, const region *memory, size_t bytes);

/* Draws lengths of `bags` bags, many empty and a few long (all empty without rows), as ascending offsets
 * [bags + 1]; returns the last offset. */
int64_t arena_offsets(randomness *random, int64_t *offsets, int64_t bags, bool empty);

/* Makes a random call of rf_embedding_bag_cpu with this dtype, pooling and dim. */
void embedding_bag_case(randomness *random, arena *memory, rf_dtype dtype, rf_pooling pooling, int64_t dim);
/* Makes a random call of rf_fused_embedding_bag_cpu. */
void fused_embedding_bag_case(randomness *random, arena *memory);

rf_dtype random_dtype(randomness *random);
/* Returns a dim from 0 to 300, often a special case of the kernels. */
int64_t random_dim(randomness *random);
/* Off, the default, short, and longer than any bag. */
int32_t random_distance(randomness *random);

/* A name of the case for failures: its most important parameters. */
enum { LABEL_BYTES = 160 };

/* Fills `elements` of a dtype with normal numbers. */
void fill_normal(randomness *random, void *data, int64_t elements, rf_dtype dtype);
/* Sets `elements` from `from` on to NaN, because they must not be read. */
void fill_poison(void *data, int64_t from, int64_t elements, rf_dtype dtype);

#endif
