/* Shared by test_fused.c and the files whose commands it lists. */
#ifndef RECFUSE_TESTS_TEST_FUSED_H
#define RECFUSE_TESTS_TEST_FUSED_H

#include "fused_case.h"

/* Of test_fused_map.c. */
void fused_map(char **arguments);
void fused_map_bad(char **arguments);

/* Of test_fused_kept.c. */
void fused_allocator(char **arguments);
void fused_rows(char **arguments);
void fused_streams(char **arguments);
void fused_bounded(char **arguments);
void fused_graphs(char **arguments);
void fused_waiting(char **arguments);
void fused_held(char **arguments);

/* Of test_fused_lower.c. */
void fused_lower(char **arguments);

/* The default streams of both devices. */
extern const rf_cuda_stream streams[2];

/* Queries the workspace and pools; `pool_well`: a fixed case on the first device, which must succeed. */
rf_status pool_on(const fused_case *one, const rf_fused_plan *plan, const rf_cuda_stream *stream);
void pool_well(int number);

/* The costs of launches and preparations so far. */
typedef struct costs {
    int launches, uploads, loads, live;
} costs;

costs costs_now(void);
void expect_costs(const char *what, costs before, int launches, bool prepared);

/* Times two sets of schedules of a fixed case. */
rf_status measure(bool timed, const char *failure, double *result);

#endif
