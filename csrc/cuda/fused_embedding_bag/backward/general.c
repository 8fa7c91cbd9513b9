/* The general path of the backward: sizes, the memory that it works in, its launches. */
#include "cuda/fused_embedding_bag/backward/general.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/validate.h"

enum {
    ALIGNMENT = 256, /* of parts of the workspace */
    LEAST_CHUNK = 64, /* entries a block of rows.cu */
    ROWS_BLOCKS = 8, /* of an SM, wanted */
    SORT_BLOCKS = 2, /* of an SM, at once */
    GROUP_BLOCKS = 4, /* the same */
    WARPS = RF_BACKWARD_BLOCK / 32,
    WIDEST_VECTORS = 4, /* that a lane has at once */
    COLUMNS = 4 * RF_BACKWARD_LANES /* of a vector of each lane of a warp */
};
static const int64_t MOST_ENTRIES = INT64_C(1) << 31; /* their places are numbers of 32 bits */
/* So many that most digits of them fit in shared memory also where all are of one segment: they have some more or less. */
enum { DIGIT_ENTRIES = 2048 };
_Static_assert(DIGIT_ENTRIES + DIGIT_ENTRIES / 8 <= RF_BACKWARD_ROOM, "by chance some have more");
static const int64_t MOST_GROUPED = INT64_C(1) * DIGIT_ENTRIES << RF_BACKWARD_MOST_DIGIT_BITS;

static int64_t part(rf__backward_layout *to, int64_t bytes) {
    const int64_t at = to->bytes;
    to->bytes += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return at;
}

/* Keys and values of like size. */
static int64_t entry_bytes_of(const rf__backward_variant *variant) {
    return variant->wide_keys || variant->wide_values ? 16 : 8;
}

/* Entries a block: `most`, a half of it, a quarter, ..., so that there are as many blocks as wanted if it can be. */
static int32_t chunk_of(int64_t lookups, int64_t wanted, int32_t most, int32_t least) {
    int32_t chunk = most;
    while (chunk > least && lookups / chunk < wanted) chunk /= 2;
    return chunk;
}

/* Zeros of rf_backward_groups. */
static int64_t part_words(const rf__backward_layout *sizes) { return 2 + 2 * (int64_t)sizes->parts; }

