/* Schedules of the features of a fused call: defaults by mean bag length, the limits of a feature, and the
 * classes that a kernel must contain. */
#include <inttypes.h>
#include <stddef.h>
#include <string.h>

#include "families/fused_embedding_bag/schedule/fused_schedule.h"
#include "families/fused_embedding_bag/staged/staged.h"

/* Slots of a bag that its rows keep busy: each has about eight rows, which are all in flight at once. */
static const int32_t bucket_slots[RF_FUSED_BUCKETS] = {1, 1, 2, 4, 8, 16, 32, 32};
/* Threads of a bag of a staged table, each with four rows at a time: few different values, because more of
 * them in a kernel spill registers. */
static const int32_t bucket_staged[RF_FUSED_BUCKETS] = {4, 4, 4, 4, 8, 8, 16, 16};

enum {
    MOST_SPLIT = 64,
    MOST_DISTANCE = 16,
    LEAST_STAGED = 2,
    VECTOR = 16,
    LONG_BAG = 8 /* warps that its slots, by bucket_slots, would keep busy */
};

static bool is_power(int32_t value, int32_t least, int32_t most) {
    return value >= least && value <= most && (value & (value - 1)) == 0;
}

static rf_status fail_field(const char *field, int32_t rejected, const char *allowed) {
    return rf__fail(RF_ERR_VALUE, "recfuse.fused_embedding_bag: a schedule's %s is %d; expected %s", field,
                    (int)rejected, allowed);
}

static rf_status fail_threads(const rf__fused_geometry *shape, int32_t threads, int32_t most) {
    return rf__fail(RF_ERR_VALUE,
                    "recfuse.fused_embedding_bag: a schedule's threads is %d; expected a power of two, %d "
                    "(which read a row of %d bytes) to %d",
                    (int)threads, (int)shape->lanes, (int)shape->row.bytes, (int)most);
}

/* Each lane reads whole rows, four at a time. */
static rf_status staged_complete(int32_t bucket, rf_fused_schedule *schedule) {
    if (schedule->threads == 0) schedule->threads = bucket_staged[bucket];
    if (!is_power(schedule->threads, LEAST_STAGED, RF_FUSED_TILE))
        return fail_field("threads", schedule->threads, "2, 4, 8, 16 or 32 for a staged table");
    if (schedule->split > 1) return fail_field("split", schedule->split, "1 for a staged table");
    schedule->distance = 4;
    schedule->split = 1;
    return RF_OK;
}

/* Threads that the rows of a bag keep busy. */
static int32_t busy_threads(const rf__fused_geometry *shape, int32_t bucket) {
    return shape->pooling == RF_MAX ? shape->lanes : shape->lanes * bucket_slots[bucket];
}

/* Completes a schedule for bags of a bucket. `is_small`: there are too few bags to hide the time of a long one, so
 * two warps share it. RF_ERR_VALUE: it does not fit the feature. */
