/* Calls the C API directly, without torch or Python, and compares it with a reference in double precision.
 *
 *     test_api [--rounds N] [TEST...]
 *
 * Prints the instruction set and a line per test; exits with 1 if a check failed. RECFUSE_CPU_ISA selects the
 * instruction set, so a run covers one.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

/* Tests of functions that the installed library does not export. RF_INSTALLED: the program links it. */
#if defined(RF_INSTALLED)
#define INTERNAL_LIST(X)
#else
#define INTERNAL_LIST(X)     \
    X(ikbo_attention_groups) \
    X(ikbo_attention_keys)   \
    X(ikbo_attention_errors) \
    X(workers)
#endif
/* All tests in their order. `first_use` must come first, because it races the selection of the instruction
 * set. */
#define TEST_LIST(X)               \
    X(first_use)                   \
    X(status)                      \
    X(embedding_bag_dims)          \
    X(embedding_bag_random)        \
    X(embedding_bag_exact)         \
    X(embedding_bag_repeats)       \
    X(embedding_bag_errors)        \
    X(executor_failure)            \
    X(fused_embedding_bag_random)  \
    X(fused_embedding_bag_reuse)   \
    X(fused_embedding_random)      \
    X(fused_embedding_bag_errors)  \
    X(fused_backward_random)       \
    X(fused_backward_repeats)      \
    X(fused_backward_errors)       \
    X(fused_update_random)         \
    X(fused_update_repeats)        \
    X(fused_update_errors)         \
    X(ikbo_add_random)             \
    X(ikbo_add_errors)             \
    X(hash_strings_vectors)        \
    X(hash_strings_integers)       \
    X(hash_strings_random)         \
    X(hash_strings_errors)         \
    X(embedding_columns_random)    \
    X(embedding_columns_repeats)   \
    X(embedding_columns_started)   \
    X(embedding_columns_forked)    \
    X(embedding_columns_lookups)   \
    X(embedding_columns_corrupted) \
    X(embedding_columns_long_bags) \
    X(embedding_columns_errors)    \
    X(huge_pages)                  \
    X(threads)                     \
    INTERNAL_LIST(X)

#define TEST_DECLARE(name) void test_##name(void);
TEST_LIST(TEST_DECLARE)
#undef TEST_DECLARE

static const struct {
    const char *name;
    void (*run)(void);
} tests[] = {
#define TEST_ROW(name) {#name, test_##name},
    TEST_LIST(TEST_ROW)
#undef TEST_ROW
};

static bool test_chosen(const char *name, int count, char **names) {
    for (int i = 0; i < count; i++)
        if (strcmp(name, names[i]) == 0) return true;
    return count == 0;
}

int main(int argc, char **argv) {
    int first = 1, ran = 0;
    if (argc > 2 && strcmp(argv[1], "--rounds") == 0) {
        check_rounds = atoi(argv[2]);
        first = 3;
    }
    for (size_t i = 0; i < sizeof tests / sizeof tests[0]; i++) {
        if (!test_chosen(tests[i].name, argc - first, argv + first)) continue;
        const int before = check_failures();
        tests[i].run();
        const int failed = check_failures() - before;
        printf("%s %s", tests[i].name, failed ? "FAILED" : "ok");
        if (failed) printf(" (%d checks)", failed);
        printf("\n");
        fflush(stdout);
        ran++;
    }
    printf("isa %s, %d tests, %d failed checks\n", rf_cpu_isa(), ran, check_failures());
    return check_failures() > 0 || ran == 0;
}
