/* The fused embedding bags on a GPU, in four steps: what features are (feature.c), the schedules that a kernel
 * must have (schedule.c), which block works on what (describe.c, partition/work.c, partition/map.c), and calls
 * prepared and launched (call.c, fused_embedding_bag.c). */
#ifndef RECFUSE_CUDA_FUSED_H
#define RECFUSE_CUDA_FUSED_H

#include "cuda/jit/jit.h"

enum {
    RF__FUSED_POOL = 0,
    RF__FUSED_COLUMNS = 1,
    RF__FUSED_STAGED = 2, /* kinds of classes */
    RF__FUSED_BLOCK = 64, /* threads of a block */
    RF__FUSED_TILE = 32, /* lanes of a tile */
    RF__FUSED_BUCKETS = 8, /* of mean bag lengths, each with a default schedule */
    RF__FUSED_FEW_BAGS = 256, /* of a feature: up to so many, two warps share a long one */
    RF__FUSED_MOST_CLASSES = 128,
    RF__FUSED_DEFAULT_WARPS = 28, /* 72 registers a thread, without spills */
    RF__FUSED_BLOCKS = RF__FUSED_DEFAULT_WARPS * 32 / RF__FUSED_BLOCK, /* that an SM runs by default */
    RF__FUSED_PLACE_BYTES = 128, /* of partial sums are counted in these */
    RF__FUSED_MAPPING_VERSION = 2,
    /* How work is cut into tasks. It is counted in steps: what a block takes for a batch of rows in flight that are in
     * L2, 0.6 us on an H200 with all its SMs at work. */
    RF__FUSED_TURNS = 14, /* tasks for each block that the GPU runs at once */
    RF__FUSED_LEAST_TURNS = 3, /* of small batches, whose tasks are smaller for it */
    RF__FUSED_LEAST_WORK = 8, /* of a task, in steps: to begin one costs two */
    RF__FUSED_LEAST_WORK_OF_ALL = 4, /* the same of small batches */
    RF__FUSED_LONG = 2, /* a task is, of so many times the work that it should have */
    RF__FUSED_TOGETHER =
        RF__FUSED_BLOCK / RF__FUSED_TILE * 4, /* bags of a tile that a block works on at once */
    RF__FUSED_COLUMN_STEPS = 2, /* of these, where bags have one lookup or none */
    RF__FUSED_LONGER_STEPS = 6, /* of each lookup where they have more, and beside staged tables */
    RF__FUSED_SECTOR = 32, /* bytes of a row that are read, at least */
    RF__FUSED_BYTES_A_STEP = 3000 /* of rows that come from memory */
};

/* What a feature's rows are like, for a kernel. */
typedef struct rf__fused_geometry {
    int32_t dtype, align, store; /* bytes of a vector; that its place in the output is aligned to */
    int32_t lanes, vectors; /* that read a row, and how often each */
    int32_t slices; /* of a row that is wider */
    int32_t columns; /* vectors of a row */
    int32_t row_bytes;
    int32_t pooling, is_padded;
} rf__fused_geometry;

/* What a schedule must be made for, to fit a feature; as in fused.cuh. */
static inline int32_t rf__fused_shape_code(const rf__fused_geometry *shape) {
    return shape->dtype | shape->align << 2 | shape->store << 7 | shape->lanes << 12 | shape->vectors << 18 |
           (shape->columns == shape->lanes) << 20 | shape->pooling << 21 | shape->is_padded << 23;
}

/* A schedule as a kernel has it compiled in: a line of RF_SCHEDULES in fused_embedding_bag.cu, after its
 * number. */
typedef struct rf__fused_class {
    int32_t kind, dtype, align, store, lanes, vectors, whole, pooling, padded, threads, distance, split;
} rf__fused_class;

/* Lookups of a bag whose ids a slot that pools has at a time; BATCH in pool.cuh. */
static inline int32_t rf__fused_ids_at_once(const rf__fused_class *made) {
    return made->distance < 4 ? 4 : made->distance;
}

typedef struct rf__fused_classes {
    int32_t count;
    rf__fused_class of[RF__FUSED_MOST_CLASSES];
    uint64_t code[RF__FUSED_MOST_CLASSES]; /* all fields of each in one number, to find it by */
} rf__fused_classes;

