/* csrc/gpu called from C: `test_cuda COMMAND ARGUMENTS`. The kernels are in kernels/ next to the program;
 * with the fake driver on the loader's path there are GPUs. Exits with 0 if no check failed, with 2 for an
 * unknown command. Launches and errors are in test_driver.c, the fused operator in test_fused.c and
 * test_fused_map.c, the layers over users and candidates in test_ikbo_linear.c. */
#define _GNU_SOURCE /* usleep */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "gpu/jit/cache.h"
#include "gpu/jit/jit.h"
#include "families/embedding_bag/embedding_bag_schedule.h"
#include "fake_cuda.h"
#include "program.h"

enum { KEYS = 12, ROUNDS = 2000, CHILDREN = 12 };

static const rf__kernel_source kernel_file = {"scale.cu", "rf_scale"};

/* compile FILE ENTRY ARCH DEFINES: prints rf__kernel_info in one line, or the status and the message. */
static void compile(char **arguments) {
    const rf__kernel_source source = {arguments[0], arguments[1]};
    rf__kernel_options options = {{0}, 0};
    rf__kernel_info info;
    void *cubin = NULL;
    int64_t bytes = 0;
    snprintf(options.defines, sizeof options.defines, "%s", arguments[3]);
    const rf_status status = rf__jit_compile(&source, &options, arguments[2], &cubin, &bytes, &info);
    if (status == RF_OK) {
        CHECK(bytes == info.cubin_bytes && bytes > 4 && memcmp(cubin, "\177ELF", 4) == 0, "%lld bytes",
              (long long)bytes);
        const bool opened = dlopen("libnvrtc.so.13", RTLD_LAZY | RTLD_NOLOAD) != NULL ||
                            dlopen("libnvrtc.so.12", RTLD_LAZY | RTLD_NOLOAD) != NULL;
        printf(
            "nvrtc=%d registers=%d spill=%d stack=%d shared=%d bytes=%lld seconds=%.6f cached=%d path=%s\n",
            opened, info.registers, info.spill_bytes, info.stack_bytes, info.shared_bytes, (long long)bytes,
            info.seconds, info.cached, info.path);
    } else {
        printf("%s: %s\n", rf_status_python(status), rf_last_error());
    }
    free(cubin);
}

static void *compile_same(void *argument) {
    rf__kernel_options options = {"-DRF_FACTOR=5", 0};
    void *cubin = NULL;
    int64_t bytes = 0;
    const rf_status status = rf__jit_compile(&kernel_file, &options, argument, &cubin, &bytes, NULL);
    CHECK(status == RF_OK, "%s", rf_last_error());
    CHECK(bytes > 4 && memcmp(cubin, "\177ELF", 4) == 0, "%lld bytes", (long long)bytes);
    free(cubin);
    return NULL;
}

/* compile_at_once ARCH: many threads compile the same kernel. */
static void compile_at_once(char **arguments) { run_threads(compile_same, arguments[0]); }

static void *compile_others(void *argument) {
    const rf__kernel_source source = kernel_file;
    for (int i = 0; i < 6; i++) {
        rf__kernel_options options = {{0}, 0};
        snprintf(options.defines, sizeof options.defines, "-DRF_FACTOR=%d", 100 + i + *(const int *)argument);
        const rf_status status = rf__jit_compile(&source, &options, "sm_80", NULL, NULL, NULL);
        CHECK(status == RF_OK, "%s", rf_last_error());
    }
    return NULL;
}

