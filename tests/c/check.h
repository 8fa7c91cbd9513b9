/* Shared by all tests of the C API: checks that count, random numbers, memory between guard pages, elements
 * of every dtype in double precision, executors. */
#ifndef RECFUSE_TESTS_CHECK_H
#define RECFUSE_TESTS_CHECK_H

#include <stddef.h>

#include "recfuse.h"

/* Counts and prints a failure with its location; the test continues. Arguments after the condition are a
 * printf text that describes the values. */
#define CHECK(condition, ...) \
    ((condition) ? (void)0 : check_failed(__FILE__, __LINE__, #condition, __VA_ARGS__))

void check_failed(const char *file, int line, const char *condition, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
int check_failures(void);

/* Number of random cases of a test, set from the command line. */
extern int check_rounds;

/* A random generator of a thread (splitmix64): the same seed gives the same case on every machine. */
typedef struct randomness {
    uint64_t state;
} randomness;

uint64_t random_bits(randomness *random);
/* Uniform in [from, to]. */
int64_t random_between(randomness *random, int64_t from, int64_t to);
/* Near a normal distribution: mean 0, deviation 1. */
double random_normal(randomness *random);
bool random_chance(randomness *random, double probability);

/* Memory with an inaccessible page right before and right after it. */
typedef struct region {
    unsigned char *data;
    size_t bytes;
} region;

region region_new(size_t bytes);
void region_free(region *memory);
/* Returns the last or the first `bytes` of a region: an access past that edge ends the process. */
void *region_at_end(const region *memory, size_t bytes);
void *region_at_start(const region *memory, size_t bytes);

/* Elements of a dtype, at any alignment; writing rounds to nearest, ties to even. */
size_t element_size(rf_dtype dtype);
double element_get(const void *data, int64_t at, rf_dtype dtype);
void element_set(void *data, int64_t at, rf_dtype dtype, double value);
/* Not of RF_FLOAT64. */
uint32_t element_bits(const void *data, int64_t at, rf_dtype dtype);
const char *dtype_name(rf_dtype dtype);

int64_t integer_get(const void *data, int64_t at, rf_int_type type);
void integer_set(void *data, int64_t at, rf_int_type type, int64_t value);
size_t integer_size(rf_int_type type);

/* Executors: several ranges on this thread, a single range, a pthread per range, and an executor that
 * fails. */
extern const rf_executor executor_serial, executor_whole, executor_threads, executor_failing;
/* Returns an executor that works, or NULL. */
const rf_executor *executor_any(randomness *random);

#endif
