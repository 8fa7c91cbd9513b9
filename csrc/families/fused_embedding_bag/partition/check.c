/* Checks that a mapping from a caller writes each vector of each bag once. Kernels write only what tasks
 * contain: a bag without a task would keep the contents of fresh memory, and no kernel can detect that. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "families/fused_embedding_bag/partition/cut.h"

uint32_t rf__fused_checksum(const rf__fused_mapping *mapping, int64_t rows) {
    enum { LANES = sizeof(rf__fused_mapping) / sizeof(uint32_t) };
    const uint32_t *words = (const uint32_t *)mapping;
    uint32_t sum[LANES] = {0}, sums[LANES] = {0}, checksum = RF__FUSED_MAPPING_VERSION;
    for (int lane = 1; lane < LANES; lane++) sum[lane] = sums[lane] = words[lane];
    for (int64_t row = 1; row < rows; row++) {
        for (int lane = 0; lane < LANES; lane++) { /* Fletcher's, in columns: as fast as memory is read */
            sum[lane] += words[row * LANES + lane];
            sums[lane] += sum[lane];
        }
    }
    for (int lane = 0; lane < LANES; lane++) {
        checksum = (checksum ^ sum[lane]) * 0x9e3779b1u;
        checksum = (checksum ^ checksum >> 15 ^ sums[lane]) * 0x85ebca77u;
    }
    return checksum;
}

/* The writes so far: a bit for each vector of each bag, of [features][columns][bags]. */
typedef struct coverage {
    const rf__fused_mappable *input;
    const rf__fused_mapping *mapping;
    uint64_t *covered;
    int64_t *first; /* bit of each feature [n_features + 1] */
    int32_t last_group;
    int64_t last_partials; /* end of the sums of the groups so far */
} coverage;

/* The bits from..to of a word that begins at `at`. */
static uint64_t bits_of(int64_t at, int64_t from, int64_t to) {
    const uint64_t mask = to - at >= 64 ? ~UINT64_C(0) : ~(~UINT64_C(0) << (to - at));
    return from > at ? mask & ~UINT64_C(0) << (from - at) : mask;
}

/* Marks a task's bags of a vector as written; false if one has been written before. */
static bool bags_write(coverage *cover, const rf_fused_task *task, int64_t feature, int64_t column) {
    const int64_t begin = cover->first[feature] + column * cover->mapping->bags;
    const int64_t from = begin + task->first_bag, to = begin + task->last_bag;
    for (int64_t at = from / 64 * 64; at < to; at += 64) {
        const uint64_t bits = bits_of(at, from, to);
        if ((cover->covered[at / 64] & bits) != 0) return false;
        cover->covered[at / 64] |= bits;
    }
    return true;
}

/* As above, for the vectors column..end of a task's feature. */
static bool columns_write(coverage *cover, const rf_fused_task *task, int32_t column, int32_t end) {
    while (column < end && bags_write(cover, task, task->feature, column)) column++;
    return column == end;
}

static bool has_class(const int32_t *classes, int32_t number) {
    for (int32_t b = 0; b < RF_FUSED_BUCKETS; b++)
        if (classes[b] == number) return true;
    return false;
}

static bool is_feature(const coverage *cover, int32_t number) {
    return number >= 0 && number < cover->input->n_features;
}

/* Returns true if a kernel has a schedule for a feature under this number, staged or not. */
static bool can_pool(const coverage *cover, int32_t feature, int32_t number) {
    const rf__fused_feature *of = &cover->input->features[feature];
    return has_class(of->classes, number) || has_class(of->classes_of_few, number);
}

/* Returns the number of consecutive tasks from here on that share bags, with their own sums; 0: one is
 * invalid. */
static int32_t group_of(coverage *cover, const rf_fused_task *task, const rf__fused_class *schedule,
                        const rf_fused_task *end) {
    const int32_t shares = rf_fused_splits(task->split);
    if (shares != schedule->split || rf_fused_split_part(task->split) != 0 || end - task < shares) return 0;
    if (shares == 1) return 1;
    for (int32_t i = 1; i < shares; i++) {
        rf_fused_task expected = *task;
        expected.split += i;
        if (memcmp(&task[i], &expected, sizeof expected) != 0) return 0;
    }
    if (task->group != cover->last_group + 1 || task->partials < cover->last_partials) return 0;
    cover->last_group = task->group;
    cover->last_partials = task->partials + rf__fused_partials(schedule, task->last_bag - task->first_bag);
    return shares;
}

static bool pool_write(coverage *cover, const rf_fused_task *task) {
    if (!is_feature(cover, task->feature) || !can_pool(cover, task->feature, task->schedule)) return false;
    const rf__fused_geometry *shape = &cover->input->features[task->feature].shape;
    if (task->slice < 0 || task->slice >= shape->slices) return false;
    const int32_t wide = shape->lanes * shape->vectors, first = task->slice * wide, last = first + wide;
    return columns_write(cover, task, first, last < shape->columns ? last : shape->columns);
}