static int wait_for(pid_t child) {
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child, "child %d", (int)child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

/* fork_compile: children of a process whose threads compile; each child must be able to compile. */
static void fork_compile(char **arguments) {
    (void)arguments;
    pthread_t threads[2];
    int from[2] = {0, 50};
    for (int t = 0; t < 2; t++) pthread_create(&threads[t], NULL, compile_others, &from[t]);
    for (int i = 0; i < CHILDREN; i++) {
        usleep(20000);
        const pid_t child = fork();
        if (child == 0) {
            alarm(60); /* this signal ends a child that hangs */
            rf__kernel_options options = {{0}, 0};
            snprintf(options.defines, sizeof options.defines, "-DRF_FACTOR=%d", i % 4 == 0 ? 200 + i : 99);
            const rf_status status = rf__jit_compile(&kernel_file, &options, "sm_80", NULL, NULL, NULL);
            if (status != RF_OK) fprintf(stderr, "child: %s\n", rf_last_error());
            _exit(status == RF_OK ? 0 : 3);
        }
        const int status = wait_for(child);
        CHECK(status == 0, "child %d ended with %d", i, status);
    }
    for (int t = 0; t < 2; t++) pthread_join(threads[t], NULL);
}

/* trim FOLDER BYTES. */
static void trim(char **arguments) { rf__cache_trim(arguments[0], atoll(arguments[1])); }

/* device ORDINAL: prints a line about the device, or the status and the message. */
static void device(char **arguments) {
    const rf__cuda_device *gpu = NULL, *again = NULL;
    const rf_status status = rf__cuda_device_get(atoi(arguments[0]), &gpu);
    if (status != RF_OK) {
        printf("%s: %s\n", rf_status_python(status), rf_last_error());
        return;
    }
    CHECK(rf__cuda_device_get(atoi(arguments[0]), &again) == RF_OK && gpu == again, "another device");
    printf("ordinal=%d name=%s arch=%s sms=%d l2=%lld registers=%lld threads=%d blocks=%d "
           "shared=%lld optin=%lld reserved=%lld\n",
           gpu->ordinal, gpu->gpu.name, gpu->gpu.arch, gpu->gpu.sms, (long long)gpu->gpu.l2_bytes,
           (long long)gpu->gpu.registers_per_sm, gpu->gpu.threads_per_sm, gpu->gpu.blocks_per_sm,
           (long long)gpu->gpu.shared_per_sm, (long long)gpu->gpu.shared_per_block_optin,
           (long long)gpu->gpu.reserved_shared_per_block);
    for (int i = 0; i < RF__CUDA_ERROR_WORDS; i++)
        CHECK(gpu->errors.first.claimed[i] == 0 && gpu->errors.records[i].ready == 0,
              "the words of error %d are not zero", i);
    CHECK(context_depth() == 0, "a context was left on the stack");
}

/* Not all bytes of a word, so that the hash sees a tail. */
typedef struct factor_key {
    char factor[13];
} factor_key;

static atomic_int described;

static rf_status describe_factor(const void *key, rf__kernel_options *options) {
    const factor_key *factor = key;
    atomic_fetch_add(&described, 1);
    snprintf(options->defines, sizeof options->defines, "-DRF_FACTOR=%s", factor->factor);
    options->dynamic_shared = 1024;
    return RF_OK;
}

static rf_status kernel_get(int ordinal, int number, const rf__kernel **kernel) {
    const rf__cuda_device *gpu = NULL;
    factor_key key = {{0}};
    snprintf(key.factor, sizeof key.factor, "%d", number);
    rf_status status = rf__cuda_device_get(ordinal, &gpu);
    if (status == RF_OK)
        status = rf__jit_kernel(gpu, &kernel_file, &key, sizeof key, describe_factor, kernel);
    return status;
}

static const rf__kernel *first_seen[2][KEYS]; /* under the lock */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *use_kernels(void *argument) {
    (void)argument;
    for (int i = 0; i < ROUNDS; i++) {
        const int ordinal = i / KEYS % 2, number = i % KEYS;
        const rf__kernel *kernel = NULL;
        const rf_status status = kernel_get(ordinal, number, &kernel);
        CHECK(status == RF_OK, "%s", rf_last_error());
        if (status != RF_OK) return NULL;
        CHECK(kernel->registers == 100 * ordinal + RF__CU_FUNC_ATTRIBUTE_NUM_REGS && kernel->function != NULL,
              "the kernel of another device");
        CHECK(kernel->dynamic_shared == 1024, "%d bytes", kernel->dynamic_shared);
        pthread_mutex_lock(&lock);
        if (first_seen[ordinal][number] == NULL) first_seen[ordinal][number] = kernel;
        CHECK(first_seen[ordinal][number] == kernel, "two kernels for one key");
        pthread_mutex_unlock(&lock);
    }
    CHECK(context_depth() == 0, "a context was left on the stack");
    return NULL;
}

/* kernels: many threads request the kernels of two devices; each is loaded once. A hit makes no call of the
 * driver. */
static void kernels(char **arguments) {
    (void)arguments;
    run_threads(use_kernels, NULL);
    const int loaded = driver_calls("cuModuleLoadData");
    CHECK(loaded == 2 * KEYS && atomic_load(&described) == 2 * KEYS, "%d modules were loaded", loaded);
    const rf__cuda_device *gpu = NULL;
    CHECK(rf__cuda_device_get(0, &gpu) == RF_OK, "%s", rf_last_error());
    const rf__kernel *kernel = NULL;
    factor_key key = {"3"};
    const int calls = driver_calls(NULL);
    for (int i = 0; i < 1000; i++)
        if (rf__jit_kernel(gpu, &kernel_file, &key, sizeof key, describe_factor, &kernel) != RF_OK) break;
    CHECK(kernel == first_seen[0][3], "another kernel");
    CHECK(driver_calls(NULL) == calls && atomic_load(&described) == 2 * KEYS, "a hit costs a call");
}

/* long_keys: keys as long as those of large collections that differ only at their ends. */
static void long_keys(char **arguments) {
    (void)arguments;
    enum { LONG_BYTES = 7168 };
    static char keys[2][LONG_BYTES];
    const rf__cuda_device *gpu = NULL;
    const rf__kernel *found[2] = {NULL, NULL}, *again = NULL;
    CHECK(rf__cuda_device_get(0, &gpu) == RF_OK, "%s", rf_last_error());
    for (int i = 0; i < 2; i++) {
        snprintf(keys[i], sizeof keys[i], "%d", 3);
        keys[i][LONG_BYTES - 1] = (char)i;
        CHECK(rf__jit_kernel(gpu, &kernel_file, keys[i], LONG_BYTES, describe_factor, &found[i]) == RF_OK,
              "%s", rf_last_error());
    }
    CHECK(found[0] != found[1], "one kernel for two keys");
    CHECK(rf__jit_kernel(gpu, &kernel_file, keys[0], LONG_BYTES, describe_factor, &again) == RF_OK, "%s",
          rf_last_error());
    CHECK(again == found[0] && atomic_load(&described) == 2, "another kernel");
}

static void *fail_kernel(void *argument) {
    const rf__kernel *kernel = NULL;
    const rf_status status = kernel_get(0, 1, &kernel);
    CHECK(status != RF_OK && strstr(rf_last_error(), argument) != NULL, "no %s in: %s",
          (const char *)argument, rf_last_error());
    return NULL;
}

/* kernel_failure WORD: threads that request a kernel whose first modules do not load get the reason; later it
 * loads. */
static void kernel_failure(char **arguments) {
    const rf__kernel *kernel = NULL;
    run_threads(fail_kernel, arguments[0]);
    const int loads = driver_calls("cuModuleLoadData");
    unsetenv("FAKE_CUDA_FAIL");
    CHECK(kernel_get(0, 1, &kernel) == RF_OK, "%s", rf_last_error());
    CHECK(driver_calls("cuModuleLoadData") == loads + 1, "not tried once more");
    CHECK(context_depth() == 0, "a context was left on the stack");
}

/* kernel ORDINAL NUMBER: loads a kernel; prints the message of a failure. */
static void kernel(char **arguments) {
    const rf__kernel *found = NULL;
    const rf_status status = kernel_get(atoi(arguments[0]), atoi(arguments[1]), &found);
    if (status != RF_OK) printf("%s: %s\n", rf_status_python(status), rf_last_error());
}

/* fork_device: a child of a process that used CUDA gets an error; the parent continues. */
static void fork_device(char **arguments) {
    (void)arguments;
    const rf__cuda_device *gpu = NULL;
    const rf__kernel *kernel = NULL;
    CHECK(kernel_get(0, 1, &kernel) == RF_OK, "%s", rf_last_error());
    const pid_t child = fork();
    if (child == 0) {
        alarm(30);
        const bool refused = rf__cuda_device_get(0, &gpu) == RF_ERR_UNSUPPORTED &&
                             strstr(rf_last_error(), "spawn") != NULL &&
                             kernel_get(1, 2, &kernel) == RF_ERR_UNSUPPORTED;
        _exit(refused ? 0 : 3);
    }
    const int status = wait_for(child);
    CHECK(status == 0, "the child ended with %d", status);
    CHECK(kernel_get(1, 2, &kernel) == RF_OK, "%s", rf_last_error());
}

/* fork_first: CUDA before a fork, but through others: the driver's own refusal is explained. */
static void fork_first(char **arguments) {
    (void)arguments;
    rf__cu_result (*init)(unsigned int) = NULL;
    *(void **)&init = driver_symbol("cuInit");
    CHECK(init(0) == RF__CU_SUCCESS, "cuInit");
    const pid_t child = fork();
    if (child == 0) {
        const rf__cuda_device *gpu = NULL;
        _exit(rf__cuda_device_get(0, &gpu) == RF_ERR_UNSUPPORTED && strstr(rf_last_error(), "spawn") ? 0 : 3);
    }
    const int status = wait_for(child);
    CHECK(status == 0, "the child ended with %d", status);
}

/* schedules: structs that no text describes are refused, like texts. */
static void schedules(char **arguments) {
    (void)arguments;
    static const struct {
        rf_embedding_bag_schedule schedule;
        const char *words;
    } bad[] = {{{.station = (rf_station)6}, "station is 6"},
               {{.station = (rf_station)-1}, "station is -1"},
               {{.distance = 65}, "distance is 65"},
               {{.distance = -1}, "distance is -1"},
               {{.threads = 48}, "threads is 48"},
               {{.block = 16}, "block is 16"},
               {{.warps = 65}, "warps is 65"},
               {{.parts = 3}, "parts is 3"},
               {{.segment = 512}, "segment is 512"}};
    const rf__bag_shape shape = {.sms = 132,
                                 .l2_bytes = 60 << 20,
                                 .row = rf__contiguous_row(RF_FLOAT32, 128),
                                 .alignment = 16,
                                 .table_bytes = 1 << 30,
                                 .lookups = 10000,
                                 .bags = 100};
    rf_embedding_bag_schedule schedule = {0};
    CHECK(rf__bag_schedule_complete(&shape, &schedule) == RF_OK, "%s", rf_last_error());
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        schedule = bad[i].schedule;
        CHECK(rf__bag_schedule_complete(&shape, &schedule) == RF_ERR_VALUE, "%s is allowed", bad[i].words);
        CHECK(strstr(rf_last_error(), bad[i].words) != NULL, "%s", rf_last_error());
    }
}