rf_status rf__backward_layout_of(const char *operator_name, const rf__backward_problem *problem,
                                 const rf__backward_features *described, const rf__cuda_device *device,
                                 int64_t room, rf__backward_layout *to) {
    const rf_fused_backward_params *call = &problem->call;
    rf__backward_variant *variant = &to->variant;
    *to = (rf__backward_layout){.lookups = call->lookups,
                                .slots = call->n_features * call->bags,
                                .trash = described->rows,
                                .segments = described->segments,
                                .passes = described->passes,
                                .bytes = room};
    RF__REFUSE_IF(call->lookups > MOST_ENTRIES || to->slots > UINT32_MAX ||
                      call->n_features > RF_BACKWARD_MOST_FEATURES,
                  RF_ERR_UNSUPPORTED,
                  RF__I64 " lookups in " RF__I64 " bags of " RF__I64
                          " features; on a GPU at most 2^31, 2^32 and 2^24; split the batch",
                  call->lookups, to->slots, call->n_features);
    *variant = (rf__backward_variant){.index_type = (int32_t)call->index_type,
                                      .offset_type = (int32_t)call->offset_type,
                                      .wide_keys = described->rows >= INT32_MAX,
                                      .wide_values = call->bags * call->output_dim >= UINT32_MAX,
                                      .digit_bits = described->digit_bits,
                                      .entries = described->entries,
                                      .grad_dtype = (int32_t)call->grad_dtype,
                                      .weight_dtype = (int32_t)problem->dtype,
                                      .emit = problem->emit,
                                      .round = problem->stochastic_rounding && problem->dtype != RF_FLOAT32,
                                      .aligned = described->aligned,
                                      .vectors = 1};
    while (variant->vectors < WIDEST_VECTORS && COLUMNS * variant->vectors < described->dim)
        variant->vectors *= 2;
    to->slices = (described->dim + COLUMNS * variant->vectors - 1) / (COLUMNS * variant->vectors);
    RF__REFUSE_IF(problem->emit == RF_ROWWISE_ADAGRAD + 1 && to->slices > 1, RF_ERR_UNSUPPORTED,
                  "row-wise Adagrad in the backward pass of rows of %d columns; it takes up to %d on a GPU; "
                  "pass deferred=True",
                  (int)described->dim, (int)(COLUMNS * WIDEST_VECTORS));
    variant->grouped = described->groups.count > 0 && to->lookups <= MOST_GROUPED;
    if (variant->grouped != 0) {
        to->segments = described->groups;
        to->passes = 1;
        variant->digit_bits = RF_BACKWARD_MOST_DIGIT_BITS;
    }
    const int64_t value_bytes = variant->wide_values ? 8 : 4, word = (int64_t)sizeof(uint32_t);
    const int64_t digits = INT64_C(1) << variant->digit_bits, sms = device->gpu.sms;
    /* Where all chunks run at once anyway, they are smaller: each takes less time. */
    const int64_t at_once = SORT_BLOCKS * sms * RF_BACKWARD_SORT_BLOCK;
    variant->items =
        to->lookups > at_once * RF_BACKWARD_FEW_ITEMS ? RF_BACKWARD_MOST_ITEMS : RF_BACKWARD_FEW_ITEMS;
    const int64_t chunk = RF_BACKWARD_SORT_BLOCK * variant->items;
    to->chunks = (int32_t)((to->lookups + chunk - 1) / chunk) + to->segments.count - 1;
    to->rows_chunk = chunk_of(to->lookups, sms * ROWS_BLOCKS, RF_BACKWARD_MOST_ROWS_CHUNK, LEAST_CHUNK);
    to->rows_chunks = (int32_t)((to->lookups + to->rows_chunk - 1) / to->rows_chunk);
    to->pitch = (described->dim + 3) / 4 * 4;
    for (int32_t i = 0; i < 2; i++) to->entries[i] = part(to, to->lookups * entry_bytes_of(variant));
    if (variant->entries != RF_ENTRIES_DIRECT) {
        to->sources = part(to, to->lookups * value_bytes);
        to->factors = part(to, to->lookups * (int64_t)sizeof(float));
    }
    to->count = part(to, sizeof(int64_t));
    if (described->any_mean) to->bag_factors = part(to, to->slots * (int64_t)sizeof(float));
    to->partials = part(to, (int64_t)to->rows_chunks * 2 * to->pitch * (int64_t)sizeof(float));
    to->bases = part(to, ((int64_t)to->rows_chunks + 1 + problem->n_matrices) * (int64_t)sizeof(uint32_t));
    to->sums = part(to, (2 * RF_BACKWARD_MOST_SEGMENTS + to->segments.count * digits) * word);
    to->places = part(to, digits * to->chunks * word);
    if (variant->grouped != 0) {
        to->tile =
            chunk_of(to->lookups, sms * GROUP_BLOCKS / 2, RF_BACKWARD_MOST_TILE, RF_BACKWARD_LEAST_TILE);
        to->tiles = (int32_t)((to->lookups + to->tile - 1) / to->tile) + to->segments.count - 1;
        to->parts = (int32_t)RF_BACKWARD_MOST_PARTS(to->lookups);
        to->part_blocks = (int32_t)(to->parts < sms * GROUP_BLOCKS ? to->parts : sms * GROUP_BLOCKS);
        to->begins = part(to, to->segments.count * (digits + 1) * word);
        to->part_list = part(to, to->parts * (int64_t)sizeof(rf_backward_part));
        to->part_counts = part(to, part_words(to) * word);
    }
    return RF_OK;
}