static rf_status complete(const rf__fused_geometry *shape, int32_t bucket, bool is_small,
                          rf_fused_schedule *schedule) {
    const bool is_quantized = rf_is_quantized((int)shape->row.dtype);
    if (schedule->kind == RF_FUSED_KIND_DEFAULT)
        schedule->kind = bucket == 0 && schedule->threads == 0 && !is_quantized ? RF_FUSED_KIND_COLUMNS
                                                                                : RF_FUSED_KIND_POOL;
    if (is_quantized && schedule->kind != RF_FUSED_KIND_POOL)
        return fail_field("kind", schedule->kind, "0 (default) or 1 (pool) for a quantised table");
    if (schedule->kind < RF_FUSED_KIND_POOL || schedule->kind > RF_FUSED_KIND_STAGED)
        return fail_field("kind", schedule->kind, "0 (default), 1 (pool), 2 (columns) or 3 (staged)");
    if (schedule->kind == RF_FUSED_KIND_COLUMNS) {
        schedule->threads = schedule->distance = schedule->split = 1;
        return RF_OK;
    }
    if (schedule->kind == RF_FUSED_KIND_STAGED) return staged_complete(bucket, schedule);
    const int32_t most = shape->pooling == RF_MAX ? shape->lanes : RF_FUSED_BLOCK;
    const int32_t busy = busy_threads(shape, bucket);
    if (schedule->threads == 0) schedule->threads = busy < RF_FUSED_TILE ? busy : RF_FUSED_TILE;
    if (is_small && schedule->threads == RF_FUSED_TILE && schedule->split <= 1 &&
        busy >= LONG_BAG * RF_FUSED_TILE)
        schedule->threads = RF_FUSED_BLOCK;
    if (!is_power(schedule->threads, shape->lanes, most)) return fail_threads(shape, schedule->threads, most);
    if (schedule->distance == 0) schedule->distance = shape->vectors > 1 ? 4 : 8;
    if (!is_power(schedule->distance, 1, MOST_DISTANCE))
        return fail_field("distance", schedule->distance, "1, 2, 4, 8 or 16");
    if (schedule->split == 0) schedule->split = 1;
    if (schedule->split < 1 || schedule->split > (shape->pooling == RF_MAX ? 1 : MOST_SPLIT))
        return fail_field("split", schedule->split, "1 to 64, and 1 for a maximum");
    return RF_OK;
}

static rf__fused_class class_from(const rf__fused_geometry *shape, const rf_fused_schedule *schedule) {
    if (schedule->kind == RF_FUSED_KIND_COLUMNS) {
        return (rf__fused_class){.kind = RF_FUSED_CLASS_COLUMNS,
                                 .dtype = (int32_t)shape->row.dtype,
                                 .align = shape->align,
                                 .store = shape->store,
                                 .lanes = 1,
                                 .vectors = 1,
                                 .pooling = shape->pooling == RF_MAX ? RF_MAX : RF_SUM,
                                 .threads = RF_FUSED_TILE,
                                 .distance = 1,
                                 .split = 1};
    }
    const bool staged = schedule->kind == RF_FUSED_KIND_STAGED;
    const int32_t whole_align = (int32_t)(shape->row.bytes < VECTOR ? shape->row.bytes : VECTOR);
    return (rf__fused_class){.kind = staged ? RF_FUSED_CLASS_STAGED : RF_FUSED_CLASS_POOL,
                             .dtype = (int32_t)shape->row.dtype,
                             .align = staged ? whole_align : shape->align,
                             .store = shape->store,
                             .lanes = staged ? 1 : shape->lanes,
                             .vectors = staged ? (int32_t)shape->row.bytes / whole_align : shape->vectors,
                             .whole = rf__fused_is_whole(shape),
                             .pooling = shape->pooling,
                             .padded = shape->is_padded,
                             .threads = schedule->threads,
                             .distance = schedule->distance,
                             .split = schedule->split};
}

/* All of a class in one number. */
static uint64_t code_of(const rf__fused_class *of) {
    uint64_t code = 0;
#define ADD(name, bits) code = code << (bits) | (uint64_t)of->name;
    RF__FUSED_CLASS_FIELDS(ADD)
#undef ADD
    return code;
}

/* Returns the number of a class, and adds a new class; -1: no room. */
static int32_t class_number(rf__fused_classes *classes, const rf__fused_class *candidate) {
    const uint64_t code = code_of(candidate);
    for (int32_t i = 0; i < classes->count; i++) {
        if (classes->code[i] == code) return i;
    }
    if (classes->count == RF_FUSED_MOST_CLASSES) return -1;
    classes->of[classes->count] = *candidate;
    classes->code[classes->count] = code;
    return classes->count++;
}

/* The variety of schedules for features without one, reduced if a kernel would have too many. */
typedef enum variety { BY_LENGTH, ONE_A_SHAPE, COLUMNS_ALONE } variety;

/* Returns the class of a feature for bags of a bucket, by a completed schedule; -1: no room. */
static rf_status class_find(const rf__fused_geometry *shape, rf_fused_schedule schedule, int32_t bucket,
                            bool is_small, rf__fused_classes *classes, int32_t *number) {
    RF_CHECK(complete(shape, bucket, is_small, &schedule));
    const rf__fused_class candidate = class_from(shape, &schedule);
    *number = class_number(classes, &candidate);
    return RF_OK;
}