/* Whether a feature's table is staged, where the GPU can: never, where a batch makes it pay, or as its schedule says. */
typedef enum rf__fused_staging {
    RF__STAGE_NEVER,
    RF__STAGE_WHERE_IT_PAYS,
    RF__STAGE_ALWAYS
} rf__fused_staging;

/* One feature as the mapping sees it. */
typedef struct rf__fused_feature {
    rf__fused_geometry shape;
    int32_t class_of[RF__FUSED_BUCKETS]; /* the number of its class, by mean bag length; -1: nothing to do */
    int32_t few_of[RF__FUSED_BUCKETS]; /* the same in batches of RF__FUSED_FEW_BAGS and less */
    int32_t staged_of[RF__FUSED_BUCKETS]; /* the same where its table is staged; -1: it cannot be */
    rf__fused_staging staging;
    int64_t rows, table_bytes;
    int32_t expected; /* as in rf_fused_schedule */
} rf__fused_feature;

/* As in fused.cuh. */
typedef struct rf__fused_device_feature {
    uint64_t weight;
    int64_t rows, padding_idx, output_offset;
    uint32_t pitch;
    int32_t columns, pooling, shape;
} rf__fused_device_feature;
typedef struct rf__fused_task {
    int32_t feature, first_bag, last_bag, schedule, slice, part, group, place;
} rf__fused_task;
typedef struct rf__fused_lane {
    int32_t feature, column;
} rf__fused_lane;

/* The first row of a mapping; then n_tasks tasks, then n_tiles times 32 lanes. */
typedef struct rf__fused_mapping {
    uint32_t checksum; /* of all that follows, see rf__fused_checksum */
    int32_t n_tasks, n_tiles, n_groups;
    int32_t places; /* of 32 floats, for partial sums */
    int32_t bags, n_features;
    int32_t signature; /* of the features and classes that tasks name */
} rf__fused_mapping;
_Static_assert(sizeof(rf__fused_mapping) == 32 && sizeof(rf__fused_task) == 32 &&
                   sizeof(rf__fused_lane) == 8 && sizeof(rf__fused_device_feature) == 48,
               "rows of a mapping, and what kernels read");

/* What may follow them: this, then `depth` times `lists` tasks, each list ended by one of feature -1. */
typedef struct rf__fused_staged {
    int32_t depth, lists, unused[6];
} rf__fused_staged;
_Static_assert(sizeof(rf__fused_staged) == 32, "a row of a mapping");

/* Rows of a mapping of so many tasks and tiles, in front of those for tables that are staged. */
static inline int64_t rf__fused_rows_of(int64_t n_tasks, int64_t n_tiles) {
    const int64_t tile_rows =
        RF__FUSED_TILE * (int64_t)sizeof(rf__fused_lane) / (int64_t)sizeof(rf__fused_mapping);
    return 1 + n_tasks + n_tiles * tile_rows;
}
static inline int64_t rf__fused_rows(const rf__fused_mapping *mapping) {
    return rf__fused_rows_of(mapping->n_tasks, mapping->n_tiles);
}

/* Whether a mapping has as many rows as it says. */
static inline bool rf__fused_whole(const rf__fused_mapping *mapping, int64_t rows) {
    const int64_t first = rf__fused_rows(mapping);
    if (rows <= first) return rows == first;
    const rf__fused_staged *staged = (const rf__fused_staged *)(mapping + first);
    return staged->depth > 0 && staged->lists > 0 &&
           rows == first + 1 + (int64_t)staged->depth * staged->lists;
}

static inline rf__fused_staged rf__fused_staged_of(const rf__fused_mapping *mapping, int64_t rows) {
    const int64_t first = rf__fused_rows(mapping);
    return rows > first ? *(const rf__fused_staged *)(mapping + first) : (rf__fused_staged){0};
}

static inline const rf__fused_task *rf__fused_tasks(const rf__fused_mapping *mapping) {
    return (const rf__fused_task *)(mapping + 1);
}

/* ---- feature.c */