static const command commands[] = {
    {"compile", 4, compile},
    {"compile_at_once", 1, compile_at_once},
    {"fork_compile", 0, fork_compile},
    {"trim", 2, trim},
    {"device", 1, device},
    {"kernels", 0, kernels},
    {"kernel_failure", 1, kernel_failure},
    {"kernel", 2, kernel},
    {"long_keys", 0, long_keys},
    {"fork_device", 0, fork_device},
    {"fork_first", 0, fork_first},
    {"schedules", 0, schedules},
};

int main(int argc, char **argv) {
    const int n_commands = (int)(sizeof commands / sizeof commands[0]);
    int status = command_run(commands, n_commands, argc, argv);
    if (status == NO_COMMAND) status = command_run(driver_commands, n_driver_commands, argc, argv);
    if (status == NO_COMMAND) status = command_run(staging_commands, n_staging_commands, argc, argv);
    if (status == NO_COMMAND) status = command_run(backward_commands, n_backward_commands, argc, argv);
    if (status == NO_COMMAND) status = command_run(ikbo_commands, n_ikbo_commands, argc, argv);
    if (status == NO_COMMAND) status = command_run(columns_commands, n_columns_commands, argc, argv);
    return status != NO_COMMAND ? status : command_run(fused_commands, n_fused_commands, argc, argv);
}
