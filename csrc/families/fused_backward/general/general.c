/* Launches of the general path. Each kernel waits for the one before, of any call, before it touches memory
 * that was not there before the call. */
#include "families/fused_backward/general/general.h"

#include <stddef.h>
#include <string.h>

enum { WARPS = RF_BACKWARD_BLOCK / 32, WORD = sizeof(uint32_t) };

/* Binds positions in the workspace to bytes of the last launch's arguments, for existing parts. */
#define BIND(launches, ...)                                 \
    workspace_bind(launches, (const size_t[]){__VA_ARGS__}, \
                   sizeof((const size_t[]){__VA_ARGS__}) / sizeof(size_t))
static void workspace_bind(rf__launches *launches, const size_t *at, size_t count) {
    const unsigned char *arguments = rf__launches_arguments(launches, launches->count - 1);
    for (size_t i = 0; i < count; i++) {
        uint64_t address;
        memcpy(&address, arguments + at[i], sizeof address);
        if (address != 0) rf__launches_bind_workspace(launches, at[i]);
    }
}

/* Places of rf_backward_counts that are fields of some arguments. */
#define COUNTS(type)                                                                              \
    offsetof(type, counts.lengths), offsetof(type, counts.totals), offsetof(type, counts.digits), \
        offsetof(type, counts.places)

/* Counts of a pass. Entries of a segment are fewer than its lookups; the first pass finds out how many. */
static rf_backward_counts counts_of(const rf__backward_layout *layout, int32_t pass) {
    const uint64_t sums = (uint64_t)layout->sums, totals = sums + RF_BACKWARD_MOST_SEGMENTS * WORD;
    return (rf_backward_counts){.lengths = pass == 0 ? sums : totals,
                                .totals = totals,
                                .digits = totals + RF_BACKWARD_MOST_SEGMENTS * WORD,
                                .places = (uint64_t)layout->places,
                                .shift = pass * layout->variant.digit_bits,
                                .bits = layout->variant.digit_bits};
}

static int64_t all_entries_bytes(const rf__backward_layout *layout) {
    return layout->lookups * rf__backward_entry_bytes(&layout->variant);
}
/* Of entries that are not direct. */
static int64_t sources_bytes(const rf__backward_layout *layout) {
    return layout->sources == 0 ? 0 : layout->lookups * ((layout->variant.wide_values ? 8 : 4) + 4);
}

static rf_status keys_lower(const rf__backward_problem *problem, const rf__backward_layout *layout,
                            rf__launches *launches) {
    enum { BAGS = RF_BACKWARD_BLOCK / 8 };
    const rf_fused_backward_params *call = &problem->call;
    const int64_t digits = INT64_C(1) << layout->variant.digit_bits;
    const rf_backward_keys_args args = {.indices = (uintptr_t)call->indices,
                                        .offsets = (uintptr_t)call->offsets,
                                        .sample_weights = (uintptr_t)call->sample_weights,
                                        .entries = (uint64_t)layout->entries[0],
                                        .sources = (uint64_t)layout->sources,
                                        .factors = (uint64_t)layout->factors,
                                        .bag_factors = (uint64_t)layout->bag_factors,
                                        .lookups = layout->lookups,
                                        .output_dim = call->output_dim,
                                        .invalid_key = layout->invalid_key,
                                        .span = INT64_C(1) << layout->passes * layout->variant.digit_bits,
                                        .slots = (uint32_t)layout->slots,
                                        .bags = (uint32_t)call->bags,
                                        .segments = *layout->segments,
                                        .counts = counts_of(layout, 0)};
    const int64_t lookup_bytes = layout->lookups * (call->index_type == RF_INT64 ? 8 : 4) +
                                 (layout->slots + 1) * (call->offset_type == RF_INT64 ? 8 : 4);
    const rf__kernel_launch factors = {.grid = {(uint32_t)((layout->slots + BAGS - 1) / BAGS), 1},
                                       .read_bytes = lookup_bytes,
                                       .written_bytes = layout->slots * (int64_t)sizeof(float)};
    const rf__kernel_launch keys = {
        .grid = {(uint32_t)layout->chunks, 1},
        .read_bytes = lookup_bytes + (call->sample_weights != NULL ? layout->lookups * 4 : 0),
        .written_bytes = all_entries_bytes(layout) + sources_bytes(layout) + digits * layout->chunks * WORD};
    const bool any_mean = layout->bag_factors != 0;
    if (any_mean)
        RF_CHECK(rf__backward_launch_add(launches, &layout->variant, RF__BACKWARD_BAG_FACTORS, &factors,
                                         &args, sizeof args));
    RF_CHECK(rf__backward_launch_add(launches, &layout->variant, RF__BACKWARD_KEYS, &keys,
                                     any_mean ? NULL : &args, sizeof args));
    rf__launches_bind_upload(launches, 0, offsetof(rf_backward_keys_args, features));
    BIND(launches, offsetof(rf_backward_keys_args, entries), offsetof(rf_backward_keys_args, sources),
         offsetof(rf_backward_keys_args, factors), offsetof(rf_backward_keys_args, bag_factors),
         COUNTS(rf_backward_keys_args));
    return RF_OK;
}

