/* The cut of a whole layer by its kernels, and the choice of the faster one for a call. */
#include "core/validate.h"
#include "families/ikbo_linear/ikbo_linear_args.h"
#include "families/ikbo_linear/ikbo_linear.h"

int64_t rf__ikbo_strips(const rf_ikbo_linear_params *params) {
    return (params->n + RF_FUSED_COLUMNS - 1) / RF_FUSED_COLUMNS;
}

int32_t rf__ikbo_slots(const rf_ikbo_level *level) {
    return (int32_t)(rf__round_up(level->k, 2 * RF_FUSED_K) / RF_FUSED_K);
}

bool rf__ikbo_is_direct(const rf_ikbo_linear_params *params) {
    enum { GRAIN = 16 };
    const int64_t most_pitch = (int64_t)1 << 40;
    for (int32_t l = 0; l < params->n_levels; l++) {
        const rf_ikbo_level *level = &params->levels[l];
        const int64_t pitch = rf__elements_bytes(params->dtype, level->weight_pitch);
        if ((uintptr_t)level->weight % GRAIN != 0) return false;
        if (params->m > 1 && (level->weight_pitch < level->k || pitch % GRAIN != 0 || pitch >= most_pitch))
            return false;
    }
    return true;
}

int64_t rf__ikbo_tasks(const rf_ikbo_linear_params *params, const rf__ikbo_shape *shape, int32_t l) {
    const int64_t strips = params->levels[l].count * rf__ikbo_strips(params);
    return (strips + shape->groups - 1) / shape->groups * shape->ranks;
}

/* Returns true if it is faster to multiply a user's rows again for each of its candidates than to send its
 * sums through memory. */
static bool is_joined(const rf_ikbo_linear_params *params) {
    enum { SUMS = 24 }; /* cost of a strip's sums on an H200, in slots */
    const rf_ikbo_level *users = &params->levels[0], *candidates = &params->levels[1];
    const int64_t slots = rf__ikbo_slots(users);
    return params->n_levels == 2 && candidates->count * slots <= users->count * (slots + SUMS);
}

/* One block has all rows, or the two of a cluster half each; limited by shared memory. */
static rf__ikbo_shape fused_shape(const rf_ikbo_linear_params *params, int64_t shared) {
    enum { MOST_SLOTS = 12 };
    const int32_t ranks = params->m > RF_FUSED_MOST_ROWS ? RF__IKBO_MOST_RANKS : 1;
    const int32_t least = 2 * RF_FUSED_PART;
    const bool joined = is_joined(params);
    int32_t rows = (int32_t)rf__round_up((params->m + ranks - 1) / ranks, RF_FUSED_PART);
    if (rows < least) rows = least;
    int64_t slots = (shared - RF_FUSED_SHARED_BYTES(rows, 0, joined)) / RF_FUSED_SLOT_BYTES(rows);
    if (slots > MOST_SLOTS) slots = MOST_SLOTS;
    return (rf__ikbo_shape){rows, ranks, (int32_t)slots, 0, joined, joined};
}

/* Slots of k of levels with a parent, or of joined levels. */
static int64_t fused_slots(const rf_ikbo_linear_params *params, bool joined) {
    int64_t slots = 0;
    for (int32_t l = joined ? 0 : 1; l < params->n_levels; l++)
        slots += params->levels[joined ? 1 : l].count * rf__ikbo_slots(&params->levels[l]);
    return slots * rf__ikbo_strips(params);
}

/* Returns true if ikbo_linear_fused.cu has registers for this many rows. */
static bool fits_fused(const rf_ikbo_linear_params *params) {
    return params->m <= RF__IKBO_MOST_RANKS * RF_FUSED_MOST_ROWS;
}

/* Returns the nanoseconds of a call by ikbo_linear_fused.cu on an H200: a fixed part; a slot of all levels
 * except the last, for which it waits, or of joined levels; a slot of a strip with 448 rows. For more rows:
 * as if it accepted them; torch computes these. */
