/* Whether a mapping that comes back from a caller writes each vector of each bag once. Kernels write what tasks say and
 * nothing else: a bag that no task has would be left as it was in fresh memory, and no kernel can see that. */
#include <inttypes.h>
#include <stdlib.h>

#include "cuda/fused_embedding_bag/partition/cut.h"

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

/* What is written so far: a bit for each vector of each bag, of [features][columns][bags]. */
typedef struct coverage {
    const rf__fused_mappable *what;
    const rf__fused_mapping *mapping;
    uint64_t *written;
    int64_t *first; /* bit of each feature [n_features + 1] */
    int32_t last_group;
    int64_t last_place; /* behind the sums of the groups so far */
} coverage;

/* The bits from..to of a word that begins at `at`. */
static uint64_t bits_of(int64_t at, int64_t from, int64_t to) {
    const uint64_t above = to - at >= 64 ? ~UINT64_C(0) : ~(~UINT64_C(0) << (to - at));
    return from > at ? above & ~UINT64_C(0) << (from - at) : above;
}

/* Notes that bags of a vector are written; false if one has been before. */
static bool write_bags(coverage *my, int64_t feature, int64_t column, int32_t first_bag, int32_t last_bag) {
    const int64_t begin = my->first[feature] + column * my->mapping->bags;
    const int64_t from = begin + first_bag, to = begin + last_bag;
    for (int64_t at = from / 64 * 64; at < to; at += 64) {
        const uint64_t bits = bits_of(at, from, to);
        if ((my->written[at / 64] & bits) != 0) return false;
        my->written[at / 64] |= bits;
    }
    return true;
}

static bool has_class(const int32_t *classes, int32_t number) {
    for (int32_t b = 0; b < RF__FUSED_BUCKETS; b++)
        if (classes[b] == number) return true;
    return false;
}

static bool is_feature(const coverage *my, int32_t number) {
    return number >= 0 && number < my->what->n_features;
}

/* Whether a kernel has a schedule for a feature under this number, staged or not. */
static bool can_pool(const coverage *my, int32_t feature, int32_t number) {
    const rf__fused_feature *of = &my->what->features[feature];
    return has_class(of->class_of, number) || has_class(of->few_of, number);
}

/* Tasks that share bags come one after another, as their parts are numbered, with sums of their own. */
static bool group_follows(coverage *my, const rf__fused_task *task, const rf__fused_class *made) {
    const int32_t parts = task->part >> 16, part = task->part & 0xffff;
    if (parts != made->split || part >= parts) return false;
    if (parts == 1) return true;
    if (part > 0) {
        const rf__fused_task *before = task - 1; /* there is one: the first task of all is no later part */
        return (before->part & 0xffff) == part - 1 && before->part >> 16 == parts &&
               before->group == task->group && before->place == task->place &&
               before->feature == task->feature && before->slice == task->slice &&
               before->schedule == task->schedule && before->first_bag == task->first_bag &&
               before->last_bag == task->last_bag;
    }
    if (task->group != my->last_group + 1 || task->place < my->last_place) return false;
    my->last_group = task->group;
    my->last_place = task->place + rf__fused_places(made, task->last_bag - task->first_bag);
    return true;
}

/* Whether the task that follows is the next part, where there is one more. */
static bool group_goes_on(const rf__fused_task *task, const rf__fused_task *end) {
    const int32_t parts = task->part >> 16, part = task->part & 0xffff;
    return part + 1 == parts || (task + 1 < end && (task[1].part & 0xffff) == part + 1);
}

static bool pool_write(coverage *my, const rf__fused_task *task, const rf__fused_class *made,
                       const rf__fused_task *end) {
    if (!is_feature(my, task->feature) || !can_pool(my, task->feature, task->schedule)) return false;
    const rf__fused_geometry *shape = &my->what->features[task->feature].shape;
    if (task->slice < 0 || task->slice >= shape->slices) return false;
    if (!group_follows(my, task, made) || !group_goes_on(task, end)) return false;
    if ((task->part & 0xffff) > 0) return true; /* the first stands for all */
    const int32_t wide = shape->lanes * shape->vectors;
    const int32_t last =
        (task->slice + 1) * wide < shape->columns ? (task->slice + 1) * wide : shape->columns;
    for (int32_t column = task->slice * wide; column < last; column++)
        if (!write_bags(my, task->feature, column, task->first_bag, task->last_bag)) return false;
    return true;
}

static bool tile_write(coverage *my, const rf__fused_task *task) {
    const rf__fused_mapping *mapping = my->mapping;
    if (task->feature < 0 || task->feature >= mapping->n_tiles) return false;
    const rf__fused_lane *lanes =
        (const rf__fused_lane *)(mapping + 1 + mapping->n_tasks) + (int64_t)task->feature * RF__FUSED_TILE;
    for (int32_t lane = 0; lane < RF__FUSED_TILE; lane++) {
        const rf__fused_lane *one = &lanes[lane];
        if (one->feature == -1) continue;
        if (!is_feature(my, one->feature) || !can_pool(my, one->feature, task->schedule) || one->column < 0 ||
            one->column >= my->what->features[one->feature].shape.columns ||
            !write_bags(my, one->feature, one->column, task->first_bag, task->last_bag))
            return false;
    }
    return true;
}