static bool tile_write(coverage *cover, const rf_fused_task *task) {
    const rf__fused_mapping *mapping = cover->mapping;
    if (task->feature < 0 || task->feature >= mapping->n_tiles) return false;
    const rf_fused_lane *lanes =
        (const rf_fused_lane *)(mapping + 1 + mapping->n_tasks) + (int64_t)task->feature * RF_FUSED_TILE;
    for (int32_t i = 0; i < RF_FUSED_TILE; i++) {
        const rf_fused_lane *lane = &lanes[i];
        if (lane->feature == -1) continue;
        if (!is_feature(cover, lane->feature) || !can_pool(cover, lane->feature, task->schedule) ||
            lane->column < 0 || lane->column >= cover->input->features[lane->feature].shape.columns ||
            !bags_write(cover, task, lane->feature, lane->column))
            return false;
    }
    return true;
}

static bool has_bags(const coverage *cover, const rf_fused_task *task) {
    return task->first_bag >= 0 && task->first_bag < task->last_bag &&
           task->last_bag <= cover->mapping->bags && task->schedule >= 0 &&
           task->schedule < cover->input->classes->count;
}

static bool tasks_write(coverage *cover) {
    const rf_fused_task *tasks = rf__fused_tasks(cover->mapping), *end = tasks + cover->mapping->n_tasks;
    int32_t count = 1;
    for (const rf_fused_task *task = tasks; task < end; task += count) {
        if (!has_bags(cover, task)) return false;
        const rf__fused_class *schedule = &cover->input->classes->of[task->schedule];
        if (schedule->kind == RF_FUSED_CLASS_STAGED) return false;
        const bool tiled = schedule->kind == RF_FUSED_CLASS_COLUMNS;
        count = tiled ? 1 : group_of(cover, task, schedule, end);
        if (count == 0 || !(tiled ? tile_write(cover, task) : pool_write(cover, task))) return false;
    }
    return cover->last_group + 1 == cover->mapping->n_groups &&
           cover->last_partials <= cover->mapping->partials;
}

/* Lists of staged tables, each up to a task of feature -1. */
static bool lists_write(coverage *cover, int64_t rows) {
    const rf__fused_staged staged = rf__fused_staged_of(cover->mapping, rows);
    const rf_fused_task *tasks =
        (const rf_fused_task *)(cover->mapping + rf__fused_rows(cover->mapping) + (staged.depth > 0));
    for (int32_t list = 0; list < staged.lists; list++) {
        int32_t position = 0;
        for (; position < staged.depth; position++) {
            const rf_fused_task *task = &tasks[(int64_t)position * staged.lists + list];
            if (task->feature < 0) break;
            if (!is_feature(cover, task->feature) || !has_bags(cover, task) ||
                !has_class(cover->input->features[task->feature].classes_staged, task->schedule) ||
                task->last_bag - task->first_bag > RF_FUSED_STAGED_BAGS ||
                !columns_write(cover, task, 0, cover->input->features[task->feature].shape.columns))
                return false;
        }
        if (position == staged.depth) return false;
    }
    return true;
}

/* Returns the first vector that no task writes, or -1. Bits past the last are set already. */
static int64_t first_uncovered(const coverage *cover) {
    const int64_t words = (cover->first[cover->input->n_features] + 63) / 64;
    for (int64_t i = 0; i < words; i++)
        if (cover->covered[i] != ~UINT64_C(0)) return i * 64 + __builtin_ctzll(~cover->covered[i]);
    return -1;
}

static rf_status check_all(const rf__fused_mappable *input, const rf__fused_mapping *mapping, int64_t rows) {
    rf_status status = RF_OK;
    coverage cover = {.input = input, .mapping = mapping, .last_group = -1};
    int64_t uncovered = -1, feature = 0;
    cover.first = calloc((size_t)input->n_features + 1, sizeof *cover.first);
    RF_FAIL_IF(cover.first == NULL, RF_ERR_MEMORY, "no memory to check a mapping");
    for (int64_t f = 0; f < input->n_features; f++)
        cover.first[f + 1] = cover.first[f] + (int64_t)input->features[f].shape.columns * mapping->bags;
    const int64_t bits = cover.first[input->n_features];
    cover.covered = calloc((size_t)bits / 64 + 1, sizeof *cover.covered);
    if (cover.covered == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory to check a mapping of %" PRId64 " rows", rows);
        goto out;
    }
    if (bits % 64 != 0) cover.covered[bits / 64] = ~UINT64_C(0) << bits % 64;
    if (!tasks_write(&cover) || !lists_write(&cover, rows)) {
        status = rf__fail(RF_ERR_VALUE,
                          "recfuse.fused_embedding_bag: mapping has a task that no call has, or two tasks "
                          "that write the same output. Create it again, and do not change it.");
        goto out;
    }
    uncovered = first_uncovered(&cover);
    if (uncovered < 0) goto out;
    while (cover.first[feature + 1] <= uncovered) feature++;
    status = rf__fail(RF_ERR_VALUE,
                      "recfuse.fused_embedding_bag: mapping leaves out bag %" PRId64 " of feature %" PRId64
                      "; expected each bag of each feature once. Create it again.",
                      (uncovered - cover.first[feature]) % mapping->bags, feature);
out:
    free(cover.covered);
    free(cover.first);
    return status;
}

rf_status rf__fused_mapping_check(const rf__fused_mappable *input, const rf__fused_mapping *mapping,
                                  int64_t rows) {
    if (mapping->checksum == rf__fused_checksum(mapping, rows)) return RF_OK;
    return check_all(input, mapping, rows);
}
