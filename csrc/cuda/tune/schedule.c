/* Schedules: text, checks, defaults. The defaults come from sweeps on an H200 (benchmarks/README.md). */
#include "cuda/tune/schedule.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Every field but the station: name, least, most, whether only powers of two are allowed. */
#define FIELD_LIST(X)         \
    X(distance, 1, 64, false) \
    X(threads, 1, 1024, true) \
    X(block, 32, 1024, true)  \
    X(warps, 1, 64, false)    \
    X(parts, 1, 16, true)     \
    X(segment, 1, 256, true)

static const struct {
    const char *name;
    size_t offset;
    int32_t least, most;
    bool power_of_two;
} fields[] = {
#define FIELD(name, least, most, power) \
    {#name, offsetof(rf_embedding_bag_schedule, name), least, most, power},
    FIELD_LIST(FIELD)
#undef FIELD
};
enum { N_FIELDS = sizeof fields / sizeof fields[0] };

static const char *const stations[] = {
#define STATION(name, text) [name] = text,
    RF_STATION_LIST(STATION)
#undef STATION
};
enum { N_STATIONS = sizeof stations / sizeof stations[0] };

#define ALLOWED_FIELDS "station, distance, threads, block, warps, parts and segment"

static int32_t *field_of(rf_embedding_bag_schedule *schedule, int i) {
    return (int32_t *)((char *)schedule + fields[i].offset);
}

static rf_status field_check(int i, long long value) {
    const bool power = (value & (value - 1)) == 0;
    if (value >= fields[i].least && value <= fields[i].most && (power || !fields[i].power_of_two))
        return RF_OK;
    return rf__fail(RF_ERR_VALUE, "schedule: %s is %lld, must be %s%d to %d", fields[i].name, value,
                    fields[i].power_of_two ? "a power of two, " : "", (int)fields[i].least,
                    (int)fields[i].most);
}

static rf_status fail_twice(const char *name) {
    return rf__fail(RF_ERR_VALUE, "schedule: %s is given twice", name);
}

/* One word of a schedule's text, `length` bytes: field=value. */
static rf_status word_read(const char *word, int length, rf_embedding_bag_schedule *schedule) {
    const char *equals = memchr(word, '=', (size_t)length);
    const int name_length = equals != NULL ? (int)(equals - word) : length;
    const char *value = equals != NULL ? equals + 1 : word + length;
    const int value_length = length - (int)(value - word);
    if (name_length == 7 && strncmp(word, "station", 7) == 0) {
        if (schedule->station != RF_STATION_DEFAULT) return fail_twice("station");
        for (int i = 1; i < N_STATIONS; i++) {
            if ((int)strlen(stations[i]) == value_length &&
                strncmp(value, stations[i], (size_t)value_length) == 0) {
                schedule->station = (rf_station)i;
                return RF_OK;
            }
        }
        return rf__fail(RF_ERR_VALUE,
                        "schedule: station is \"%.*s\", must be none, register, shared, local or l1",
                        value_length, value);
    }
    for (int i = 0; i < N_FIELDS; i++) {
        if ((int)strlen(fields[i].name) != name_length ||
            strncmp(word, fields[i].name, (size_t)name_length) != 0) {
            continue;
        }
        char *end = NULL;
        const long long number = strtoll(value, &end, 10);
        if (*field_of(schedule, i) != 0) return fail_twice(fields[i].name);
        if (end != value + value_length || value_length == 0) {
            return rf__fail(RF_ERR_VALUE, "schedule: %s is \"%.*s\", must be a number", fields[i].name,
                            value_length, value);
        }
        const rf_status status = field_check(i, number);
        if (status == RF_OK) *field_of(schedule, i) = (int32_t)number;
        return status;
    }
    return rf__fail(RF_ERR_VALUE,
                    "schedule: found \"%.*s\"; must be field=value with spaces between, the "
                    "fields are " ALLOWED_FIELDS,
                    length, word);
}

rf_status rf_embedding_bag_schedule_parse(const char *text, rf_embedding_bag_schedule *schedule) {
    rf_status status = RF_OK;
    memset(schedule, 0, sizeof *schedule);
    while (text != NULL && *text != '\0') {
        const int length = (int)strcspn(text, " ");
        if (length > 0) RF_TRY(word_read(text, length, schedule));
        text += length + (text[length] == ' ');
    }
out:
    return status;
}

void rf_embedding_bag_schedule_print(const rf_embedding_bag_schedule *schedule, char *text) {
    rf_embedding_bag_schedule copy = *schedule;
    int used = 0;
    text[0] = '\0';
    if (copy.station != RF_STATION_DEFAULT && (int)copy.station < N_STATIONS) {
        used = snprintf(text, RF_SCHEDULE_TEXT_BYTES, "station=%s", stations[copy.station]);
    }
    for (int i = 0; i < N_FIELDS; i++) {
        const int32_t value = *field_of(&copy, i);
        if (value == 0) continue;
        used += snprintf(text + used, (size_t)(RF_SCHEDULE_TEXT_BYTES - used), "%s%s=%d", used > 0 ? " " : "",
                         fields[i].name, (int)value);
    }
}

enum { WARP = 32, MOST_VECTORS = 2, IDS_A_LANE = 4 };

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
    return (int32_t)smaller(power_above(shape->row_bytes / shape->alignment), WARP);
}

