/* Schedules: text, checks, defaults. The defaults come from sweeps on an H200
 * (benchmarks/embedding_bag/README.md). */
#include "families/embedding_bag/embedding_bag_schedule.h"

#include <inttypes.h>
#include <string.h>

#include "gpu/tune/schedule_text.h"

_Static_assert(sizeof(rf_station) == sizeof(int32_t), "a field of a schedule");

static const char *const stations[] = {
#define STATION(name, text) [name] = text,
    RF_STATION_LIST(STATION)
#undef STATION
};

#define FIELD(...) RF__SCHEDULE_FIELD(rf_embedding_bag_schedule, __VA_ARGS__)
static const rf__schedule_field field_list[] = {
    FIELD(station, RF_STATION_NONE, sizeof stations / sizeof stations[0] - 1, false, stations),
    FIELD(distance, 1, 64, false, NULL),
    FIELD(threads, 1, 1024, true, NULL),
    FIELD(block, 32, 1024, true, NULL),
    FIELD(warps, 1, 64, false, NULL),
    FIELD(parts, 1, 16, true, NULL),
    FIELD(segment, 1, 256, true, NULL),
    FIELD(bags, 1, 32, true, NULL),
};
#undef FIELD
static const rf__schedule_fields fields = {field_list, sizeof field_list / sizeof field_list[0]};

rf_status rf_embedding_bag_schedule_parse(const char *text, rf_embedding_bag_schedule *schedule) {
    memset(schedule, 0, sizeof *schedule);
    return rf__schedule_parse(fields, text, schedule);
}

void rf_embedding_bag_schedule_print(const rf_embedding_bag_schedule *schedule, char *text) {
    rf__schedule_print(fields, schedule, text, RF_SCHEDULE_TEXT_BYTES);
}

enum { WARP = 32, MOST_VECTORS = 2, INDICES_A_LANE = 4 };
/* Of short bags: vectors in flight per lane, warps per SM, lookups per warp, and lookups per bag. */
enum { MOST_IN_FLIGHT = 8, WARPS_TO_HIDE = 16, MOST_LOOKUPS = 128, MOST_SHORT = 16 };
/* Threads count as many from this multiple of those that run at once; longest bags that a group of lanes
 * reads alone. */
enum { MANY_BLOCKS = 3, MOST_LOOKUPS_OF_WARP = 16 };
/* Bytes of rows of a warp's part of a bag, above which they are read in the order of the table's parts. */
enum { LEAST_SWEPT = 24 << 10 };

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* The largest power of two that is not above `most`; 1 for less. */
static int64_t power_below(int64_t most) {
    int64_t power = 1;
    while (power <= most / 2) power *= 2;
    return power;
}

static int64_t power_above(int64_t least) {
    int64_t power = 1;
    while (power < least && power < INT64_MAX / 2) power *= 2;
    return power;
}

int32_t rf__bag_lanes(const rf__bag_shape *shape) {
    return (int32_t)smaller(power_above(shape->row.bytes / shape->alignment), WARP);
}

int32_t rf__bag_vectors(const rf__bag_shape *shape) {
    const int64_t lanes = rf__bag_lanes(shape), columns = shape->row.bytes / shape->alignment;
    return (int32_t)smaller((columns + lanes - 1) / lanes, MOST_VECTORS);
}

int64_t rf__bag_slices(const rf__bag_shape *shape) {
    const int64_t wide = (int64_t)rf__bag_lanes(shape) * rf__bag_vectors(shape);
    return (shape->row.bytes / shape->alignment + wide - 1) / wide;
}

/* Of a vector. */
static bool has_many_sums(const rf__bag_shape *shape) {
    return rf__elements_in(shape->row.dtype, shape->alignment) > 4;
}

/* 32 warps leave 64 registers per thread, 24 leave 80: the needs of the kernels without spills. */
int32_t rf__bag_warps(const rf__bag_shape *shape) {
    const bool whole_rows = shape->row.bytes / shape->alignment == rf__bag_lanes(shape);
    return shape->has_state || !whole_rows ? 24 : 32;
}

/* Threads that share a bag: as many as make the bags fill the GPU, but each slot should have some rows. */
static int32_t default_threads(const rf__bag_shape *shape, int64_t mean) {
    const int64_t lanes = rf__bag_lanes(shape);
    const int64_t to_fill =
        (int64_t)shape->sms * rf__bag_warps(shape) * WARP / larger(shape->bags * rf__bag_slices(shape), 1);
    /* A slot with too few rows waits for the others more than it helps them. */
    const int64_t useful = larger(lanes * power_below(larger(mean / 12, 1)),
                                  smaller(64, lanes * power_below(larger(mean / 4, 1))));
    /* Short bags are best read a row at a time, if that fills the GPU and a list holds all of their rows. */
    if (to_fill <= lanes && mean <= smaller(MOST_LOOKUPS_OF_WARP, lanes * INDICES_A_LANE))
        return (int32_t)lanes;
    /* The bags of a warp wait for the longest of them: long bags get a warp each, or half a warp if all may
     * be equally long. */
    const int64_t whole = shape->lookups % larger(shape->bags, 1) == 0 ? WARP / 2 : WARP;
    const int64_t least = larger(lanes, smaller(whole, lanes * power_below(larger(mean / 8, 1))));
    const int64_t most = rf__bag_warps(shape) == 32 ? 1024 : 512;
    return (int32_t)larger(least, smaller(smaller(power_below(to_fill), useful), most));
}