/* A launch behind others. Each kernel waits for the one before, whosever that is, before it touches anything that was not there
 * before the call. */
typedef struct launcher {
    const rf__cuda_device *device;
    void *stream;
    const rf__backward_variant *variant;
} launcher;

static rf_status launch(launcher *by, rf__backward_kernel number, int64_t blocks, int32_t slices,
                        int64_t shared_bytes, const void *args) {
    const rf__kernel *kernel = NULL;
    rf__backward_variant variant = *by->variant;
    variant.dynamic_shared = (int32_t)shared_bytes;
    RF_CHECK(rf__backward_kernel_get(by->device, &variant, number, &kernel));
    const rf__launch_config config = {.function = kernel->function,
                                      .grid = {(uint32_t)blocks, (uint32_t)slices},
                                      .block = {number >= RF__BACKWARD_KEYS && number <= RF__BACKWARD_SORT
                                                    ? RF_BACKWARD_SORT_BLOCK
                                                    : RF_BACKWARD_BLOCK},
                                      .shared_bytes = (uint32_t)shared_bytes,
                                      .programmatic = true,
                                      .stream = by->stream};
    return rf__launch(by->device, &config, args);
}

/* Where a pass counts. Entries of a segment are fewer than its lookups; the first pass finds out how many. */
static rf_backward_counts counts_of(const rf__backward_layout *sizes, uint64_t workspace, int32_t pass) {
    const uint64_t word = sizeof(uint32_t), sums = workspace + (uint64_t)sizes->sums;
    const uint64_t totals = sums + RF_BACKWARD_MOST_SEGMENTS * word;
    return (rf_backward_counts){.lengths = pass == 0 ? sums : totals,
                                .totals = totals,
                                .digits = totals + RF_BACKWARD_MOST_SEGMENTS * word,
                                .places = workspace + (uint64_t)sizes->places,
                                .shift = pass * sizes->variant.digit_bits,
                                .bits = sizes->variant.digit_bits};
}

static rf_backward_groups groups_of(const rf__backward_layout *sizes, uint64_t workspace) {
    const uint64_t word = sizeof(uint32_t), counts = workspace + (uint64_t)sizes->part_counts;
    return (rf_backward_groups){.begins = workspace + (uint64_t)sizes->begins,
                                .parts = workspace + (uint64_t)sizes->part_list,
                                .n_parts = counts,
                                .begun = counts + word,
                                .done = counts + 2 * word,
                                .found = counts + (2 + (uint64_t)sizes->parts) * word};
}

