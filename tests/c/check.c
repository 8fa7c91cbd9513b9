/* Failures are counted and printed but not fatal, so that a run shows them all. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "check.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SHOWN_FAILURES = 25, MAX_THREADS = 4 };

static atomic_int failures;
int check_rounds = 400;

int check_failures(void) { return atomic_load(&failures); }

void check_failed(const char *file, int line, const char *condition, const char *format, ...) {
    if (atomic_fetch_add(&failures, 1) >= SHOWN_FAILURES) return;
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "%s:%d: %s does not hold: %s\n", file, line, condition, text);
}

uint64_t random_bits(randomness *random) {
    uint64_t bits = (random->state += 0x9e3779b97f4a7c15u);
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
    return bits ^ (bits >> 31);
}

int64_t random_between(randomness *random, int64_t from, int64_t to) {
    return from + (int64_t)(random_bits(random) % (uint64_t)(to - from + 1));
}

double random_normal(randomness *random) {
    double sum = -6; /* twelve uniforms: variance 1 */
    for (int i = 0; i < 12; i++) sum += (double)(random_bits(random) >> 11) * 0x1p-53;
    return sum;
}

bool random_chance(randomness *random, double probability) {
    return (double)(random_bits(random) >> 11) * 0x1p-53 < probability;
}

region region_new(size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    bytes = (bytes + page - 1) / page * page;
    unsigned char *all = mmap(NULL, bytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED || mprotect(all + page, bytes, PROT_READ | PROT_WRITE) != 0) {
        perror("mmap of a test region");
        abort();
    }
    return (region){all + page, bytes};
}

void region_free(region *memory) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (memory->data) munmap(memory->data - page, memory->bytes + 2 * page);
    *memory = (region){NULL, 0};
}

static void region_fits(const region *memory, size_t bytes) {
    if (bytes <= memory->bytes) return;
    fprintf(stderr, "a test region of %zu bytes is too small for %zu\n", memory->bytes, bytes);
    abort();
}

void *region_at_end(const region *memory, size_t bytes) {
    region_fits(memory, bytes);
    return memory->data + memory->bytes - bytes;
}

void *region_at_start(const region *memory, size_t bytes) {
    region_fits(memory, bytes);
    return memory->data;
}

typedef void range_body(int64_t from, int64_t to, void *context);

typedef struct range {
    int64_t from, to;
    range_body *body;
    void *context;
} range;

static void *range_run(void *argument) {
    range *work = argument;
    work->body(work->from, work->to, work->context);
    return NULL;
}

static int32_t run_serial(int64_t begin, int64_t end, int64_t grain, range_body *body, void *context) {
    if (grain < 1) grain = 1;
    for (int64_t from = begin; from < end; from += grain)
        body(from, from + grain < end ? from + grain : end, context);
    return 0;
}

/* At most MAX_THREADS ranges; none except the last is shorter than the grain. */
static int32_t run_threads(int64_t begin, int64_t end, int64_t grain, range_body *body, void *context) {
    int64_t step = (end - begin + MAX_THREADS - 1) / MAX_THREADS;
    if (step < grain) step = grain;
    if (step < 1) step = 1;
    pthread_t threads[MAX_THREADS];
    range ranges[MAX_THREADS];
    int started = 0;
    int32_t status = 0;
    for (int64_t from = begin; from < end; from += step, started++) {
        ranges[started] = (range){from, from + step < end ? from + step : end, body, context};
        if (pthread_create(&threads[started], NULL, range_run, &ranges[started]) != 0) {
            status = 1;
            break;
        }
    }
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
    return status;
}

static int32_t run_whole(int64_t begin, int64_t end, int64_t grain, range_body *body, void *context) {
    (void)grain;
    body(begin, end, context);
    return 0;
}

static int32_t run_failing(int64_t begin, int64_t end, int64_t grain, range_body *body, void *context) {
    (void)begin, (void)end, (void)grain, (void)body, (void)context;
    return 1;
}

const rf_executor executor_serial = {3, run_serial};
const rf_executor executor_whole = {2, run_whole};
const rf_executor executor_threads = {MAX_THREADS, run_threads};
const rf_executor executor_failing = {2, run_failing};

const rf_executor *executor_any(randomness *random) {
    const rf_executor *choices[] = {NULL, &executor_serial, &executor_whole, &executor_threads};
    return choices[random_between(random, 0, 3)];
}
