/* Producer warps of the schedule "staged": HELPERS threads of each block copy tables into the ring (ring.cuh)
 * and sort the bags of a task by length.
 *
 * Thread mapping. The first helper issues bulk copies as long as the ring has room. All helpers sort: each
 * has MOST_BAGS / HELPERS bags of a task, computes the class of each length and a number within the class,
 * and adds the number of bags in lower classes to get the position.
 */
#ifndef RECFUSE_FUSED_PRODUCER_CUH
#define RECFUSE_FUSED_PRODUCER_CUH

#include "families/fused_embedding_bag/staged/ring.cuh"

/* Returns task `turn` of the block's list; its feature is -1 at the end of the list. */
RF_INLINE rf_fused_task task_of(const rf_fused_args &args, int turn) {
    int words[4] = {-1, 0, 0, 0};
    if (turn < args.limit) rf_load_words(words, &args.tasks[(rf_i64)turn * gridDim.x + blockIdx.x].feature);
    rf_fused_task task = {words[0], words[1], min(words[2], args.bags), words[3]};
    if (task.feature < 0 || !rf_is_feature(args, task.feature)) task.feature = -1;
    if (RF_CALLERS_MAPPING && task.feature >= 0) {
        const rf_fused_descriptor &feature = args.features[task.feature];
        const rf_i64 rows = rf_load(&feature.rows);
        const rf_u64 bytes = (rf_u64)rows * rf_load(&feature.pitch);
        const bool can = rows <= RF_FUSED_STAGED_RING && bytes <= RF_FUSED_STAGED_RING && bytes % WORD == 0 &&
                         (rf_u64)rf_load(&feature.weight) % WORD == 0 && task.first_bag >= 0 &&
                         task.first_bag < task.last_bag && task.last_bag - task.first_bag <= MOST_BAGS;
        if (!can) task.feature = -1;
    }
    return task;
}

/* Returns the class of a length, the longest lengths first: its exponent and the next three bits of the
 * mantissa. */
RF_INLINE int length_class(int length) {
    const int code = (__float_as_int((float)length) >> 20) - (127 << 3) + 1; /* length 1 has code 1 */
    return LENGTHS - 1 - min(max(code, 0), LENGTHS - 1);
}

/* Barrier of all helpers. */
RF_INLINE void helpers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(HELPERS) : "memory"); }

/* Converts the counts of the classes into their begins. One warp. */
RF_INLINE void starts_from_counts(int4 *counts) {
    const int4 of = counts[threadIdx.x % 32];
    const int all = of.x + of.y + of.z + of.w;
    const int before = rf_sum_of_lanes_to(all) - all;
    counts[threadIdx.x % 32] = {before, before + of.x, before + of.x + of.y, before + of.x + of.y + of.z};
}

/* The helpers copy the offsets of a task and wait for them. */
RF_INLINE void copy_offsets(const rf_fused_args &args, const rf_fused_task &task) {
    const int count = task.last_bag - task.first_bag;
    const RF_OFFSET *offsets = args.offsets + (rf_i64)task.feature * args.bags + task.first_bag;
    for (int i = helper(); i <= count; i += HELPERS) copy_element(&the_ring().offsets[i], offsets + i);
    the_ring().starts[helper()] = 0;
    copies_wait();
    helpers_meet();
}

/* The helpers sort the bags of a task by length (counting sort). */
RF_INLINE void list_bags(const rf_fused_args &args, const rf_fused_task &task, bag_list &list) {
    constexpr int EACH = MOST_BAGS / HELPERS;
    int *starts = the_ring().starts;
    const int count = task.last_bag - task.first_bag;
    const bool bad_start = rf_bad_start(args, task.feature, task.first_bag);
    int bad = bad_start;
    rf_bag bags[EACH];
    int class_of[EACH], place[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int bag = helper() + k * HELPERS;
        bags[k] = {0, 0};
        if (bag >= count) continue;
        bags[k] = rf_bag_of(args, the_ring().offsets[bag], the_ring().offsets[bag + 1], bad);
        if (bad_start && bag == 0) bags[k] = {0, 0};
        class_of[k] = length_class(bags[k].end - bags[k].begin);
        place[k] = atomicAdd(&starts[class_of[k]], 1);
    }
    helpers_meet();
    if (helper() < 32) starts_from_counts((int4 *)starts);
    helpers_meet();
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int bag = helper() + k * HELPERS;
        if (bag >= count) continue;
        place[k] += starts[class_of[k]];
        list.bags[place[k]] = bags[k];
        list.numbers[place[k]] = (rf_u16)bag;
    }
    if (RF_CHECK && bad != 0) rf_report_bags(args, task.feature, task.first_bag, task.last_bag, 1);
    helpers_meet();
}