/* The shape of one feature. `weight` and `output`: addresses, of which the alignment matters. */
RF__SHARED rf_status rf__fused_geometry_of(const rf_fused_embedding_bag_params *params, int64_t feature,
                                           rf__fused_geometry *shape);

/* ---- schedule.c */

/* Every feature with its classes, for each of some sets of schedules [n_sets, n_features] (or NULL, for one set of
 * defaults): fills features [n_sets, n_features], and the classes of all sets together. */
RF__SHARED rf_status rf__fused_features(const rf_fused_embedding_bag_params *params,
                                        const rf_fused_schedule *schedules, int64_t n_sets,
                                        rf__fused_classes *classes, rf__fused_feature *features);

/* The schedules worth a try for a feature, `most` at most; how many there are. */
RF__SHARED int32_t rf__fused_candidates(const rf__fused_geometry *shape, rf_fused_schedule *candidates,
                                        int32_t most);

/* The bucket of a mean bag length; and the longest of a bucket, but for the last one. */
int32_t rf__fused_bucket(double mean);
double rf__fused_bucket_end(int32_t bucket);

/* ---- kernel.c */

/* What the code of a kernel depends on, but for its classes, which follow it in the key. */
typedef struct rf__fused_variant {
    int32_t index_type, offset_type, output_dtype;
    int32_t wide_positions, wide_rows, weighted, check, timed;
    int32_t min_blocks, dynamic_shared;
    int32_t n_classes;
    int32_t beside; /* 1: runs beside the kernel of staged tables */
    int32_t exact; /* 1: memory may end with the last id; of staged tables alone */
    int32_t foreign; /* 1: the mapping is the caller's */
} rf__fused_variant;

/* Blocks an SM for `warps`, and the bytes of shared memory that keep others out. */
RF__SHARED void rf__fused_occupancy(const rf__cuda_device *device, int32_t warps, rf__fused_variant *variant,
                                    const rf__fused_classes *classes);
/* Makes the variant that runs beside the kernel of staged tables. */
void rf__fused_beside(rf__fused_variant *variant, const rf__fused_classes *classes);
/* Of a block, at launch. */
int32_t rf__fused_shared_bytes(const rf__cuda_device *device, const rf__fused_variant *variant,
                               const rf__fused_classes *classes, const rf__kernel *kernel);
rf_status rf__fused_kernel(const rf__cuda_device *device, const rf__fused_variant *variant,
                           const rf__fused_classes *classes, const rf__kernel **kernel);
/* That kernel for an architecture, of which `info` tells, and those that batches with staged tables need. */
RF__SHARED rf_status rf__fused_kernel_compile(const char *arch, const rf__fused_variant *variant,
                                              const rf__fused_classes *classes, rf_kernel_info *info);

/* ---- describe.c: what mappings need to know of features */

typedef struct rf__fused_mappable {
    const rf__fused_feature *features; /* [n_features] */
    int64_t n_features;
    const rf__fused_classes *classes;
    int32_t signature; /* of these */
} rf__fused_mappable;

/* The same with all that it points to. */
typedef struct rf__fused_described {
    rf__fused_mappable what;
    rf__fused_classes classes;
    rf__fused_feature features[];
} rf__fused_described;

/* Checks features and describes them; to be freed with free(). `schedules` may be NULL. */
RF__SHARED rf_status rf__fused_describe(const rf_fused_embedding_bag_params *params,
                                        const rf_fused_schedule *schedules, rf__fused_described **described);
/* Of classes, and of which of them features have and how wide they are: two mappings of the same one fit each other's
 * calls. */
int32_t rf__fused_signature(const rf__fused_feature *features, int64_t n_features,
                            const rf__fused_classes *classes);

/* ---- partition/work.c, partition/map.c, partition/map_write.c */

/* Lookups of each feature in a batch: from offsets, or as expected where they are NULL. */
typedef struct rf__fused_batch {
    int64_t bags;
    const void *offsets; /* on the host, may be NULL */
    rf_int_type offset_type;
    bool may_stage; /* the GPU can: rf__fused_can_stage */
} rf__fused_batch;