static rf_status pass_lower(const rf__backward_layout *layout, int32_t pass, rf__launches *launches) {
    enum { PLACES = RF_BACKWARD_PLACES_DIGITS };
    const rf__backward_variant *variant = &layout->variant;
    const int64_t entry_bytes = rf__backward_entry_bytes(variant), entries = all_entries_bytes(layout);
    const int64_t digits = INT64_C(1) << variant->digit_bits, places = digits * layout->chunks * WORD;
    const rf_backward_sort_args args = {.entries = (uint64_t)layout->entries[pass % 2],
                                        .sorted = (uint64_t)layout->entries[1 - pass % 2],
                                        .count = (uint64_t)layout->count,
                                        .invalid_key = layout->invalid_key,
                                        .segments = *layout->segments,
                                        .counts = counts_of(layout, pass)};
    const rf__kernel_launch count = {
        .grid = {(uint32_t)layout->chunks, 1}, .read_bytes = entries, .written_bytes = places};
    const rf__kernel_launch scan = {
        .grid = {(uint32_t)(layout->segments->count * ((digits + PLACES - 1) / PLACES)), 1},
        .read_bytes = places,
        .written_bytes = places};
    const rf__kernel_launch sort = {
        .grid = {(uint32_t)layout->chunks, 1},
        .shared_bytes = (uint32_t)RF_BACKWARD_SORT_SHARED(digits, variant->items, entry_bytes),
        .read_bytes = entries + places,
        .written_bytes = entries};
    if (pass > 0)
        RF_CHECK(rf__backward_launch_add(launches, variant, RF__BACKWARD_COUNT, &count, &args, sizeof args));
    RF_CHECK(rf__backward_launch_add(launches, variant, RF__BACKWARD_PLACES, &scan, pass > 0 ? NULL : &args,
                                     sizeof args));
    BIND(launches, offsetof(rf_backward_sort_args, entries), offsetof(rf_backward_sort_args, sorted),
         offsetof(rf_backward_sort_args, count), COUNTS(rf_backward_sort_args));
    return rf__backward_launch_add(launches, variant, RF__BACKWARD_SORT, &sort, NULL, 0);
}

rf_status rf__backward_entries_lower(const rf__backward_problem *problem, const rf__backward_layout *layout,
                                     rf__launches *launches) {
    RF_CHECK(keys_lower(problem, layout, launches));
    for (int32_t pass = 0; pass < layout->passes; pass++) RF_CHECK(pass_lower(layout, pass, launches));
    return RF_OK;
}

/* The last of two arrays that passes read and write in turns. */
static uint64_t sorted_entries(const rf__backward_layout *layout) {
    return (uint64_t)layout->entries[layout->passes % 2];
}