int32_t rf__bag_vectors(const rf__bag_shape *shape) {
    const int64_t lanes = rf__bag_lanes(shape), columns = shape->row_bytes / shape->alignment;
    return (int32_t)smaller((columns + lanes - 1) / lanes, MOST_VECTORS);
}

int64_t rf__bag_slices(const rf__bag_shape *shape) {
    const int64_t wide = (int64_t)rf__bag_lanes(shape) * rf__bag_vectors(shape);
    return (shape->row_bytes / shape->alignment + wide - 1) / wide;
}

/* 32 warps leave 64 registers a thread, 24 leave 80: without spills that is what the kernels take. */
int32_t rf__bag_warps(const rf__bag_shape *shape) {
    const bool whole_rows = shape->row_bytes / shape->alignment == rf__bag_lanes(shape);
    return shape->more_state || !whole_rows ? 24 : 32;
}

/* Threads that share a bag: as many as make the bags fill the GPU, but each slot should have some rows. */
static int32_t default_threads(const rf__bag_shape *shape, int64_t mean) {
    const int64_t lanes = rf__bag_lanes(shape);
    const int64_t to_fill =
        (int64_t)shape->sms * rf__bag_warps(shape) * WARP / larger(shape->bags * rf__bag_slices(shape), 1);
    /* A slot with too few rows waits for the others more than it helps them. */
    const int64_t useful = larger(lanes * power_below(larger(mean / 12, 1)),
                                  smaller(64, lanes * power_below(larger(mean / 4, 1))));
    /* Neighbours in a warp wait for the longest of their bags: long bags get a warp each. */
    const int64_t least = larger(lanes, smaller(WARP, lanes * power_below(larger(mean / 8, 1))));
    const int64_t most = rf__bag_warps(shape) == 32 ? 1024 : 512;
    return (int32_t)larger(least, smaller(smaller(power_below(to_fill), useful), most));
}

/* Large blocks: neighbouring bags share rows, and then meet in one L1. Few bags make one block an SM, which
 * the next launch can overlap; otherwise blocks are small enough to load the SMs evenly. */
static int32_t default_block(const rf__bag_shape *shape, int32_t threads) {
    const int64_t all = shape->bags * rf__bag_slices(shape) * threads;
    const int64_t most = larger(rf__bag_warps(shape) == 32 ? 512 : 256, threads);
    if (all <= most * shape->sms)
        return (int32_t)larger(smaller(power_above(all / shape->sms), most), larger(threads, WARP));
    int64_t block = most;
    for (; block > larger(threads, 64); block /= 2) {
        const int64_t blocks = (all + block - 1) / block;
        const int64_t turns = (blocks + shape->sms - 1) / shape->sms;
        if (turns * shape->sms * 10 <= blocks * 11) break; /* a tenth of the SMs' time idle at most */
    }
    return (int32_t)larger(block, WARP);
}

/* Rows in flight a slot: 8 vectors of 16 bytes, 4 where each holds 8 sums and so more registers. */
static int32_t default_distance(const rf__bag_shape *shape, rf_station station, int64_t rows_a_slot) {
    if (station == RF_STATION_NONE) return 1;
    const int64_t sums = shape->alignment / shape->element_bytes;
    const int64_t most = (sums > 4 ? 4 : 8) / rf__bag_vectors(shape);
    return (int32_t)larger(smaller(most, power_above(rows_a_slot)), 1);
}

