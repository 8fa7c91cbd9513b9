/* Commands for csrc/families/embedding_columns/host/staging.h: memory that threads fill while a stream waits,
 * and their records. */
#define _GNU_SOURCE /* usleep */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../check.h"
#include "families/embedding_columns/host/staging.h"
#include "gpu/driver/error_check.h"
#include "program.h"

enum { ROUNDS = 200, MOST = 32 };

static rf__staging *take(const rf__cuda_device *gpu, size_t bytes) {
    rf__staging *buffer = NULL;
    const rf_status status = rf__staging_acquire(gpu, NULL, bytes, &buffer);
    CHECK(status == RF_OK && buffer != NULL && buffer->bytes >= bytes, "%s", rf_last_error());
    if (buffer != NULL) /* GPUs of this driver use the host's addresses */
        CHECK(buffer->memory_on_device == (rf__cu_pointer)(uintptr_t)buffer->memory, "elsewhere");
    return buffer;
}

static void end(const rf__cuda_device *gpu, rf__staging *buffer) {
    CHECK(rf__staging_release(gpu, buffer, NULL, RF_OK) == RF_OK, "%s", rf_last_error());
}

/* The memory that one thread fills for another's stream. */
typedef struct filling {
    rf__staging *buffer;
    size_t bytes;
    int value;
} filling;

static void *fill(void *argument) {
    const filling *of = argument;
    usleep(of->value % 4 * 50U); /* before, or after the stream waits */
    memset(of->buffer->memory, of->value, of->bytes);
    rf__staging_fill_end(of->buffer);
    return NULL;
}

static void *fill_and_read(void *argument) {
    const rf__cuda_device *gpu = argument;
    static _Thread_local unsigned char found[3000];
    for (int round = 0; round < ROUNDS; round++) {
        pthread_t thread;
        filling of = {.bytes = 1 + (size_t)round % sizeof found, .value = round % 250};
        of.buffer = take(gpu, of.bytes);
        if (of.buffer == NULL) break;
        memset(found, 255, sizeof found);
        CHECK(pthread_create(&thread, NULL, fill, &of) == 0, "no thread");
        CHECK(rf__staging_copy(gpu, of.buffer, of.bytes, (rf__cu_pointer)(uintptr_t)found, NULL) == RF_OK,
              "%s", rf_last_error());
        for (size_t i = 0; i < sizeof found; i++)
            CHECK(found[i] == (i < of.bytes ? of.value : 255), "round %d: byte %zu is %d", round, i,
                  found[i]);
        end(gpu, of.buffer);
        pthread_join(thread, NULL);
    }
    return NULL;
}

/* staging: many threads' streams get the data that others fill for them, in reused memory. */
static void staging(char **arguments) {
    (void)arguments;
    const rf__cuda_device *gpu = NULL;
    CHECK(rf__cuda_device_get(0, &gpu) == RF_OK, "%s", rf_last_error());
    const int before = driver_calls("cuMemHostAlloc");
    run_threads(fill_and_read, (void *)(uintptr_t)gpu);
    CHECK(driver_calls("cuMemHostAlloc") - before <= 2 * THREADS, "memory is not used again");
    CHECK(context_depth() == 0, "a context was left on the stack");
}

/* staging_bound: memory in use by a stream or a thread is not reused; there is a bound; a large buffer
 * grows. */
static void staging_bound(char **arguments) {
    (void)arguments;
    const rf__cuda_device *gpu = NULL;
    CHECK(rf__cuda_device_get(0, &gpu) == RF_OK, "%s", rf_last_error());
    rf__staging *first = take(gpu, 100), *unfilled = take(gpu, 100);
    CHECK(first->memory != unfilled->memory, "one memory twice");
    rf__staging_fill_end(first);
    end(gpu, first);
    end(gpu, unfilled); /* the thread still uses it */
    CHECK(take(gpu, 100) == first, "not used again");
    rf__staging *other = take(gpu, 100);
    CHECK(other != unfilled, "a thread still fills it");
    rf__staging_fill_end(unfilled);
    rf__staging_fill_end(other);
    rf__staging_fill_end(first);
    end(gpu, other);
    end(gpu, first);
    CHECK(take(gpu, 1 << 20) == unfilled && unfilled->bytes == 1 << 20, "not grown: %zu", unfilled->bytes);
    memset(unfilled->memory, 1, 1 << 20);
    rf__staging_fill_end(unfilled);
    end(gpu, unfilled);
    driver_busy(1); /* the stream still uses all */
    const int waits = driver_calls("cuEventSynchronize");
    for (int i = 3; i < MOST + 5; i++) {
        rf__staging *more = take(gpu, 100);
        rf__staging_fill_end(more);
        end(gpu, more);
    }
    CHECK(driver_calls("cuEventSynchronize") == waits + 5, "waited %d times",
          driver_calls("cuEventSynchronize") - waits);
    driver_busy(0);
    rf__staging *left = take(gpu, 100); /* a call that fails */
    rf__staging_fill_end(left);
    CHECK(rf__staging_release(gpu, left, NULL, rf__fail(RF_ERR_VALUE, "a failure")) == RF_ERR_VALUE,
          "the failure was lost");
}