/* Returns the bucket of a feature in batches of bucket `b`: that of its expected length, if any, for any
 * batch. */
static int32_t bucket_for(const rf_fused_schedule *requested, int32_t b) {
    if (requested->expected == 0) return b;
    return rf_fused_bucket(requested->expected > 0 ? requested->expected / 16.0 : 0);
}

/* Returns the schedule of a feature; all defaults without schedules. */
static rf_fused_schedule schedule_at(const rf_fused_schedule *schedules, int64_t feature) {
    return schedules != NULL ? schedules[feature] : (rf_fused_schedule){0};
}

static rf_status feature_fill(const rf__fused_geometry *shape, const rf_fused_schedule *requested,
                              variety level, bool stageable, rf__fused_classes *classes,
                              rf__fused_feature *feature, bool *is_full) {
    const bool is_default = requested->kind == RF_FUSED_KIND_DEFAULT;
    feature->shape = *shape;
    feature->expected_sixteenths = requested->expected;
    const bool is_open = requested->threads == 0 && requested->distance == 0 && requested->split == 0;
    feature->staging = requested->kind == RF_FUSED_KIND_STAGED ? RF__STAGE_ALWAYS
                       : is_default && is_open && stageable    ? RF__STAGE_WHERE_IT_PAYS
                                                               : RF__STAGE_NEVER;
    RF_FAIL_IF(
        feature->staging == RF__STAGE_ALWAYS && !stageable, RF_ERR_VALUE,
        "recfuse.fused_embedding_bag: a schedule's kind is 3 (staged); expected another kind for a table "
        "that is not aligned to 16, has more than %d bytes, or rows of other than 4, 8, 16 or 32 bytes",
        (int)RF_FUSED_STAGED_RING);
    for (int32_t b = 0; b < RF_FUSED_BUCKETS; b++) {
        feature->classes_staged[b] = -1;
        const int32_t bucket = level == ONE_A_SHAPE ? RF_FUSED_BUCKETS / 2 : bucket_for(requested, b);
        if (b > 0 && (requested->expected != 0 ||
                      (is_default && level != BY_LENGTH))) { /* for every length the same */
            feature->classes[b] = feature->classes[0];
            feature->classes_of_few[b] = feature->classes_of_few[0];
            continue;
        }
        rf_fused_schedule schedule = *requested;
        /* A staged table also has a class for GPUs that cannot stage. */
        if (feature->staging == RF__STAGE_ALWAYS) schedule = (rf_fused_schedule){.kind = RF_FUSED_KIND_POOL};
        if (is_default && level == COLUMNS_ALONE && !rf_is_quantized((int)shape->row.dtype))
            schedule.kind = RF_FUSED_KIND_COLUMNS;
        if (is_default && level == ONE_A_SHAPE) schedule.kind = RF_FUSED_KIND_POOL;
        RF_CHECK(class_find(shape, schedule, bucket, false, classes, &feature->classes[b]));
        RF_CHECK(
            class_find(shape, schedule, bucket, level == BY_LENGTH, classes, &feature->classes_of_few[b]));
        *is_full |= feature->classes[b] < 0 || feature->classes_of_few[b] < 0;
    }
    return RF_OK;
}

/* Adds the staged classes of all features that are staged in this way. If there is no room for a class, its
 * feature is not staged, unless its schedule requires it: then it stops. */
static rf_status staged_fill(const rf_fused_schedule *schedules, int64_t count, rf__fused_staging staging,
                             rf__fused_classes *classes, rf__fused_feature *features, bool *is_full) {
    for (int64_t i = 0; i < count && !*is_full; i++) {
        rf__fused_feature *feature = &features[i];
        rf_fused_schedule schedule = schedule_at(schedules, i);
        schedule.kind = RF_FUSED_KIND_STAGED;
        for (int32_t b = 0; b < RF_FUSED_BUCKETS && feature->staging == staging; b++) {
            int32_t *number = &feature->classes_staged[b];
            RF_CHECK(class_find(&feature->shape, schedule, bucket_for(&schedule, b), false, classes, number));
            if (*number >= 0) continue;
            *is_full |= staging == RF__STAGE_ALWAYS;
            feature->staging = RF__STAGE_NEVER;
        }
    }
    return RF_OK;
}