static bool has_bags(const coverage *my, const rf__fused_task *task) {
    return task->first_bag >= 0 && task->first_bag < task->last_bag && task->last_bag <= my->mapping->bags &&
           task->schedule >= 0 && task->schedule < my->what->classes->count;
}

static bool tasks_write(coverage *my) {
    const rf__fused_task *tasks = rf__fused_tasks(my->mapping), *end = tasks + my->mapping->n_tasks;
    for (const rf__fused_task *task = tasks; task < end; task++) {
        if (!has_bags(my, task) || (task == tasks && (task->part & 0xffff) > 0)) return false;
        const rf__fused_class *made = &my->what->classes->of[task->schedule];
        if (made->kind == RF__FUSED_STAGED) return false;
        if (made->kind == RF__FUSED_COLUMNS ? !tile_write(my, task) : !pool_write(my, task, made, end))
            return false;
    }
    return my->last_group + 1 == my->mapping->n_groups && my->last_place <= my->mapping->places;
}

/* Lists of staged tables, each up to a task of feature -1. */
static bool lists_write(coverage *my, int64_t rows) {
    const rf__fused_staged staged = rf__fused_staged_of(my->mapping, rows);
    const rf__fused_task *tasks =
        (const rf__fused_task *)(my->mapping + rf__fused_rows(my->mapping) + (staged.depth > 0));
    for (int32_t list = 0; list < staged.lists; list++) {
        int32_t turn = 0;
        for (; turn < staged.depth; turn++) {
            const rf__fused_task *task = &tasks[(int64_t)turn * staged.lists + list];
            if (task->feature < 0) break;
            if (!is_feature(my, task->feature) || !has_bags(my, task) ||
                !has_class(my->what->features[task->feature].staged_of, task->schedule) ||
                task->last_bag - task->first_bag > RF__FUSED_STAGED_BAGS)
                return false;
            const int32_t columns = my->what->features[task->feature].shape.columns;
            for (int32_t column = 0; column < columns; column++)
                if (!write_bags(my, task->feature, column, task->first_bag, task->last_bag)) return false;
        }
        if (turn == staged.depth) return false;
    }
    return true;
}

/* The first vector that no task writes; -1: there is none. Bits behind the last are set already. */
static int64_t first_left(const coverage *my) {
    const int64_t words = (my->first[my->what->n_features] + 63) / 64;
    for (int64_t i = 0; i < words; i++)
        if (my->written[i] != ~UINT64_C(0)) return i * 64 + __builtin_ctzll(~my->written[i]);
    return -1;
}

static rf_status look_at_all(const rf__fused_mappable *what, const rf__fused_mapping *mapping, int64_t rows) {
    rf_status status = RF_OK;
    coverage my = {.what = what, .mapping = mapping, .last_group = -1};
    int64_t left = -1, feature = 0;
    my.first = malloc(((size_t)what->n_features + 1) * sizeof *my.first);
    if (my.first == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory to check a mapping");
        goto out;
    }
    my.first[0] = 0;
    for (int64_t f = 0; f < what->n_features; f++)
        my.first[f + 1] = my.first[f] + (int64_t)what->features[f].shape.columns * mapping->bags;
    const int64_t bits = my.first[what->n_features];
    my.written = calloc((size_t)bits / 64 + 1, sizeof *my.written);
    if (my.written == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory to check a mapping of %" PRId64 " rows", rows);
        goto out;
    }
    if (bits % 64 != 0) my.written[bits / 64] = ~UINT64_C(0) << bits % 64;
    if (!tasks_write(&my) || !lists_write(&my, rows)) {
        status = rf__fail(RF_ERR_VALUE,
                          "recfuse.fused_embedding_bag: mapping has a task that no call has, or one that "
                          "writes what another does; it was changed after it was made: make it anew");
        goto out;
    }
    left = first_left(&my);
    if (left < 0) goto out;
    while (my.first[feature + 1] <= left) feature++;
    status = rf__fail(RF_ERR_VALUE,
                      "recfuse.fused_embedding_bag: mapping leaves out bag %" PRId64 " of feature %" PRId64
                      "; it must have each bag of each feature once: make it anew",
                      (left - my.first[feature]) % mapping->bags, feature);
out:
    free(my.written);
    free(my.first);
    return status;
}

rf_status rf__fused_mapping_check(const rf__fused_mappable *what, const rf__fused_mapping *mapping,
                                  int64_t rows) {
    if (mapping->checksum == rf__fused_checksum(mapping, rows)) return RF_OK;
    return look_at_all(what, mapping, rows);
}