static int64_t fused_time(const rf_ikbo_linear_params *params, int32_t sms) {
    enum { BASE = 9000, WAIT = 230, JOINED = 5000, JOINED_SLOT = 195, STRIP_SLOT = 380, MORE_ROWS = 18000 };
    enum { ROWS = 448, FIXED_ROWS = 128 };
    const bool joined = fits_fused(params) && is_joined(params);
    const int64_t work =
        fused_slots(params, joined) * STRIP_SLOT / sms * (params->m + FIXED_ROWS) / (ROWS + FIXED_ROWS);
    int64_t slots = 0;
    for (int32_t l = 0; l < params->n_levels - !joined; l++) slots += rf__ikbo_slots(&params->levels[l]);
    if (!fits_fused(params)) return MORE_ROWS + work;
    if (!joined) return BASE + slots * WAIT + work;
    return JOINED + (slots * JOINED_SLOT > work ? slots * JOINED_SLOT : work);
}

/* The variants of small.cu; nanoseconds of a slot on an H200, [joined][direct] of tasks that begin at once,
 * and of others. */
static const struct {
    int32_t rows, groups, first[2][2], later;
} small_shapes[] = {{64, 1, {{150, 107}, {134, 100}}, 79},
                    {64, 2, {{200, 155}, {164, 131}}, 97},
                    {112, 2, {{223, 190}, {185, 160}}, 142},
                    {112, 3, {{290, 250}, {222, 203}}, 208}};
enum { SMALL_SHAPES = sizeof small_shapes / sizeof small_shapes[0] };

/* Returns the nanoseconds of a call: a fixed part; more for tasks that do not all begin at once, for which
 * others may wait; the longest first task, and the tasks that follow on an SM. */
static int64_t small_time(const rf_ikbo_linear_params *params, const rf__ikbo_shape *shape, int32_t number,
                          int32_t sms) {
    enum { WAIT = 4000, TURN = 4500, MOST_TURNS = 4 };
    static const int32_t base[2][2] = {{5900, 6000}, {4500, 3900}};
    int64_t tasks = 0, longest = 0, all = 0, last = 0;
    for (int32_t l = 0; l < params->n_levels; l++) {
        last = rf__ikbo_slots(&params->levels[l]);
        all += last;
        if (last > longest) longest = last;
        if (l >= shape->joined) tasks += rf__ikbo_tasks(params, shape, l);
    }
    if (shape->joined) longest = all;
    const int64_t turns = (tasks + sms - 1) / sms;
    if (turns > 1 && (shape->joined || shape->direct)) return INT64_MAX; /* slower than the alternatives */
    if (turns > MOST_TURNS && fits_fused(params)) return INT64_MAX;
    return base[shape->joined][shape->direct] +
           longest * small_shapes[number].first[shape->joined][shape->direct] + (turns > 1 ? WAIT : 0) +
           (turns - 1) * (last * small_shapes[number].later + TURN);
}

static rf__ikbo_shape small_shape(const rf_ikbo_linear_params *params, const rf__gpu *gpu, int64_t *time) {
    enum { MOST_SLOTS = 40 };
    const bool may_join = params->n_levels == 2, direct = rf__ikbo_is_direct(params);
    rf__ikbo_shape best = {0, 0, 0, 0, false, false};
    *time = INT64_MAX;
    for (int32_t i = 0; i < SMALL_SHAPES * 4; i++) {
        const int32_t number = i / 4, rows = small_shapes[number].rows, groups = small_shapes[number].groups;
        rf__ikbo_shape shape = {.rows = rows,
                                .ranks = (int32_t)((params->m + rows - 1) / rows),
                                .groups = groups,
                                .joined = i / 2 % 2 == 1,
                                .direct = i % 2 == 1};
        if ((shape.joined && !may_join) || (shape.direct && !direct)) continue;
        const int64_t shared = gpu->shared_per_block_optin - RF_SMALL_SHARED_BYTES(rows, groups, 0);
        const int64_t slots = shared / RF_SMALL_SLOT_BYTES(rows, groups);
        shape.slots = slots > MOST_SLOTS ? MOST_SLOTS : (int32_t)slots;
        const int64_t call_time = small_time(params, &shape, number, gpu->sms);
        if (call_time < *time) *time = call_time, best = shape;
    }
    return best;
}

rf__ikbo_shape rf__ikbo_shape_of(const rf_ikbo_linear_params *params, const rf__gpu *gpu,
                                 rf_ikbo_kernel kernel) {
    const int64_t shared = gpu->shared_per_block_optin;
    int64_t time = 0;
    if (kernel == RF_IKBO_KERNEL_FUSED) return fused_shape(params, shared);
    const rf__ikbo_shape small = small_shape(params, gpu, &time);
    if (kernel == RF_IKBO_KERNEL_SMALL) return small;
    return time < fused_time(params, gpu->sms) ? small : fused_shape(params, shared);
}