/* Large blocks, because adjacent bags share rows, which then meet in one L1. Few bags make one block per SM,
 * which the next launch can overlap; otherwise blocks are small enough to load the SMs evenly, and smaller
 * still if there are many, because the slot of a block is free only when its last warp ends. `units`: bags,
 * or warps, of `threads` threads, with `warps` per SM. */
static int32_t default_block(const rf__bag_shape *shape, int32_t warps, int64_t units, int32_t threads) {
    const int64_t all = units * rf__bag_slices(shape) * threads;
    const int64_t at_once = (int64_t)shape->sms * warps * WARP;
    const int64_t most = larger(warps == 32 ? 512 : 256, threads);
    if (all <= most * shape->sms)
        return (int32_t)larger(smaller(power_above(all / shape->sms), most), larger(threads, WARP));
    int64_t block = all >= MANY_BLOCKS * at_once ? larger(threads, 128) : most;
    for (; block > larger(threads, 64); block /= 2) {
        const int64_t blocks = (all + block - 1) / block;
        const int64_t waves = (blocks + shape->sms - 1) / shape->sms;
        if (waves * shape->sms * 10 <= blocks * 11) break; /* a tenth of the SMs' time idle at most */
    }
    return (int32_t)larger(block, WARP);
}

/* Rows in flight per slot: 8 vectors of 16 bytes, or 4 if each holds 8 sums and ordering a list or reducing
 * over warps takes registers too. */
static int32_t default_distance(const rf__bag_shape *shape, const rf_embedding_bag_schedule *schedule,
                                int64_t rows_a_slot) {
    if (schedule->station == RF_STATION_NONE) return 1;
    const bool is_short_ring = has_many_sums(shape) && (schedule->parts > 1 || schedule->threads > WARP);
    const int64_t most = (is_short_ring ? 4 : 8) / rf__bag_vectors(shape);
    return (int32_t)larger(smaller(most, power_above(rows_a_slot)), 1);
}

/* A sweep through the table pays if the rows of a batch do not fit in L2 but repeat before they are evicted,
 * and if a warp has enough of them for each part. */
static int32_t default_parts(const rf__bag_shape *shape, int64_t share) {
    const bool large = shape->table_bytes >= 2 * shape->l2_bytes &&
                       shape->lookups >= 2 * shape->l2_bytes / larger(shape->row.bytes, 1);
    return large && share >= WARP && share * shape->row.bytes > LEAST_SWEPT ? 4 : 1;
}

/* Returns blocks of whole warps that make up the requested warps of an SM. */
static int32_t block_within(const rf_embedding_bag_schedule *schedule, int32_t block, int32_t least) {
    const int64_t most = (int64_t)schedule->warps * WARP;
    return most > 0 ? (int32_t)larger(smaller(block, most & -most), least) : block;
}

static rf_status check_block(const rf_embedding_bag_schedule *schedule) {
    const int block = (int)schedule->block;
    RF_FAIL_IF(schedule->warps != 0 && block > schedule->warps * WARP, RF_ERR_VALUE,
               "schedule: warps is %d; expected at least the %d of one block of %d threads",
               (int)schedule->warps, block / WARP, block);
    return RF_OK;
}

static rf_status check(const rf__bag_shape *shape, const rf_embedding_bag_schedule *schedule) {
    const int threads = (int)schedule->threads, block = (int)schedule->block,
              shared = (int)smaller(threads, WARP);
    RF_FAIL_IF(schedule->station == RF_STATION_NONE && schedule->distance != 1, RF_ERR_VALUE,
               "schedule: distance is %d; expected 1 or left out with station \"none\", which has one row in "
               "flight. "
               "Use station \"register\" for more.",
               (int)schedule->distance);
    RF_FAIL_IF(threads < rf__bag_lanes(shape), RF_ERR_VALUE,
               "schedule: threads is %d; expected at least the %d that read one row of %" PRId64 " bytes",
               threads, (int)rf__bag_lanes(shape), shape->row.bytes);
    RF_FAIL_IF(schedule->segment < shared, RF_ERR_VALUE,
               "schedule: segment is %d; expected at least the %d threads of a warp that share a bag",
               (int)schedule->segment, shared);
    RF_FAIL_IF(block < threads, RF_ERR_VALUE, "schedule: block is %d; expected at least threads, %d", block,
               threads);
    RF_CHECK(check_block(schedule));
    RF_FAIL_IF(schedule->station == RF_STATION_SHARED && shape->alignment < 4, RF_ERR_VALUE,
               "schedule: station is \"shared\", but rows or output are aligned to 2 bytes; expected 4 bytes "
               "or more");
    return RF_OK;
}

