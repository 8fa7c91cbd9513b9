/* Fused calls for tests: features of many kinds, whose tables and output are host memory that is never
 * read. */
#ifndef RECFUSE_TESTS_FUSED_CASE_H
#define RECFUSE_TESTS_FUSED_CASE_H

#include "check.h"

enum { MOST_FEATURES = 48, FIXED_FEATURES = 4 };

typedef struct fused_case {
    rf_buffer buffers[2];
    rf_feature features[MOST_FEATURES];
    rf_fused_schedule schedules[MOST_FEATURES];
    rf_fused_embedding_bag_params params;
    rf_fused_plan plan; /* with schedules only */
} fused_case;

/* The same features each time: one-hot, wide, a maximum, a split. Their kernel does not depend on the buffer,
 * which `number` selects. */
void fused_case_fixed(fused_case *made, int number);
/* Random features, schedules and number of bags; no offsets yet. */
void fused_case_random(fused_case *made, randomness *random);

#endif