/* The stream has reached the last record, although the driver is busy. */
static void reach(rf__cu_event event) {
    rf__cu_result (*synchronize)(rf__cu_event) = NULL;
    *(void **)&synchronize = driver_symbol("cuEventSynchronize");
    CHECK(synchronize(event) == RF__CU_SUCCESS, "not reached");
}

/* Buffers that are under way; the thread of the first is not done with it. */
static void take_most(const rf__cuda_device *gpu, size_t bytes, rf__staging **taken) {
    for (int i = 0; i < MOST; i++) taken[i] = take(gpu, bytes);
    for (int i = 0; i < MOST; i++) {
        if (i > 0) rf__staging_fill_end(taken[i]);
        end(gpu, taken[i]);
    }
}

/* staging_idle: an idle buffer is reused at any position, without waiting. */
static void staging_idle(char **arguments) {
    (void)arguments;
    const rf__cuda_device *gpu = NULL;
    rf__staging *taken[MOST];
    CHECK(rf__cuda_device_get(0, &gpu) == RF_OK, "%s", rf_last_error());
    driver_busy(1);
    take_most(gpu, 100, taken);
    reach(taken[0]->read); /* but it is not filled */
    reach(taken[20]->read);
    reach(taken[7]->read);
    static const int order[] = {7, 20, 0, 1, 2};
    const int waits = driver_calls("cuEventSynchronize");
    for (int i = 0; i < 5; i++) {
        if (i == 2) rf__staging_fill_end(taken[0]);
        rf__staging *found = take(gpu, 100);
        CHECK(found == taken[order[i]], "use %d: not the oldest that is idle, else the oldest", i);
        CHECK(driver_calls("cuEventSynchronize") == waits + (i > 2 ? i - 2 : 0), "use %d: waited %d times", i,
              driver_calls("cuEventSynchronize") - waits);
        rf__staging_fill_end(found);
        end(gpu, found);
    }
}

/* staging_grown: after many small buffers few grow; the others stay small and usable. */
static void staging_grown(char **arguments) {
    (void)arguments;
    enum { LARGE = (64 << 20) + 1, FEW = 2 };
    const rf__cuda_device *gpu = NULL;
    rf__staging *taken[MOST], *large[FEW + 1];
    CHECK(rf__cuda_device_get(0, &gpu) == RF_OK, "%s", rf_last_error());
    driver_busy(1);
    take_most(gpu, 100, taken);
    rf__staging_fill_end(taken[0]);
    const int allocations = driver_calls("cuMemHostAlloc");
    for (int i = 0; i < MOST + 2; i++) {
        rf__staging *found = take(gpu, LARGE);
        CHECK(found == taken[i % FEW], "use %d: not the oldest of those that may be so large", i);
        rf__staging_fill_end(found);
        end(gpu, found);
    }
    CHECK(driver_calls("cuMemHostAlloc") == allocations + FEW, "%d have grown",
          driver_calls("cuMemHostAlloc") - allocations);
    for (int i = FEW; i < MOST; i++) { /* now the oldest */
        rf__staging *found = take(gpu, 100);
        CHECK(found == taken[i] && found->bytes < LARGE, "use %d: another", i);
        rf__staging_fill_end(found);
        end(gpu, found);
    }
    driver_busy(0);
    for (int i = 0; i <= FEW; i++) large[i] = take(gpu, LARGE); /* none is released */
    CHECK(large[FEW] == taken[FEW] && large[0] == taken[0] && large[1] == taken[1], "others");
    CHECK(driver_calls("cuMemHostAlloc") == allocations + FEW + 1, "made, not grown");
    for (int i = 0; i <= FEW; i++) {
        rf__staging_fill_end(large[i]);
        end(gpu, large[i]);
    }
}

static void *post_late(void *argument) {
    usleep(20000);
    rf__staging_fill_end(argument);
    return NULL;
}

/* staging_unfilled: a stream that could not wait is done before the thread, which is waited for. */
static void staging_unfilled(char **arguments) {
    (void)arguments;
    const rf__cuda_device *gpu = NULL;
    rf__staging *taken[MOST];
    pthread_t thread;
    CHECK(rf__cuda_device_get(0, &gpu) == RF_OK, "%s", rf_last_error());
    driver_busy(1);
    take_most(gpu, 100, taken);
    const uint32_t number = taken[0]->number;
    CHECK(pthread_create(&thread, NULL, post_late, taken[0]) == 0, "no thread");
    rf__staging *found = take(gpu, 100);
    CHECK(found == taken[0], "not the oldest");
    CHECK(__atomic_load_n(taken[0]->word, __ATOMIC_ACQUIRE) == number, "a thread still fills it");
    pthread_join(thread, NULL);
    rf__staging_fill_end(found);
    end(gpu, found);
}

