/* Commands for csrc/families/ikbo_linear: launches, and the limits of the single launch. */
#define _GNU_SOURCE /* setenv */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "allocator.h"
#include "check.h"
#include "families/ikbo_linear/ikbo_linear_args.h"
#include "families/ikbo_linear/ikbo_linear.h"
#include "program.h"

/* Calls the broadcast sum on device 0 and checks its grid; 0: no launch. */
static void expect_grid(const char *what, rf_ikbo_add_params params, int32_t blocks) {
    const rf_cuda_stream stream = {0, NULL};
    const int launches = driver_calls("cuLaunchKernelEx");
    CHECK(rf_ikbo_add_cuda(&params, &stream) == RF_OK, "%s: %s", what, rf_last_error());
    CHECK(driver_calls("cuLaunchKernelEx") == launches + (blocks > 0), "%s: launches", what);
    if (blocks == 0) return;
    const fake_launch *got = driver_last_launch();
    CHECK(got->config.grid[0] == (unsigned)blocks && got->config.grid[1] == 1 && got->config.block[0] == 256,
          "%s: %u blocks", what, got->config.grid[0]);
    CHECK(memcmp(got->first_word, &params.out, sizeof params.out) == 0, "%s: another out", what);
}

/* ikbo_add: a vector is as wide as sizes and addresses allow, a block has 1,024 of them. */
static void ikbo_add(char **arguments) {
    (void)arguments;
    static _Alignas(16) char memory[2][64];
    static const int64_t parent[4];
    const rf_cuda_stream stream = {0, NULL};
    rf_ikbo_add_params params = {.out = memory[0],
                                 .count = 1000,
                                 .m = 433,
                                 .n = 256,
                                 .dtype = RF_BFLOAT16,
                                 .base = memory[1],
                                 .parents = 10,
                                 .parent = parent,
                                 .parent_type = RF_INT64,
                                 .check_bounds = true,
                                 .map = -1,
                                 .weight = memory};
    expect_grid("16 bytes", params, (433 * 256 / 8 * 1000 + 1023) / 1024);
    params.n = 255; /* 433 * 255 elements: only 2 bytes divide them */
    expect_grid("an odd item", params, (433 * 255 * 1000 + 1023) / 1024);
    params.n = 256, params.base = memory[1] + 8;
    expect_grid("an odd address", params, (433 * 64 * 1000 + 1023) / 1024);
    params.base = memory[1], params.count = 1, params.m = params.n = 1;
    expect_grid("one element", params, 1);
    params.count = 0;
    expect_grid("no items", params, 0);
    params.count = 5, params.m = 0;
    expect_grid("no rows", params, 0);
    params.m = INT32_MAX, params.count = INT64_C(1) << 24;
    CHECK(rf_ikbo_add_cuda(&params, &stream) == RF_ERR_UNSUPPORTED &&
              strstr(rf_last_error(), "Cut the batch"),
          "%s", rf_last_error());
    params.activation = (rf_activation)4;
    CHECK(rf_ikbo_add_cuda(&params, &stream) == RF_ERR_VALUE, "%s", rf_last_error());
    CHECK(context_depth() == 0, "a context was left on the stack");
}

static rf_status no_memory(void *context, int64_t bytes, bool lasts, const rf_cuda_stream *stream,
                           void **memory, void **block) {
    (void)context, (void)bytes, (void)lasts, (void)stream, (void)memory, (void)block;
    CHECK(false, "a layer that is refused asked for memory");
    return RF_ERR_OUT_OF_MEMORY;
}

static void nothing(void *context, void *block) { (void)context, (void)block; }

static rf_ikbo_linear_params layer_of(void *memory) {
    static const rf_cuda_allocator allocator = {NULL, no_memory, nothing};
    static const int64_t parent[4];
    rf_ikbo_linear_params params = {
        .n_levels = 2, .dtype = RF_BFLOAT16, .m = 433, .n = 256, .out = memory, .allocator = &allocator};
    for (int l = 0; l < 2; l++)
        params.levels[l] = (rf_ikbo_level){.weight = memory,
                                           .weight_pitch = 100,
                                           .x = memory,
                                           .x_pitch = {100 * 256, 256},
                                           .count = 4,
                                           .k = 100,
                                           .parent = l > 0 ? parent : NULL,
                                           .parent_type = RF_INT64};
    return params;
}

