/* Fused calls lowered: launches are a function of the call, keys of kernels are short, and descriptions are
 * reused. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "families/fused_embedding_bag/fused.h"
#include "program.h"
#include "test_fused.h"

enum { KEY_BYTES = 64 };

/* A case with a split, whose mapping has a counter for each group of tasks. */
static void lowered(rf__launches *launches, fused_case *one, int number) {
    const rf__cuda_device *device = NULL;
    rf__cuda_store store;
    rf__fused_prepared prepared;
    fused_case_fixed(one, number);
    rf__launches_init(launches, "fused_embedding_bag");
    CHECK(rf__cuda_device_get(0, &device) == RF_OK, "%s", rf_last_error());
    CHECK(rf__cuda_store_of(device, NULL, NULL, &store) == RF_OK, "%s", rf_last_error());
    CHECK(rf__fused_prepare(&store, &one->params, &one->plan, &prepared) == RF_OK, "%s", rf_last_error());
    CHECK(rf__fused_lower(&device->gpu, &prepared.problem, launches) == RF_OK, "%s", rf_last_error());
    rf__fused_release(&prepared);
}

/* Lists of equal classes are shared; other lists are not. */
static void *lists_find(void *argument) {
    const rf__fused_class_list **lists = argument;
    for (int i = 0; i < 100; i++) {
        const rf__fused_class_list *list = NULL;
        rf__fused_classes classes = {.count = 1};
        classes.of[0] = (rf__fused_class){.lanes = 1, .distance = 1, .threads = 1000 + i};
        CHECK(rf__fused_class_list_of(&classes, &list) == RF_OK, "%s", rf_last_error());
        const rf__fused_class_list *first = NULL;
        if (!__atomic_compare_exchange_n(&lists[i], &first, list, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            CHECK(first == list, "class %d has two lists", i);
        CHECK(list->count == 1 && list->of[0].threads == 1000 + i, "a list of other classes");
    }
    return NULL;
}

/* fused_lower: equal calls are lowered alike, whatever surrounds their params. */
void fused_lower(char **arguments) {
    (void)arguments;
    static rf__launches first, second;
    static const rf__fused_class_list *lists[100]; /* atomic */
    fused_case one, other;
    lowered(&first, &one, 0);
    lowered(&second, &other, 0);
    CHECK(first.count == 2 && first.launches[0].source == NULL, "%d launches", (int)first.count);
    CHECK(first.launches[0].fill_bytes > 0 &&
              first.workspace_bytes % RF__FUSED_PARTIAL_BYTES == first.launches[0].fill_bytes % 128,
          "counters of %lld bytes in %lld", (long long)first.launches[0].fill_bytes,
          (long long)first.workspace_bytes);
    CHECK(first.n_bytes == second.n_bytes && memcmp(first.bytes, second.bytes, first.n_bytes) == 0,
          "other keys or arguments for the same call");
    CHECK(memcmp(first.launches, second.launches, 2 * sizeof first.launches[0]) == 0, "other launches");
    CHECK(first.launches[1].key_bytes == KEY_BYTES, "a key of %d bytes", (int)first.launches[1].key_bytes);
    rf__launches_free(&second);
    lowered(&second, &other, 1); /* other tables, but of the same kinds */
    CHECK(memcmp(rf__launches_key(&first, 1), rf__launches_key(&second, 1), KEY_BYTES) == 0,
          "another kernel for other tables");
    rf__launches_free(&first);
    rf__launches_free(&second);
    run_threads(lists_find, lists);

    /* A copy of the buffers does not distinguish calls. */
    const costs before = costs_now();
    memcpy(one.buffers, other.buffers, sizeof one.buffers);
    one.params.buffers = one.buffers;
    int64_t bytes = 0;
    CHECK(rf_fused_embedding_bag_workspace(&one.params, &one.plan, &streams[0], &bytes) == RF_OK, "%s",
          rf_last_error());
    expect_costs("a call with a copy of the buffers", before, 0, false); /* and no kernel is compiled */
    one.buffers[0].numel++;
    CHECK(rf_fused_embedding_bag_workspace(&one.params, &one.plan, &streams[0], &bytes) == RF_OK, "%s",
          rf_last_error());
    CHECK(costs_now().uploads > before.uploads, "tables of another size have the same description");
}
