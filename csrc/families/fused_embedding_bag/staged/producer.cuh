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

/* Returns task `sequence` of the block's list; its feature is -1 at the end of the list. */
RF_INLINE rf_fused_task task_of(const rf_fused_args &args, int sequence) {
    int words[4] = {-1, 0, 0, 0};
    if (sequence < args.limit)
        rf_load_words(words, &args.tasks[(rf_i64)sequence * gridDim.x + blockIdx.x].feature);
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
    const int total = of.x + of.y + of.z + of.w;
    const int previous = rf_sum_of_lanes_to(total) - total;
    counts[threadIdx.x % 32] = {previous, previous + of.x, previous + of.x + of.y,
                                previous + of.x + of.y + of.z};
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
    constexpr int BAGS_A_HELPER = MOST_BAGS / HELPERS;
    int *starts = the_ring().starts;
    const int count = task.last_bag - task.first_bag;
    const bool bad_start = rf_bad_start(args, task.feature, task.first_bag);
    int bad = bad_start;
    rf_bag bags[BAGS_A_HELPER];
    int class_of[BAGS_A_HELPER], position[BAGS_A_HELPER];
#pragma unroll
    for (int k = 0; k < BAGS_A_HELPER; k++) {
        const int bag = helper() + k * HELPERS;
        bags[k] = {0, 0};
        if (bag >= count) continue;
        bags[k] = rf_bag_of(args, the_ring().offsets[bag], the_ring().offsets[bag + 1], bad);
        if (bad_start && bag == 0) bags[k] = {0, 0};
        class_of[k] = length_class(bags[k].end - bags[k].begin);
        position[k] = atomicAdd(&starts[class_of[k]], 1);
    }
    helpers_meet();
    if (helper() < 32) starts_from_counts((int4 *)starts);
    helpers_meet();
#pragma unroll
    for (int k = 0; k < BAGS_A_HELPER; k++) {
        const int bag = helper() + k * HELPERS;
        if (bag >= count) continue;
        position[k] += starts[class_of[k]];
        list.bags[position[k]] = bags[k];
        list.numbers[position[k]] = (rf_u16)bag;
    }
    if (RF_CHECK && bad != 0) rf_report_bags(args, task.feature, task.first_bag, task.last_bag, 1);
    helpers_meet();
}

/* The state of the copies and of the ring. */
struct copier {
    rf_u32 head = 0, tail = 0; /* bytes copied and bytes released */
    rf_u32 position = 0; /* position of the head in the ring */
    rf_u32 table_ends[SLOTS]; /* ends of the tables, as values of `head` */
    int n_released = 0; /* tables that all warps have released */

    RF_INLINE void free_oldest() {
        barrier_wait(&the_ring().empty[n_released % SLOTS], n_released / SLOTS & 1);
        tail = n_released % SLOTS ? table_ends[1] : table_ends[0];
        n_released++;
    }
    /* Copies a table from byte `copied` on as far as the ring has room, or waits for room. Returns the end of
     * the copied bytes. */
    RF_INLINE rf_u32 copy(const rf_u8 *from, rf_u32 bytes, rf_u32 copied, int sequence, bool waits) {
        const rf_u32 padded_bytes = (bytes + LINE - 1) / LINE * LINE;
        table_ends[0] = sequence % SLOTS ? table_ends[0] : head + padded_bytes - copied;
        table_ends[1] = sequence % SLOTS ? head + padded_bytes - copied : table_ends[1];
        while (copied < padded_bytes) {
            const rf_u32 chunk = min(min(COPY, padded_bytes - copied), RF_FUSED_STAGED_RING - position);
            while (head + chunk - tail > RF_FUSED_STAGED_RING) {
                if (!waits) return copied;
                free_oldest();
            }
            copy_bulk(the_ring().bytes + position, from + copied, min(chunk, bytes - copied),
                      &the_ring().full[sequence % SLOTS]);
            copied += chunk;
            head += chunk;
            position = position + chunk == RF_FUSED_STAGED_RING ? 0 : position + chunk;
        }
        return copied;
    }
};

/* The first helper publishes a task to the warps, after all have released the task before the previous
 * one. */
RF_INLINE void table_begin(const rf_fused_args &args, const rf_fused_task &task, int sequence,
                           copier &copies) {
    ring &to = the_ring();
    while (copies.n_released <= sequence - SLOTS) copies.free_oldest();
    /* No warp reaches turn + SLOTS before this turn is listed. */
    to.claims[(sequence + SLOTS) % (2 * SLOTS)] = 0;
    if (task.feature < 0) {
        to.tasks[sequence % SLOTS].feature = -1;
        return;
    }
    const rf_fused_descriptor &feature = args.features[task.feature];
    to.tasks[sequence % SLOTS] = {task.feature,
                                  task.first_bag,
                                  task.last_bag,
                                  task.schedule,
                                  args.output + rf_load(&feature.output_offset),
                                  rf_rows_of(feature),
                                  (RF_INDEX)rf_load(&feature.padding_idx),
                                  copies.position};
}

/* The helpers load the tables of the block's list and sort their bags. The first helper copies. */
RF_INLINE void load_tables(const rf_fused_args &args) {
    ring &to = the_ring();
    copier copies;
    for (int sequence = 0;; sequence++) {
        const rf_fused_task task = task_of(args, sequence);
        if (task.feature < 0) {
            if (helper() == 0) table_begin(args, task, sequence, copies);
            barrier_arrive(&to.bags_listed[sequence % SLOTS]);
            return;
        }
        const rf_fused_descriptor &feature = args.features[task.feature];
        const rf_u8 *from = rf_load(&feature.weight);
        const rf_u32 bytes = (rf_u32)rf_load(&feature.rows) * rf_load(&feature.pitch);
        rf_u32 copied = 0;
        copy_offsets(args, task); /* first, because copies of tables keep the memory busy */
        if (helper() == 0) {
            table_begin(args, task, sequence, copies);
            barrier_expect(&to.full[sequence % SLOTS], bytes);
            copied = copies.copy(from, bytes, 0, sequence, false);
        }
        helpers_meet();
        list_bags(args, task, to.lists[sequence % SLOTS]);
        barrier_arrive(&to.bags_listed[sequence % SLOTS]);
        if (helper() == 0) copies.copy(from, bytes, copied, sequence, true);
    }
}

#endif