/* staging_failure STATUS TEXT: the state after a failure of the driver. */
static void staging_failure(char **arguments) {
    const rf__cuda_device *gpu = NULL;
    rf__staging *buffer = NULL;
    CHECK(rf__cuda_device_get(0, &gpu) == RF_OK, "%s", rf_last_error());
    const int live = driver_live();
    for (int i = 0; i < 2; i++) {
        const rf_status status = rf__staging_acquire(gpu, NULL, 100, &buffer);
        CHECK(strcmp(rf_status_python(status), arguments[0]) == 0 &&
                  strstr(rf_last_error(), arguments[1]) != NULL,
              "%s: %s", rf_status_python(status), rf_last_error());
    }
    CHECK(driver_live() == live && context_depth() == 0, "something was left");
}

/* staging_growth_failure: a buffer that cannot grow does not change, and belongs to its owner. */
static void staging_growth_failure(char **arguments) {
    (void)arguments;
    const rf__cuda_device *gpu = NULL;
    CHECK(rf__cuda_device_get(0, &gpu) == RF_OK, "%s", rf_last_error());
    rf__staging *small = take(gpu, 100), *found = NULL;
    rf__staging_fill_end(small);
    end(gpu, small);
    CHECK(setenv("FAKE_CUDA_FAIL", "cuMemHostAlloc:2", 1) == 0, "no environment");
    for (int i = 0; i < 3; i++) {
        const rf_status status = rf__staging_acquire(gpu, NULL, 1 << 20, &found);
        CHECK(strcmp(rf_status_python(status), "MemoryError") == 0 && found == NULL, "%s", rf_last_error());
    }
    unsetenv("FAKE_CUDA_FAIL");
    CHECK(take(gpu, 100) == small, "another");
    found = take(gpu, 100);
    CHECK(found != small, "one has two owners");
    for (int i = 0; i < 2; i++) {
        rf__staging_fill_end(i == 0 ? small : found);
        end(gpu, i == 0 ? small : found);
    }
}

static void note(rf__cuda_error_word word, rf_status status, const char *text) {
    rf__cuda_note *left = calloc(1, sizeof *left);
    CHECK(left != NULL, "no memory");
    if (left == NULL) return;
    left->status = status;
    strcpy(left->text, text);
    rf__cuda_note_leave(word, left);
}

/* notes: each is raised once, by a call with its tables or by a check of its device, and the first of a word
 * stays. */
static void notes(char **arguments) {
    (void)arguments;
    static const float tables[2][4];
    const rf__cuda_device *gpus[2] = {NULL};
    rf__cuda_error_word words[2][2];
    for (int d = 0; d < 2; d++) {
        CHECK(rf__cuda_device_get(d, &gpus[d]) == RF_OK, "%s", rf_last_error());
        for (int i = 0; i < 2; i++) words[d][i] = rf__cuda_error_word_of(&gpus[d]->errors, tables[i], 10);
    }
#define RAISES(call, want, text) \
    CHECK((call) == (want) && strcmp(rf_last_error(), text) == 0, "%s", rf_last_error())
    note(words[0][0], RF_ERR_INDEX, "one");
    note(words[0][0], RF_ERR_VALUE, "a second of the same tables");
    note(words[0][1], RF_ERR_VALUE, "two");
    note(words[1][0], RF_ERR_VALUE, "of the other device");
    CHECK(rf__cuda_check_word(gpus[0], words[0][0], capturing_stream()) == RF_OK, "raised during a capture");
    RAISES(rf__cuda_check_word(gpus[0], words[0][0], NULL), RF_ERR_INDEX, "one");
    CHECK(rf__cuda_check_word(gpus[0], words[0][0], NULL) == RF_OK, "raised twice");
    note(words[0][0], RF_ERR_INDEX, "three");
    RAISES(rf_cuda_check(0), RF_ERR_VALUE,
           "two. Check again, since calls with other tables left 1 more errors.");
    RAISES(rf_cuda_check(0), RF_ERR_INDEX, "three");
    CHECK(rf_cuda_check(0) == RF_OK, "%s", rf_last_error());
    RAISES(rf_cuda_check(1), RF_ERR_VALUE, "of the other device");
    CHECK(rf_cuda_check(1) == RF_OK && rf__cuda_check_word(gpus[1], words[1][0], NULL) == RF_OK, "%s",
          rf_last_error());
#undef RAISES
}

const command staging_commands[] = {
    {"staging", 0, staging},
    {"staging_bound", 0, staging_bound},
    {"staging_idle", 0, staging_idle},
    {"staging_grown", 0, staging_grown},
    {"staging_unfilled", 0, staging_unfilled},
    {"staging_failure", 2, staging_failure},
    {"staging_growth_failure", 0, staging_growth_failure},
    {"notes", 0, notes},
};
const int n_staging_commands = (int)(sizeof staging_commands / sizeof staging_commands[0]);