/* A valid layer, modified by a statement, is refused with a status, and a message with the reason. */
#define REFUSED_AS(want, ordinal, words, change)                                                          \
    do {                                                                                                  \
        rf_ikbo_linear_params layer = layer_of(memory);                                                   \
        const rf_cuda_stream stream = {ordinal, NULL};                                                    \
        change;                                                                                           \
        CHECK(rf_ikbo_linear_cuda(&layer, &stream) == (want) && strstr(rf_last_error(), words), "%s: %s", \
              #change, rf_last_error());                                                                  \
        if ((want) == RF_ERR_UNSUPPORTED)                                                                 \
            CHECK(!rf_ikbo_linear_takes(&layer, ordinal), "%s: is taken", #change);                       \
    } while (0)
#define REFUSED(ordinal, words, change) REFUSED_AS(RF_ERR_UNSUPPORTED, ordinal, words, change)

/* ikbo_takes: the layers that the single launch accepts, on a GPU of compute capability 9.0 and on
 * another. */
static void ikbo_takes(char **arguments) {
    (void)arguments;
    static _Alignas(16) char memory[64];
    const rf_ikbo_linear_params good = layer_of(memory);
    CHECK(!rf_ikbo_linear_takes(&good, 77), "on a GPU that is not there");
    /* The last check is shared memory, of which the fake GPU has too little for any layer. */
    REFUSED(0, "too little shared memory", (void)0);
    REFUSED(0, "too little shared memory", (layer.levels[0].count = 1, layer.levels[0].x_pitch[0] = 3));
    REFUSED(1, "compute capability 9.0", (void)0);
    REFUSED(0, "the dtype is neither", layer.dtype = RF_FLOAT32);
    REFUSED(0, "out has no rows", layer.m = 0);
    REFUSED(0, "out has no columns", layer.n = 0);
    REFUSED(0, "no multiple of 8", layer.n = 250);
    REFUSED(0, "out is not aligned", layer.out = memory + 8);
    REFUSED(0, "more than 2^24 rows", layer.levels[0].k = (1 << 24) + 1);
    REFUSED(0, "more than 2^20 columns", layer.n = (1 << 20) + 8);
    REFUSED(0, "more items than 2^30 strips", layer.levels[0].count = (int64_t)1 << 30);
    REFUSED(0, "an input has no items", layer.levels[1].count = 0);
    REFUSED(0, "an input has no items", layer.levels[0].count = 0);
    REFUSED(0, "is not aligned to 16 bytes", layer.levels[0].x = memory + 2);
    REFUSED(0, "multiple of 16 bytes apart", layer.levels[1].x_pitch[0] = 0);
    REFUSED(0, "multiple of 16 bytes apart", layer.levels[1].x_pitch[1] = 257);
    REFUSED_AS(RF_ERR_VALUE, 0, "n_levels is 1; expected 2 to 4", layer.n_levels = 1);
    REFUSED_AS(RF_ERR_VALUE, 0, "n_levels is 5; expected 2 to 4", layer.n_levels = 5);
    REFUSED_AS(RF_ERR_TYPE, 0, "dtype is 9", layer.dtype = (rf_dtype)9);
    REFUSED_AS(RF_ERR_VALUE, 0, "activation is -1", layer.activation = (rf_activation)-1);
    REFUSED_AS(RF_ERR_VALUE, 0, "expected sizes of 0 or more", layer.m = -1);
    REFUSED_AS(RF_ERR_VALUE, 0, "level 1 has -1 items", layer.levels[1].count = -1);
    REFUSED_AS(RF_ERR_VALUE, 0, "weight of level 0 is NULL", layer.levels[0].weight = NULL);
    REFUSED_AS(RF_ERR_VALUE, 0, "x of level 1 is NULL", layer.levels[1].x = NULL);
    REFUSED_AS(RF_ERR_VALUE, 0, "parent of level 1 is NULL", layer.levels[1].parent = NULL);
    REFUSED_AS(RF_ERR_TYPE, 0, "parent_type of level 1 is 4", layer.levels[1].parent_type = (rf_int_type)4);
    REFUSED_AS(RF_ERR_VALUE, 0, "out is NULL", layer.out = NULL);
    REFUSED_AS(RF_ERR_VALUE, 0, "allocator is NULL", layer.allocator = NULL);
}

/* Returns the kernel of a layer with these numbers of users, candidates and rows. */
static rf_ikbo_kernel kernel_of(int64_t users, int64_t candidates, int64_t m, rf_ikbo_kernel asked) {
    static _Alignas(16) char memory[64];
    rf_ikbo_linear_params layer = layer_of(memory);
    layer.levels[0].count = users, layer.levels[1].count = candidates, layer.m = m, layer.kernel = asked;
    return rf_ikbo_linear_kernel(&layer, 0);
}

/* ikbo_kernel: few items have small pieces, many items persistent blocks; explicit requests are honoured. */
static void ikbo_kernel(char **arguments) {
    (void)arguments;
    const rf_ikbo_kernel best = RF_IKBO_KERNEL_BEST, fused = RF_IKBO_KERNEL_FUSED,
                         small = RF_IKBO_KERNEL_SMALL;
    CHECK(kernel_of(1, 1, 433, best) == small, "one candidate");
    CHECK(kernel_of(2, 4, 64, best) == small, "four candidates");
    CHECK(kernel_of(20, 5000, 433, best) == fused, "5,000 candidates");
    CHECK(kernel_of(20, 50000, 64, best) == fused, "50,000 candidates of 64 rows");
    CHECK(kernel_of(20, 5000, 433, small) == small && kernel_of(1, 1, 433, fused) == fused, "as asked");
}

/* Fails the second of the launches that follow. */
static void succeed_again(void) { unsetenv("FAKE_CUDA_FAIL"); }
static void fail_launch(void) {
    setenv("FAKE_CUDA_FAIL", "cuLaunchKernelEx:1", 1);
    driver_hook("cuLaunchKernelEx", succeed_again);
}
static void fail_second_launch(void) { driver_hook("cuLaunchKernelEx", fail_launch); }

/* Lowers a layer of four candidates of one user for an H100, and runs it on the fake device. Returns true if
 * blocks of small.cu take tickets. */
static bool runs_by_tickets(const rf__gpu *gpu, const rf__ikbo_shape *shape) {
    static _Alignas(16) char memory[64];
    const rf__cuda_device *device = NULL;
    rf_ikbo_linear_params layer = layer_of(memory);
    rf__launches launches;
    CHECK(rf__cuda_device_get(0, &device) == RF_OK, "%s", rf_last_error());
    layer.m = layer.n = 64, layer.levels[0].count = 1;
    rf__launches_init(&launches, "ikbo_linear");
    CHECK(rf__ikbo_linear_lower(gpu, &layer, shape, &launches) == RF_OK, "%s", rf_last_error());
    CHECK(launches.count == 2 && launches.launches[1].cooperative, "%d launches", (int)launches.count);
    CHECK(rf__launches_run(device, &launches, NULL, &noting_allocator, NULL) == RF_OK, "%s", rf_last_error());
    const bool tickets = ((const rf_fused_args *)rf__launches_arguments(&launches, 1))->tickets != 0;
    rf__launches_free(&launches);
    return tickets;
}

/* ikbo_small: blocks that may run at the same time take no tickets; if the driver refuses that, they do. */
static void ikbo_small(char **arguments) {
    (void)arguments;
    const rf__ikbo_shape shape = {.rows = 64, .ranks = 1, .slots = 4, .groups = 1};
    rf__gpu gpu;
    CHECK(rf__gpu_find("H100", &gpu) == RF_OK, "%s", rf_last_error());
    CHECK(!runs_by_tickets(&gpu, &shape), "tickets on a whole GPU");
    CHECK(driver_calls("cuLaunchKernelEx") == 2, "%d launches", driver_calls("cuLaunchKernelEx"));
    CHECK(driver_last_launch()->config.n_attributes == 2, "cooperative, and begun beside pack.cu");
    driver_hook("cuLaunchKernelEx", fail_second_launch);
    CHECK(runs_by_tickets(&gpu, &shape), "no tickets");
    CHECK(driver_calls("cuLaunchKernelEx") == 5, "%d launches", driver_calls("cuLaunchKernelEx"));
    CHECK(driver_last_launch()->config.n_attributes == 1, "still cooperative");
    CHECK(driver_last_launch()->config.grid[0] == 5, "%u blocks", driver_last_launch()->config.grid[0]);
    CHECK(context_depth() == 0 && given.live == 0, "a context or memory was left");
}

const command ikbo_commands[] = {{"ikbo_add", 0, ikbo_add},
                                 {"ikbo_takes", 0, ikbo_takes},
                                 {"ikbo_kernel", 0, ikbo_kernel},
                                 {"ikbo_small", 0, ikbo_small}};
const int n_ikbo_commands = (int)(sizeof ikbo_commands / sizeof ikbo_commands[0]);