/* The state of the copies and of the ring. */
struct copier {
    rf_u32 head = 0, tail = 0; /* bytes copied and bytes released */
    rf_u32 place = 0; /* position of the head in the ring */
    rf_u32 ends[SLOTS]; /* ends of the tables, as values of `head` */
    int gone = 0; /* tables that all warps have released */

    RF_INLINE void free_oldest() {
        barrier_wait(&the_ring().empty[gone % SLOTS], gone / SLOTS & 1);
        tail = gone % SLOTS ? ends[1] : ends[0];
        gone++;
    }
    /* Copies a table from byte `done` on as far as the ring has room, or waits for room. Returns the end of
     * the copied bytes. */
    RF_INLINE rf_u32 copy(const rf_u8 *from, rf_u32 bytes, rf_u32 done, int turn, bool waits) {
        const rf_u32 taken = (bytes + LINE - 1) / LINE * LINE;
        ends[0] = turn % SLOTS ? ends[0] : head + taken - done;
        ends[1] = turn % SLOTS ? head + taken - done : ends[1];
        while (done < taken) {
            const rf_u32 piece = min(min(COPY, taken - done), RF_FUSED_STAGED_RING - place);
            while (head + piece - tail > RF_FUSED_STAGED_RING) {
                if (!waits) return done;
                free_oldest();
            }
            copy_bulk(the_ring().bytes + place, from + done, min(piece, bytes - done),
                      &the_ring().full[turn % SLOTS]);
            done += piece;
            head += piece;
            place = place + piece == RF_FUSED_STAGED_RING ? 0 : place + piece;
        }
        return done;
    }
};

/* The first helper publishes a task to the warps, after all have released the task before the previous
 * one. */
RF_INLINE void lay_out(const rf_fused_args &args, const rf_fused_task &task, int turn, copier &copies) {
    ring &to = the_ring();
    while (copies.gone <= turn - SLOTS) copies.free_oldest();
    /* No warp reaches turn + SLOTS before this turn is listed. */
    to.claims[(turn + SLOTS) % (2 * SLOTS)] = 0;
    if (task.feature < 0) {
        to.tasks[turn % SLOTS].feature = -1;
        return;
    }
    const rf_fused_descriptor &feature = args.features[task.feature];
    to.tasks[turn % SLOTS] = {task.feature,
                              task.first_bag,
                              task.last_bag,
                              task.schedule,
                              args.output + rf_load(&feature.output_offset),
                              rf_rows_of(feature),
                              (RF_INDEX)rf_load(&feature.padding_idx),
                              copies.place};
}

/* The helpers load the tables of the block's list and sort their bags. The first helper copies. */
RF_INLINE void load_tables(const rf_fused_args &args) {
    ring &to = the_ring();
    copier copies;
    for (int turn = 0;; turn++) {
        const rf_fused_task task = task_of(args, turn);
        if (task.feature < 0) {
            if (helper() == 0) lay_out(args, task, turn, copies);
            barrier_arrive(&to.listed[turn % SLOTS]);
            return;
        }
        const rf_fused_descriptor &feature = args.features[task.feature];
        const rf_u8 *from = rf_load(&feature.weight);
        const rf_u32 bytes = (rf_u32)rf_load(&feature.rows) * rf_load(&feature.pitch);
        rf_u32 done = 0;
        copy_offsets(args, task); /* first, because copies of tables keep the memory busy */
        if (helper() == 0) {
            lay_out(args, task, turn, copies);
            barrier_expect(&to.full[turn % SLOTS], bytes);
            done = copies.copy(from, bytes, 0, turn, false);
        }
        helpers_meet();
        list_bags(args, task, to.lists[turn % SLOTS]);
        barrier_arrive(&to.listed[turn % SLOTS]);
        if (helper() == 0) copies.copy(from, bytes, done, turn, true);
    }
}

#endif