/* Adds one set of schedules; stops if there is no room for another class. */
static rf_status set_fill(const rf_fused_embedding_bag_params *params, const rf_fused_schedule *schedules,
                          variety level, rf__fused_classes *classes, rf__fused_feature *features,
                          bool *is_full) {
    for (int64_t f = 0; f < params->n_features && !*is_full; f++) {
        rf__fused_geometry shape;
        if (params->features[f].dim == 0) { /* nothing to write */
            memset(&features[f], 0, sizeof features[f]);
            for (int32_t b = 0; b < RF_FUSED_BUCKETS; b++)
                features[f].classes[b] = features[f].classes_of_few[b] = features[f].classes_staged[b] = -1;
            continue;
        }
        RF_CHECK(rf__fused_geometry_of(params, f, &shape));
        const rf_feature *feature = &params->features[f];
        const uint64_t weight = (uintptr_t)rf__feature_weight(params->buffers, feature);
        features[f].rows = feature->rows;
        features[f].table_bytes = feature->rows * shape.row.pitch;
        const rf_fused_schedule requested = schedule_at(schedules, f);
        RF_CHECK(feature_fill(&shape, &requested, level, rf__fused_stageable(&shape, weight, feature->rows),
                              classes, &features[f], is_full));
    }
    return RF_OK;
}

rf_status rf__fused_features(const rf_fused_embedding_bag_params *params, const rf_fused_schedule *schedules,
                             int64_t n_sets, rf__fused_classes *classes, rf__fused_feature *features) {
    for (variety level = BY_LENGTH; level <= COLUMNS_ALONE; level++) {
        bool is_full = false;
        classes->count = 0;
        for (int64_t set = 0; set < n_sets && !is_full; set++) {
            const int64_t first = set * params->n_features;
            RF_CHECK(set_fill(params, schedules != NULL ? schedules + first : NULL, level, classes,
                              features + first, &is_full));
        }
        /* After all others, so that their kernel does not depend on staging; required ones before optional
         * ones. */
        const int64_t n_schedules = n_sets * params->n_features;
        RF_CHECK(staged_fill(schedules, n_schedules, RF__STAGE_ALWAYS, classes, features, &is_full));
        RF_CHECK(staged_fill(schedules, n_schedules, RF__STAGE_WHERE_IT_PAYS, classes, features, &is_full));
        if (!is_full) return RF_OK;
    }
    return rf__fail(
        RF_ERR_VALUE,
        "recfuse.fused_embedding_bag: schedules has more than %d different schedules for rows of different "
        "kinds, which is the most that one kernel has. Leave some features to the defaults (zeros).",
        RF_FUSED_MOST_CLASSES);
}

int32_t rf__fused_candidates(const rf__fused_geometry *shape, rf_fused_schedule *candidates, int32_t most) {
    int32_t count = 0;
    if (most > 0 && !rf_is_quantized((int)shape->row.dtype))
        candidates[count++] = (rf_fused_schedule){.kind = RF_FUSED_KIND_COLUMNS};
    const int32_t most_threads = shape->pooling == RF_MAX ? shape->lanes : RF_FUSED_BLOCK;
    for (int32_t threads = shape->lanes; threads <= most_threads; threads *= 2) {
        for (int32_t distance = 1; distance <= MOST_DISTANCE; distance *= 2) {
            for (int32_t split = 1; split <= (threads == RF_FUSED_BLOCK ? 4 : 1); split *= 2) {
                if (count == most) return count;
                candidates[count++] = (rf_fused_schedule){
                    .kind = RF_FUSED_KIND_POOL, .threads = threads, .distance = distance, .split = split};
            }
        }
    }
    return count;
}