/* A sweep through the table pays where the rows of a batch do not fit in L2 but repeat before they leave it. */
static int32_t default_parts(const rf__bag_shape *shape, int64_t share) {
    const bool large = shape->table_bytes >= 2 * shape->l2_bytes &&
                       shape->lookups >= 2 * shape->l2_bytes / larger(shape->row_bytes, 1);
    return large && share >= WARP ? 4 : 1;
}

/* The fields that a caller has set: from C they may hold anything. */
static rf_status fields_check(rf_embedding_bag_schedule *schedule) {
    rf_status status = RF_OK;
    if ((unsigned)schedule->station >= N_STATIONS) {
        return rf__fail(RF_ERR_VALUE, "schedule: station is %d, must be one of rf_station",
                        (int)schedule->station);
    }
    for (int i = 0; i < N_FIELDS; i++) {
        const int32_t value = *field_of(schedule, i);
        if (value != 0) RF_TRY(field_check(i, value));
    }
out:
    return status;
}

static rf_status check(const rf__bag_shape *shape, const rf_embedding_bag_schedule *schedule) {
    if (schedule->station == RF_STATION_NONE && schedule->distance != 1) {
        return rf__fail(RF_ERR_VALUE,
                        "schedule: distance is %d, must be 1 or left out with station \"none\", which has "
                        "one row in flight; \"register\" has more",
                        (int)schedule->distance);
    }
    if (schedule->threads < rf__bag_lanes(shape)) {
        return rf__fail(RF_ERR_VALUE,
                        "schedule: threads is %d, must be at least the %d that read one row of %" PRId64
                        " bytes",
                        (int)schedule->threads, (int)rf__bag_lanes(shape), shape->row_bytes);
    }
    if (schedule->segment < smaller(schedule->threads, WARP)) {
        return rf__fail(RF_ERR_VALUE,
                        "schedule: segment is %d, must be at least the %d threads of a warp that share "
                        "a bag",
                        (int)schedule->segment, (int)smaller(schedule->threads, WARP));
    }
    if (schedule->block < schedule->threads) {
        return rf__fail(RF_ERR_VALUE, "schedule: block is %d, must be at least threads, %d",
                        (int)schedule->block, (int)schedule->threads);
    }
    if (schedule->warps != 0 && schedule->block > schedule->warps * WARP) {
        return rf__fail(RF_ERR_VALUE,
                        "schedule: warps is %d, must be at least the %d of one block of %d threads",
                        (int)schedule->warps, (int)schedule->block / WARP, (int)schedule->block);
    }
    if (schedule->station == RF_STATION_SHARED && shape->alignment < 4) {
        return rf__fail(RF_ERR_VALUE,
                        "schedule: station is \"shared\", which needs rows and output aligned to 4 "
                        "bytes or more; here they are to 2");
    }
    return RF_OK;
}

rf_status rf__bag_schedule_complete(const rf__bag_shape *shape, rf_embedding_bag_schedule *schedule) {
    const int64_t mean = (shape->lookups + larger(shape->bags, 1) - 1) / larger(shape->bags, 1);
    const rf_status status = fields_check(schedule);
    if (status != RF_OK) return status;
    if (schedule->station == RF_STATION_DEFAULT) schedule->station = RF_STATION_REGISTER;
    if (schedule->threads == 0) {
        schedule->threads = default_threads(shape, mean);
        if (schedule->block != 0) schedule->threads = (int32_t)smaller(schedule->threads, schedule->block);
        if (schedule->warps != 0)
            schedule->threads = (int32_t)smaller(schedule->threads, power_below(schedule->warps * WARP));
    }
    if (schedule->block == 0) {
        schedule->block = default_block(shape, schedule->threads);
        /* Whole blocks must make up the warps asked for. */
        const int64_t most = (int64_t)schedule->warps * WARP;
        if (most > 0)
            schedule->block = (int32_t)larger(smaller(schedule->block, most & -most), schedule->threads);
    }
    const int64_t warps_a_bag = larger(schedule->threads / WARP, 1);
    const int64_t slots = larger(schedule->threads / rf__bag_lanes(shape), 1);
    const int64_t share = (mean + warps_a_bag - 1) / warps_a_bag;
    if (schedule->distance == 0) {
        schedule->distance = default_distance(shape, schedule->station, (mean + slots - 1) / slots);
    }
    if (schedule->parts == 0) schedule->parts = default_parts(shape, share);
    if (schedule->segment == 0) {
        const int64_t group = smaller(schedule->threads, WARP);
        schedule->segment = (int32_t)larger(group, smaller(power_above(share), IDS_A_LANE * group));
    }
    return check(shape, schedule);
}