/* Arguments of unique.cu, rows.cu and joins.cu. */
static rf_backward_rows_args rows_args(const rf__backward_problem *problem,
                                       const rf__backward_layout *layout) {
    const rf_fused_backward_params *call = &problem->call;
    rf_backward_rows_args args = {.entries = sorted_entries(layout),
                                  .sources = (uint64_t)layout->sources,
                                  .factors = (uint64_t)layout->factors,
                                  .grad = (uintptr_t)call->grad,
                                  .winners = (uintptr_t)call->winners,
                                  .partials = (uint64_t)layout->partials,
                                  .bases = problem->row_sparse != NULL ? (uint64_t)layout->bases : 0,
                                  .count = (uint64_t)layout->count,
                                  .lookups = layout->lookups,
                                  .chunk = layout->rows_chunk,
                                  .chunks = layout->rows_chunks,
                                  .pitch = layout->pitch,
                                  .n_matrices = problem->n_matrices,
                                  .by_frequency = call->scale_grad_by_freq,
                                  .epilogue = problem->epilogue_args};
    memcpy(args.matrices, problem->matrices, sizeof args.matrices);
    return args;
}

static void rows_bind(rf__launches *launches) {
    rf__launches_bind_upload(launches, 0, offsetof(rf_backward_rows_args, features));
    BIND(launches, offsetof(rf_backward_rows_args, entries), offsetof(rf_backward_rows_args, sources),
         offsetof(rf_backward_rows_args, factors), offsetof(rf_backward_rows_args, partials),
         offsetof(rf_backward_rows_args, bases), offsetof(rf_backward_rows_args, count));
}

rf_status rf__backward_counts_lower(const rf__backward_problem *problem, const rf__backward_layout *layout,
                                    rf__launches *launches) {
    const rf__backward_variant *variant = &layout->variant;
    const int32_t n = problem->n_matrices;
    const int64_t bases = layout->rows_chunks * (int64_t)WORD, entries = all_entries_bytes(layout);
    const rf_backward_rows_args args = rows_args(problem, layout);
    const rf__kernel_launch count = {
        .grid = {(uint32_t)layout->rows_chunks, 1}, .read_bytes = entries, .written_bytes = bases};
    const rf__kernel_launch sum = {.grid = {1, 1}, .read_bytes = bases, .written_bytes = bases + WORD};
    const rf__kernel_launch split = {.grid = {(uint32_t)((n + WARPS - 1) / WARPS), 1},
                                     .read_bytes = n * (int64_t)WORD,
                                     .written_bytes = n * (int64_t)WORD};
    RF_CHECK(rf__backward_launch_add(launches, variant, RF__BACKWARD_COUNT_ROWS, &count, &args, sizeof args));
    rows_bind(launches);
    RF_CHECK(rf__backward_launch_add(launches, variant, RF__BACKWARD_SUM_ROWS, &sum, NULL, 0));
    if (n == 1) return RF_OK;
    return rf__backward_launch_add(launches, variant, RF__BACKWARD_SPLIT_ROWS, &split, NULL, 0);
}

rf_status rf__backward_pool_lower(const rf__backward_problem *problem, const rf__backward_features *described,
                                  const rf__backward_layout *layout, rf__launches *launches) {
    const rf__backward_variant *variant = &layout->variant;
    const uint32_t slices = (uint32_t)layout->slices;
    const int64_t partials = rf__elements_bytes(RF_FLOAT32, (int64_t)layout->rows_chunks * 2 * layout->pitch);
    const rf_backward_rows_args args = rows_args(problem, layout);
    rf__kernel_launch rows = {.grid = {(uint32_t)layout->rows_chunks, slices},
                              .shared_bytes = (uint32_t)RF_BACKWARD_ROWS_SHARED(
                                  layout->rows_chunk, rf__backward_entry_bytes(variant), variant->vectors),
                              .read_bytes = all_entries_bytes(layout) + sources_bytes(layout),
                              .written_bytes = partials};
    const rf__kernel_launch joins = {.grid = {(uint32_t)((layout->rows_chunks + WARPS - 1) / WARPS), slices},
                                     .read_bytes = partials};
    rf__backward_traffic_add(problem, &described->traffic, &rows);
    RF_CHECK(rf__backward_launch_add(launches, variant, RF__BACKWARD_ROWS, &rows, &args, sizeof args));
    rows_bind(launches);
    return rf__backward_launch_add(launches, variant, RF__BACKWARD_JOINS, &joins, NULL, 0);
}
