#include "program.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

int command_run(const command *commands, int n_commands, int argc, char **argv) {
    for (int i = 0; i < n_commands; i++) {
        if (argc < 2 || strcmp(argv[1], commands[i].name) != 0 || argc - 2 != commands[i].arguments) continue;
        commands[i].run(argv + 2);
        return check_failures() > 0;
    }
    return NO_COMMAND;
}

void run_threads(void *(*body)(void *), void *argument) {
    pthread_t threads[THREADS];
    int started = 0;
    while (started < THREADS && pthread_create(&threads[started], NULL, body, argument) == 0) started++;
    CHECK(started == THREADS, "only %d threads of %d started", started, THREADS);
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
}

void *driver_symbol(const char *name) {
    void *library = dlopen("libcuda.so.1", RTLD_LAZY);
    void *symbol = library != NULL ? dlsym(library, name) : NULL;
    CHECK(symbol != NULL, "the fake driver is not there: no %s", name);
    if (symbol == NULL) exit(1);
    return symbol;
}

int driver_calls(const char *name) {
    int (*calls)(const char *) = NULL;
    *(void **)&calls = driver_symbol("fake_cuda_calls");
    return calls(name);
}

int driver_live(void) {
    int (*live)(void) = NULL;
    *(void **)&live = driver_symbol("fake_cuda_live");
    return live();
}

int context_depth(void) {
    int (*fake_depth)(void) = NULL;
    *(void **)&fake_depth = driver_symbol("fake_cuda_depth");
    return fake_depth();
}

rf__cu_stream capturing_stream(void) {
    rf__cu_stream (*capturing)(void) = NULL;
    *(void **)&capturing = driver_symbol("fake_cuda_capturing_stream");
    return capturing();
}

void driver_hook(const char *name, void (*run)(void)) {
    void (*set)(const char *, void (*)(void)) = NULL;
    *(void **)&set = driver_symbol("fake_cuda_hook");
    set(name, run);
}

void driver_watch(void) {
    void (*watch)(void) = NULL;
    *(void **)&watch = driver_symbol("fake_cuda_watch");
    watch();
}

void driver_busy(int busy) {
    void (*set)(int) = NULL;
    *(void **)&set = driver_symbol("fake_cuda_busy");
    set(busy);
}

const fake_launch *driver_last_launch(void) {
    const fake_launch *(*last)(void) = NULL;
    *(void **)&last = driver_symbol("fake_cuda_last_launch");
    return last();
}

const fake_tensor_map *driver_last_tensor_map(void) {
    const fake_tensor_map *(*last)(void) = NULL;
    *(void **)&last = driver_symbol("fake_cuda_last_tensor_map");
    return last();
}