/* Entries, sorted or grouped; returns which of the two arrays has them. */
static rf_status entries_make(launcher *by, const rf__backward_layout *sizes,
                              const rf_fused_backward_params *call, uint64_t workspace, uint64_t features,
                              int32_t *sorted) {
    const bool direct = sizes->variant.entries == RF_ENTRIES_DIRECT;
    const rf_backward_keys_args keys = {
        .indices = (uintptr_t)call->indices,
        .offsets = (uintptr_t)call->offsets,
        .sample_weights = (uintptr_t)call->sample_weights,
        .features = features,
        .entries = workspace + (uint64_t)sizes->entries[0],
        .sources = direct ? 0 : workspace + (uint64_t)sizes->sources,
        .factors = direct ? 0 : workspace + (uint64_t)sizes->factors,
        .bag_factors = sizes->bag_factors == 0 ? 0 : workspace + (uint64_t)sizes->bag_factors,
        .lookups = sizes->lookups,
        .output_dim = call->output_dim,
        .trash = sizes->trash,
        .span = INT64_C(1) << sizes->passes * sizes->variant.digit_bits,
        .slots = (uint32_t)sizes->slots,
        .bags = (uint32_t)call->bags,
        .segments = sizes->segments,
        .counts = counts_of(sizes, workspace, 0),
        .zeros = workspace + (uint64_t)sizes->part_counts,
        .n_zeros = part_words(sizes)};
    enum { BAGS = RF_BACKWARD_BLOCK / 8, PLACES = RF_BACKWARD_PLACES_DIGITS };
    if (keys.bag_factors != 0)
        RF_CHECK(launch(by, RF__BACKWARD_BAG_FACTORS, (sizes->slots + BAGS - 1) / BAGS, 1, 0, &keys));
    RF_CHECK(launch(by, RF__BACKWARD_KEYS, sizes->chunks, 1, 0, &keys));
    const int64_t digits = INT64_C(1) << sizes->variant.digit_bits;
    for (int32_t pass = 0; pass < sizes->passes; pass++) {
        const rf_backward_sort_args sort = {.entries = workspace + (uint64_t)sizes->entries[pass % 2],
                                            .sorted = workspace + (uint64_t)sizes->entries[1 - pass % 2],
                                            .count = workspace + (uint64_t)sizes->count,
                                            .trash = sizes->trash,
                                            .segments = sizes->segments,
                                            .counts = counts_of(sizes, workspace, pass),
                                            .groups = groups_of(sizes, workspace)};
        if (pass > 0) RF_CHECK(launch(by, RF__BACKWARD_COUNT, sizes->chunks, 1, 0, &sort));
        RF_CHECK(launch(by, RF__BACKWARD_PLACES, sizes->segments.count * ((digits + PLACES - 1) / PLACES), 1,
                        0, &sort));
        RF_CHECK(launch(
            by, RF__BACKWARD_SORT, sizes->chunks, 1,
            RF_BACKWARD_SORT_SHARED(digits, sizes->variant.items, entry_bytes_of(&sizes->variant)), &sort));
    }
    *sorted = sizes->passes % 2;
    if (sizes->variant.grouped == 0) return RF_OK;
    const rf_backward_group_args group = {.entries = workspace + (uint64_t)sizes->entries[*sorted],
                                          .sorted = workspace + (uint64_t)sizes->entries[1 - *sorted],
                                          .segments = sizes->segments,
                                          .counts = counts_of(sizes, workspace, 0),
                                          .groups = groups_of(sizes, workspace),
                                          .part_blocks = sizes->part_blocks,
                                          .tile = sizes->tile};
    *sorted = 1 - *sorted;
    return launch(by, RF__BACKWARD_GROUP, sizes->part_blocks + sizes->tiles, 1, 0, &group);
}

/* How many rows there are, of each matrix those before it; behind them all. Waits for the stream. */
static rf_status rows_count(launcher *by, const rf__backward_layout *sizes, const rf_backward_rows_args *args,
                            int64_t firsts[RF_BACKWARD_MOST_MATRICES + 1]) {
    rf_status status = RF_OK;
    uint32_t found[1 + RF_BACKWARD_MOST_MATRICES] = {0}; /* all, and those before each matrix */
    const int32_t n = args->n_matrices;
    RF_TRY(launch(by, RF__BACKWARD_COUNT_ROWS, sizes->rows_chunks, 1, 0, args));
    RF_TRY(launch(by, RF__BACKWARD_SUM_ROWS, 1, 1, 0, args));
    if (n > 1) RF_TRY(launch(by, RF__BACKWARD_SPLIT_ROWS, (n + WARPS - 1) / WARPS, 1, 0, args));
    const rf__cu_pointer total = args->bases + (uint64_t)sizes->rows_chunks * sizeof(uint32_t);
    const size_t bytes = (n > 1 ? 1 + (size_t)n : 1) * sizeof found[0];
    RF__CUDA_TRY(by->device->driver->cuMemcpyDtoHAsync_v2(found, total, bytes, by->stream));
    RF__CUDA_TRY(by->device->driver->cuStreamSynchronize(by->stream));
    for (int32_t i = 0; i < n; i++) firsts[i] = found[1 + i];
    firsts[n] = found[0];
out:
    return status;
}

