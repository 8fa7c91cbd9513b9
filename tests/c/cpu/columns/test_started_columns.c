/* rf_embedding_columns_start_cpu: many calls at once, over a fork, and at the end of a process. */
#define _GNU_SOURCE /* usleep */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "columns.h"

enum { CALLS = 6, CALLERS = 3 };

/* The results of started calls. */
typedef struct ended {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    rf_status status;
    bool done;
    char message[400];
} ended;

static void note(void *context, rf_status status, const char *message) {
    ended *of = context;
    pthread_mutex_lock(&of->lock);
    CHECK(!of->done, "called twice");
    of->done = true;
    of->status = status;
    snprintf(of->message, sizeof of->message, "%s", message);
    pthread_cond_signal(&of->changed);
    pthread_mutex_unlock(&of->lock);
}

static void wait_for(ended *of) {
    pthread_mutex_lock(&of->lock);
    while (!of->done) pthread_cond_wait(&of->changed, &of->lock);
    pthread_mutex_unlock(&of->lock);
}

/* A call with its expected result. */
typedef struct drawn {
    columns_memory memory;
    columns_case call;
    rf_status status;
    char message[400];
    unsigned char *output; /* NULL: no call was drawn */
    ended ended;
} drawn;

static void draw(randomness *random, drawn *of) {
    of->output = NULL;
    if (!columns_draw(random, &of->memory, &of->call)) return;
    of->status = rf_embedding_columns_cpu(&of->call.params, NULL);
    snprintf(of->message, sizeof of->message, "%s", of->status == RF_OK ? "" : rf_last_error());
    of->output = malloc(of->call.output_bytes + 1);
    CHECK(of->output != NULL, "no memory");
    if (of->output == NULL) return;
    memcpy(of->output, of->call.params.output, of->call.output_bytes);
    memset(of->call.params.output, UNWRITTEN, of->call.output_bytes);
    of->ended = (ended){.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
}

static void start(drawn *of, int32_t threads) {
    rf_embedding_columns_params params = of->call.params; /* need not stay */
    const rf_status status = rf_embedding_columns_start_cpu(&params, threads, note, &of->ended);
    CHECK(status == RF_OK, "%s", rf_last_error());
    memset(&params, UNWRITTEN, sizeof params);
}

static void check(drawn *of, int round) {
    wait_for(&of->ended);
    CHECK(of->ended.status == of->status, "round %d: %s", round, of->ended.message);
    CHECK(strncmp(of->message, of->ended.message, sizeof of->message - 1) == 0, "%s, then %s", of->message,
          of->ended.message);
    CHECK(of->status != RF_OK || memcmp(of->output, of->call.params.output, of->call.output_bytes) == 0,
          "round %d: other bytes", round);
}

static void *call_some(void *seed) {
    randomness random = {*(const uint64_t *)seed};
    drawn *all = calloc(CALLS, sizeof *all);
    CHECK(all != NULL, "no memory");
    for (int i = 0; all != NULL && i < CALLS; i++) all[i].memory = columns_memory_new();
    for (int round = 0; all != NULL && round < 1 + check_rounds / 20; round++) {
        for (int i = 0; i < CALLS; i++) draw(&random, &all[i]);
        for (int i = 0; i < CALLS; i++)
            if (all[i].output != NULL) start(&all[i], (int32_t)random_between(&random, 1, 5));
        for (int i = 0; i < CALLS; i++)
            if (all[i].output != NULL) check(&all[i], round);
        for (int i = 0; i < CALLS; i++) free(all[i].output);
    }
    for (int i = 0; all != NULL && i < CALLS; i++) columns_memory_free(&all[i].memory);
    free(all);
    return NULL;
}

void test_embedding_columns_started(void) {
    pthread_t threads[CALLERS];
    uint64_t seeds[CALLERS];
    int started = 0;
    for (; started < CALLERS; started++) {
        seeds[started] = 500 + (uint64_t)started;
        if (pthread_create(&threads[started], NULL, call_some, &seeds[started]) != 0) break;
    }
    CHECK(started == CALLERS, "only %d threads", started);
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
}

static void tell(void *context, rf_status status, const char *message) {
    (void)message;
    usleep(50000); /* the process is ending by then */
    const char ok = status == RF_OK ? 'k' : 'e';
    CHECK(write(*(const int *)context, &ok, 1) == 1, "no pipe");
}

/* In a child process, which has no threads of its parent: a call, and a call that is running when the process
 * ends. */
static void run_child(drawn *of, int pipe_end) {
    start(of, 3);
    wait_for(&of->ended);
    if (memcmp(of->output, of->call.params.output, of->call.output_bytes) != 0) _exit(4);
    if (rf_embedding_columns_start_cpu(&of->call.params, 2, tell, &pipe_end) != RF_OK) _exit(3);
    exit(0);
}

void test_embedding_columns_forked(void) {
    drawn *of = calloc(1, sizeof *of);
    randomness random = {31};
    int ends[2], status = -1;
    CHECK(of != NULL && pipe(ends) == 0, "no memory or no pipe");
    if (of == NULL) return;
    of->memory = columns_memory_new();
    do {
        free(of->output);
        draw(&random, of);
    } while (of->output == NULL || of->status != RF_OK || of->call.output_bytes == 0);
    start(of, 4); /* uses threads that the child does not have */
    check(of, 0);
    memset(of->call.params.output, UNWRITTEN, of->call.output_bytes);
    of->ended.done = false;
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) run_child(of, ends[1]);
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0,
          "child: %d", status);
    close(ends[1]);
    char told = '\0';
    CHECK(read(ends[0], &told, 1) == 1 && told == 'k', "the child did not wait for its call");
    close(ends[0]);
    columns_memory_free(&of->memory);
    free(of->output);
    free(of);
}
