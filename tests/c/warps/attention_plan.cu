/* The plan of the one-launch attention on the host: ikbo_attention_group.cu as a block of RF_BLOCK threads,
 * and the rows that ikbo_attention_fused.cu's warps derive from each tile. */
#include "warps.h"

#define RF_DIM 64
#define RF_KEYS 128
#define RF_K_SLOTS 4
#define RF_V_SLOTS 4
#define RF_SEGMENT 1
static inline rf_u64 __cvta_generic_to_shared(const void *address) { return (rf_u64)(uintptr_t)address; }
#include "families/ikbo_attention/ikbo_attention_group.cu"

#include "families/ikbo_attention/ikbo_attention_copy.cuh"
#include "families/ikbo_attention/fused_rows.cuh"

static void group(const void *args) {
    rf_ikbo_attention_group(*static_cast<const rf_attention_group_args *>(args));
}

/* Groups candidates. `report`: the first offender's argument (0: no offender), position and value. */
extern "C" __attribute__((visibility("default"))) void plan_group(rf_attention_group_args *args,
                                                                  rf_i64 *offender, rf_u64 seed) {
    rf_u32 claimed = 0;
    rf_error_record record = {};
    args->errors = {&claimed, &record};
    run_block(group, args, RF_BLOCK, seed);
    offender[0] = record.ready == RF_ERROR_READY ? (rf_i64)record.argument : 0;
    offender[1] = record.position;
    offender[2] = record.value;
}

/* The work items of the following launch: [number][8] in the form of tile_t, one more than exist, and the
 * numbers of their rows in out, [number][TILE_ROWS] (row_t). */
struct plan_tiles_args {
    rf_attention_args attention;
    int *tiles, *rows;
};

static void describe(const void *from) {
    const plan_tiles_args &args = *static_cast<const plan_tiles_args *>(from);
    const rf_attention_plan &plan = *args.attention.plan;
    const int lane = (int)threadIdx.x,
              count = plan.whole_tiles + (plan.tiles - plan.whole_tiles) * plan.parts;
    const users_t users(args.attention, lane);
    for (int number = 0; number <= count; number++) {
        tile_t *tile = (tile_t *)(args.tiles + number * 8);
        tile_write(args.attention, users, tile, number, lane);
        __syncwarp();
        for (int row = lane; row < TILE_ROWS && number < count; row += 32)
            args.rows[number * TILE_ROWS + row] = row_at(args.attention, tile, row).number;
    }
}

extern "C" __attribute__((visibility("default"))) void plan_tiles(const rf_attention_group_args *group,
                                                                  int heads, int queries, int own_queries,
                                                                  int *tiles, int *rows) {
    plan_tiles_args args = {};
    args.attention.plan = group->plan;
    args.attention.work = group->work;
    args.attention.members = group->members;
    args.attention.n_users = (int)group->keys.count;
    args.attention.heads = heads;
    args.attention.kv_heads = group->kv_heads;
    args.attention.candidates.queries = queries;
    args.attention.self.queries = own_queries;
    args.tiles = tiles;
    args.rows = rows;
    run_block(describe, &args, 32, 1);
}