/* Has the rows found listed: memory for those of each matrix. Returns how many they are. */
static rf_status rows_list(launcher *by, const rf__backward_layout *sizes,
                           const rf__backward_problem *problem, rf_backward_rows_args *args, int64_t *count) {
    int64_t firsts[RF_BACKWARD_MOST_MATRICES + 1];
    RF_CHECK(rows_count(by, sizes, args, firsts));
    for (int32_t i = 0; i < problem->n_matrices; i++) {
        rf_backward_matrix *matrix = &args->matrices[i];
        const rf_sparse_output *output = problem->listed[i];
        const int64_t row_bytes = matrix->dim * rf__dtype_bytes(problem->dtype);
        int64_t *rows = NULL;
        void *values = NULL;
        RF_CHECK(output->allocate(output->context, firsts[i + 1] - firsts[i], &rows, &values));
        matrix->weight = (uintptr_t)values - (uint64_t)(firsts[i] * row_bytes);
        matrix->listed = (uintptr_t)rows - (uint64_t)firsts[i] * sizeof *rows;
    }
    *count = firsts[problem->n_matrices];
    return RF_OK;
}

static rf_status rows_pool(launcher *by, const rf__backward_layout *sizes,
                           const rf__backward_problem *problem, uint64_t workspace, uint64_t features,
                           int32_t sorted) {
    const rf_fused_backward_params *call = &problem->call;
    const bool direct = sizes->variant.entries == RF_ENTRIES_DIRECT;
    rf_backward_rows_args args = {.entries = workspace + (uint64_t)sizes->entries[sorted],
                                  .sources = direct ? 0 : workspace + (uint64_t)sizes->sources,
                                  .factors = direct ? 0 : workspace + (uint64_t)sizes->factors,
                                  .grad = (uintptr_t)call->grad,
                                  .winners = (uintptr_t)call->winners,
                                  .features = features,
                                  .partials = workspace + (uint64_t)sizes->partials,
                                  .count = workspace + (uint64_t)sizes->count,
                                  .lookups = sizes->lookups,
                                  .chunk = sizes->rows_chunk,
                                  .chunks = sizes->rows_chunks,
                                  .pitch = sizes->pitch,
                                  .n_matrices = problem->n_matrices,
                                  .by_frequency = call->scale_grad_by_freq,
                                  .emit = problem->emit_args};
    memcpy(args.matrices, problem->matrices, sizeof args.matrices);
    if (problem->listed != NULL) {
        int64_t count = 0;
        args.bases = workspace + (uint64_t)sizes->bases;
        RF_CHECK(rows_list(by, sizes, problem, &args, &count));
        if (count == 0) return RF_OK;
    }
    const int64_t shared =
        RF_BACKWARD_ROWS_SHARED(sizes->rows_chunk, entry_bytes_of(&sizes->variant), sizes->variant.vectors);
    RF_CHECK(launch(by, RF__BACKWARD_ROWS, sizes->rows_chunks, sizes->slices, shared, &args));
    return launch(by, RF__BACKWARD_JOINS, (sizes->rows_chunks + WARPS - 1) / WARPS, sizes->slices, 0, &args);
}

rf_status rf__backward_general_launch(const rf__backward_problem *problem, const rf__backward_layout *sizes,
                                      const rf__cuda_store *store, uint64_t workspace, uint64_t features) {
    rf_status status = RF_OK;
    const rf__cuda_device *device = store->device;
    launcher by = {.device = device, .stream = store->stream, .variant = &sizes->variant};
    int32_t sorted = 0;
    RF_TRY(entries_make(&by, sizes, &problem->call, workspace, features, &sorted));
    RF_TRY(rows_pool(&by, sizes, problem, workspace, features, sorted));
out:
    return status;
}