/* The work of a batch cut into tasks, whose mapping of *rows rows of 32 bytes is still to be written: where the memory
 * for it comes from is up to the caller. `what` is needed until it is freed. */
typedef struct rf__fused_cut rf__fused_cut;
RF__SHARED rf_status rf__fused_cut_new(const rf__fused_mappable *what, const rf__fused_batch *batch,
                                       int32_t sms, int32_t blocks_per_sm, rf__fused_cut **cut,
                                       int64_t *rows);
RF__SHARED void rf__fused_cut_write(rf__fused_cut *cut, rf__fused_mapping *mapping);
RF__SHARED void rf__fused_cut_free(rf__fused_cut *cut);
/* All of it, to memory that is to be freed with free(). */
rf_status rf__fused_map(const rf__fused_mappable *what, const rf__fused_batch *batch, int32_t sms,
                        int32_t blocks_per_sm, rf__fused_mapping **mapping, int64_t *rows);
/* How long work takes, in steps; partition/map.cu does the same.
 * A block, for the bags that it works on at once, of `mean` lookups; and how many of those are in flight, where it
 * pools. `beside`: with tables that are staged. */
double rf__fused_steps(const rf__fused_class *made, double mean, bool beside);
double rf__fused_in_flight(const rf__fused_class *made);
/* What a row takes beside, if it comes from memory. */
double rf__fused_steps_of_miss(const rf__fused_geometry *shape);
/* What all rows do that so many lookups bring from memory. */
double rf__fused_misses(const rf__fused_geometry *shape, int64_t rows, double lookups);
/* What a task should take, of all that there is to share out to so many places for blocks. */
double rf__fused_target(double all, double places);

/* ---- partition/map_check.c: mappings that come back from a caller */

/* Of RF__FUSED_MAPPING_VERSION and all of a mapping's words but the first. */
uint32_t rf__fused_checksum(const rf__fused_mapping *mapping, int64_t rows);
/* Whether a mapping, which is as long as its head says (rf__fused_whole) and has these features, writes each vector of
 * each bag once: known by its checksum, if it is as it was written; else all of it is looked at. RF_ERR_VALUE. */
rf_status rf__fused_mapping_check(const rf__fused_mappable *what, const rf__fused_mapping *mapping,
                                  int64_t rows);

/* ---- fused_embedding_bag.c */

/* What no GPU does, however it is asked. */
rf_status rf__fused_check_limits(const rf_fused_embedding_bag_params *params);

/* ---- staged/staged.c: tables that are copied to shared memory */

/* Whether a feature's table can be staged. `weight`: its address. */
bool rf__fused_stageable(const rf__fused_geometry *shape, uint64_t weight, int64_t rows);
/* Whether a GPU can stage tables for a call of so many lookups. */
bool rf__fused_can_stage(const rf__cuda_device *device, int64_t lookups);
/* Which features are staged, by their lookups in a batch: sets staged [n_features]; how many they are. */
int64_t rf__fused_stage(const rf__fused_feature *features, int64_t n_features, const double *lookups,
                        const rf__fused_batch *batch, int32_t sms, bool *staged);
/* Lists of staged features, one for each SM, about equally long: *rows [1 + depth * lists], to be freed with
 * free(). */
rf_status rf__fused_staged_lists(const rf__fused_feature *features, int64_t n_features, const double *lookups,
                                 const bool *staged, int64_t n_staged, int32_t sms,
                                 const rf__fused_batch *batch, rf__fused_staged **rows, int64_t *n_rows);
/* The kernel of staged tables; its `variant` is that of the others. */
rf_status rf__fused_staged_kernel(const rf__cuda_device *device, const rf__fused_variant *variant,
                                  const rf__fused_classes *classes, const rf__kernel **kernel);
/* Threads of its block and bytes of shared memory. */
enum {
    RF__FUSED_STAGED_BLOCK = 640, /* that pool */
    RF__FUSED_STAGED_HELPERS = 128, /* that bring tables to them */
    RF__FUSED_STAGED_BAGS = 512, /* of a task */
    RF__FUSED_STAGED_RING = 210944,
    RF__FUSED_STAGED_SHARED = RF__FUSED_STAGED_RING + 15360 /* and lists of bags */
};

#endif
