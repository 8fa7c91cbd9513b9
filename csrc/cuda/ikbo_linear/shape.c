/* How the kernels of a whole layer cut it, and which of them is faster for a call. */
#include "base/validate.h"
#include "cuda/ikbo_linear/args.h"
#include "cuda/ikbo_linear/ikbo_linear.h"

int64_t rf__ikbo_strips(const rf_ikbo_linear_params *params) {
    return (params->n + RF_FUSED_COLUMNS - 1) / RF_FUSED_COLUMNS;
}

int32_t rf__ikbo_slots(const rf_ikbo_level *level) {
    return (int32_t)(rf__round_up(level->k, 2 * RF_FUSED_K) / RF_FUSED_K);
}

int64_t rf__ikbo_pieces(const rf_ikbo_linear_params *params, const rf__ikbo_shape *shape, int32_t l) {
    const int64_t strips = params->levels[l].count * rf__ikbo_strips(params);
    return (strips + shape->groups - 1) / shape->groups * shape->ranks;
}

/* One block has all rows, or the two of a cluster half each; and what fits into shared memory. */
static rf__ikbo_shape fused_shape(const rf_ikbo_linear_params *params, int64_t shared) {
    enum { MOST_SLOTS = 12 };
    const int32_t ranks = params->m > RF_FUSED_MOST_ROWS ? RF__IKBO_MOST_RANKS : 1;
    const int32_t least = 2 * RF_FUSED_PART;
    int32_t rows = (int32_t)rf__round_up((params->m + ranks - 1) / ranks, RF_FUSED_PART);
    if (rows < least) rows = least;
    int64_t slots = (shared - RF_FUSED_SHARED_BYTES(rows, 0)) / RF_FUSED_SLOT_BYTES(rows);
    if (slots > MOST_SLOTS) slots = MOST_SLOTS;
    return (rf__ikbo_shape){rows, ranks, (int32_t)slots, 0};
}

/* What small.cu may be compiled for; nanoseconds of a slot, on an H200. */
static const struct {
    int32_t rows, groups, slot_time;
} small_shapes[] = {{64, 1, 79}, {64, 2, 97}, {112, 2, 142}, {112, 3, 208}};

/* Nanoseconds of a call, as on an H200: what does not depend on the size, the more for pieces that do not all begin at once;
 * the longest first piece, and the pieces that follow on an SM. */
static int64_t small_time(const rf_ikbo_linear_params *params, const rf__ikbo_shape *shape, int64_t slot_time,
                          int32_t sms) {
    enum { BASE = 8300, LATER = 4000, TURN = 4500 };
    const int64_t last = slot_time * rf__ikbo_slots(&params->levels[params->n_levels - 1]);
    int64_t pieces = 0, longest = 0;
    for (int32_t l = 0; l < params->n_levels; l++) {
        const int64_t time = slot_time * rf__ikbo_slots(&params->levels[l]);
        pieces += rf__ikbo_pieces(params, shape, l);
        if (time > longest) longest = time;
    }
    const int64_t turns = (pieces + sms - 1) / sms;
    return BASE + (turns > 1 ? LATER : 0) + longest + (turns - 1) * (last + TURN);
}

/* The same of fused.cu: of what does not depend on the size, with clusters and without; of a slot of a strip with 448 rows. */
static int64_t fused_time(const rf_ikbo_linear_params *params, int32_t sms) {
    enum { BASE = 18000, ALONE = 13000, STRIP_SLOT = 380, ROWS = 448, FIXED_ROWS = 128 };
    int64_t slots = 0;
    for (int32_t l = 1; l < params->n_levels; l++)
        slots += params->levels[l].count * rf__ikbo_strips(params) * rf__ikbo_slots(&params->levels[l]);
    return (params->m > RF_FUSED_MOST_ROWS ? BASE : ALONE) +
           slots * STRIP_SLOT / sms * (params->m + FIXED_ROWS) / (ROWS + FIXED_ROWS);
}

static rf__ikbo_shape small_shape(const rf_ikbo_linear_params *params, const rf__cuda_device *device,
                                  int64_t *time) {
    enum { MOST_SLOTS = 40 };
    rf__ikbo_shape best = {0, 0, 0, 0};
    *time = INT64_MAX;
    for (size_t i = 0; i < sizeof small_shapes / sizeof small_shapes[0]; i++) {
        const int32_t rows = small_shapes[i].rows, groups = small_shapes[i].groups;
        rf__ikbo_shape shape = {rows, (int32_t)((params->m + rows - 1) / rows), 0, groups};
        const int64_t shared = device->shared_per_block_optin - RF_SMALL_SHARED_BYTES(rows, groups, 0);
        const int64_t slots = shared / RF_SMALL_SLOT_BYTES(rows, groups);
        shape.slots = slots > MOST_SLOTS ? MOST_SLOTS : (int32_t)slots;
        const int64_t taken = small_time(params, &shape, small_shapes[i].slot_time, device->sms);
        if (taken < *time) *time = taken, best = shape;
    }
    return best;
}

rf__ikbo_shape rf__ikbo_shape_of(const rf_ikbo_linear_params *params, const rf__cuda_device *device,
                                 rf_ikbo_kernel kernel) {
    const int64_t shared = device->shared_per_block_optin;
    int64_t time = 0;
    if (kernel == RF_IKBO_KERNEL_FUSED) return fused_shape(params, shared);
    const rf__ikbo_shape small = small_shape(params, device, &time);
    if (kernel == RF_IKBO_KERNEL_SMALL) return small;
    return time < fused_time(params, device->sms) ? small : fused_shape(params, shared);
}