int32_t rf__bag_groups(const rf__bag_shape *shape) { return WARP / rf__bag_lanes(shape); }

/* Returns the most bags of a warp for which a lane holds 8 vectors, or for which there are lanes. */
static int64_t most_bags(const rf__bag_shape *shape) {
    return smaller((int64_t)rf__bag_groups(shape) * MOST_IN_FLIGHT / rf__bag_vectors(shape), WARP);
}

static bool is_for_lists(const rf_embedding_bag_schedule *schedule) {
    return schedule->station != RF_STATION_DEFAULT || schedule->distance != 0 || schedule->threads != 0 ||
           schedule->parts != 0 || schedule->segment != 0;
}

/* Returns as many bags per warp as leave each SM some warps, which hide each other's waits, and end soon
 * enough to load the SMs evenly. */
static int32_t default_bags(const rf__bag_shape *shape) {
    const int64_t warps = (int64_t)shape->sms * WARPS_TO_HIDE;
    const int64_t share = shape->bags * rf__bag_slices(shape) / larger(warps, 1);
    const int64_t mean = shape->lookups / larger(shape->bags, 1);
    const int64_t most = smaller(most_bags(shape), MOST_LOOKUPS / larger(mean, 1));
    return (int32_t)larger(power_below(smaller(share, most)), rf__bag_groups(shape));
}

/* Returns the largest mean of lookups of short bags: the more rows a warp reads at once, and the fewer
 * registers are free, the sooner a list in shared memory is faster. */
static int64_t most_short(const rf__bag_shape *shape) {
    const bool few_registers = rf__bag_warps(shape) < 32 || rf__bag_vectors(shape) > 1;
    return smaller(rf__bag_lanes(shape), few_registers ? 4 : MOST_SHORT);
}

/* At most one lookup per bag in the mean; or slightly more, with enough bags for several per warp. */
static bool is_short(const rf__bag_shape *shape) {
    if (shape->lookups <= shape->bags) return true;
    return shape->lookups / most_short(shape) <= shape->bags && default_bags(shape) > rf__bag_groups(shape);
}

static rf_status complete_short(const rf__bag_shape *shape, rf_embedding_bag_schedule *schedule) {
    const int bags = (int)schedule->bags, least = rf__bag_groups(shape), most = (int)most_bags(shape);
    RF_FAIL_IF(is_for_lists(schedule), RF_ERR_VALUE,
               "schedule: bags is %d, with which there is no station, distance, threads, parts or segment",
               bags);
    RF_FAIL_IF(
        !shape->may_be_short, RF_ERR_VALUE,
        "schedule: bags is %d, which is for sums and means without sample weights, of less than 2^30 lookups",
        bags);
    RF_FAIL_IF(bags < least || bags > most, RF_ERR_VALUE,
               "schedule: bags is %d; expected %d to %d for rows of %" PRId64 " bytes", bags, least, most,
               shape->row.bytes);
    if (schedule->block == 0) {
        const int64_t warps = (shape->bags + bags - 1) / bags;
        schedule->block =
            block_within(schedule, default_block(shape, rf__bag_warps(shape), warps, WARP), WARP);
    }
    return check_block(schedule);
}

rf_status rf__bag_schedule_complete(const rf__bag_shape *shape, rf_embedding_bag_schedule *schedule) {
    const int64_t mean = (shape->lookups + larger(shape->bags, 1) - 1) / larger(shape->bags, 1);
    RF_CHECK(rf__schedule_check(fields, schedule));
    if (schedule->bags == 0 && shape->may_be_short && !is_for_lists(schedule) && is_short(shape))
        schedule->bags = default_bags(shape);
    if (schedule->bags != 0) return complete_short(shape, schedule);
    if (schedule->station == RF_STATION_DEFAULT) schedule->station = RF_STATION_REGISTER;
    if (schedule->threads == 0) {
        schedule->threads = default_threads(shape, mean);
        if (schedule->block != 0) schedule->threads = (int32_t)smaller(schedule->threads, schedule->block);
        if (schedule->warps != 0)
            schedule->threads = (int32_t)smaller(schedule->threads, power_below(schedule->warps * WARP));
    }
    if (schedule->block == 0) {
        const int32_t block = default_block(shape, rf__bag_warps(shape), shape->bags, schedule->threads);
        schedule->block = block_within(schedule, block, schedule->threads);
    }
    const int64_t warps_a_bag = larger(schedule->threads / WARP, 1);
    const int64_t slots = larger(schedule->threads / rf__bag_lanes(shape), 1);
    const int64_t share = (mean + warps_a_bag - 1) / warps_a_bag;
    if (schedule->parts == 0) schedule->parts = default_parts(shape, share);
    if (schedule->distance == 0)
        schedule->distance = default_distance(shape, schedule, (mean + slots - 1) / slots);
    if (schedule->segment == 0) {
        const int64_t group = smaller(schedule->threads, WARP);
        schedule->segment = (int32_t)larger(group, smaller(power_above(share), INDICES_A_LANE * group));
    }
    return check(shape, schedule);
}
