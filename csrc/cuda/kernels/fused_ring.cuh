/* The ring of tables of the schedule "staged" (fused_staged.cu): what one warp brings for the others to pool.
 *
 * A table lies in the ring from where the one before it ended, and may lie across the ring's end. Its turn is its
 * place in the block's list of tasks; there are two at a time, one that is pooled and one that comes. Beside it is the
 * list of its bags, by length, the longest first: bags that warps pool together are then about equally long, and the
 * short ones fill up the end. Three barriers of each turn are waited for: `listed` and `full`, list and table are
 * there; `empty`, all warps have left them.
 */
#ifndef RECFUSE_FUSED_RING_CUH
#define RECFUSE_FUSED_RING_CUH

#include "fused.cuh"

#ifndef RF_RING
#define RF_RING 210944
#endif

constexpr int SLOTS = 2; /* tables that are in the ring at once, or on their way */
constexpr rf_u32 COPY = 16384; /* bytes of one copy */
constexpr rf_u32 LINE =
    128; /* a table begins at a multiple of it, so that no row lies across the ring's end */
constexpr rf_u32 WORD = 16; /* of copies */
constexpr int WARPS = RF_BLOCK / 32; /* that pool */
constexpr int HELPERS = 128; /* threads that bring tables to them */
constexpr int MOST_BAGS = 512; /* of a task; as in csrc/cuda/fused.h */
constexpr int LENGTHS = 128; /* classes of length: eight an octave, from 1 to 65,535 */

/* A task's bags, the longest first. */
struct bag_list {
    rf_bag bags[MOST_BAGS];
    rf_u16 numbers[MOST_BAGS]; /* counted from the task's first */
};

/* A task in the ring, as warps need it. */
struct staged_task {
    int feature; /* -1: the list has ended */
    int first_bag, last_bag, schedule;
    rf_u8 *output; /* of the feature's first column, for bag 0 */
    rf_rows rows;
    RF_INDEX padding;
    rf_u32 base; /* where the table begins in the ring */
};

struct ring {
    rf_u8 bytes[RF_RING];
    rf_u8 zeros[LINE]; /* the row of lookups that have none */
    bag_list lists[SLOTS];
    int starts[LENGTHS]; /* in the list that is made, of the classes of length */
    RF_OFFSET offsets[MOST_BAGS + 2]; /* of its bags */
    rf_u64 listed[SLOTS], full[SLOTS], empty[SLOTS];
    staged_task tasks[SLOTS];
    int claims[2 *
               SLOTS]; /* of bags of a table; of twice as many turns as there are slots: see bring_tables */
};
static_assert(sizeof(ring) <= RF_RING + 15360, "as in csrc/cuda/fused.h");
static_assert(LENGTHS == HELPERS && MOST_BAGS % HELPERS == 0, "each helper has as much to do");
static_assert(RF_RING % LINE == 0, "so that rows lie in one piece");
static_assert(sizeof(RF_POSITION) == 4, "calls with more lookups have no tables staged");

extern __shared__ __align__(1024) rf_u8 shared[];

RF_INLINE int helper() { return threadIdx.x - RF_BLOCK; }
RF_INLINE ring &the_ring() { return *(ring *)shared; }
RF_INLINE rf_u32 address_of(const void *in_shared) { return (rf_u32)__cvta_generic_to_shared(in_shared); }

RF_INLINE void barrier_new(rf_u64 *barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_of(barrier)), "r"(arrivals)
                 : "memory");
}
RF_INLINE void barrier_arrive(rf_u64 *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address_of(barrier)) : "memory");
}
RF_INLINE void barrier_expect(rf_u64 *barrier, rf_u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_of(barrier)),
                 "r"(bytes)
                 : "memory");
}
RF_INLINE void barrier_wait(rf_u64 *barrier, rf_u32 parity) {
    rf_u32 done = 0;
    while (!done) {
        asm volatile("{\n\t.reg .pred finished;\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 finished, [%1], %2, 100000;\n\t"
                     "selp.u32 %0, 1, 0, finished;\n\t}"
                     : "=r"(done)
                     : "r"(address_of(barrier)), "r"(parity)
                     : "memory");
    }
}

/* A copy that tells `barrier` of its end; addresses and bytes are multiples of WORD. */
RF_INLINE void copy_bulk(void *to, const rf_u8 *from, rf_u32 bytes, rf_u64 *barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            address_of(to)),
        "l"(from), "r"(bytes), "r"(address_of(barrier))
        : "memory");
}

/* A copy of one element, of 4 or 8 bytes; copies_wait waits for all of this thread. */
template <class T> RF_INLINE void copy_element(T *to, const T *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address_of(to)), "l"(from), "n"(sizeof(T))
                 : "memory");
}
RF_INLINE void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/* Brings the words that bytes [from, end) lie in to L2. */
RF_INLINE void prefetch_bulk(const void *from, const void *end) {
    rf_u64 at = (rf_u64)from / WORD * WORD;
    const rf_u64 last = ((rf_u64)end + WORD - 1) / WORD * WORD;
    while (at < last) {
        const rf_u32 piece = (rf_u32)min((rf_u64)COPY, last - at);
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(piece) : "memory");
        at += piece;
    }
}

/* Number `turn` of the block's list; feature -1 where the list has ended. */
RF_INLINE rf_task task_of(const rf_fused_arguments &my, int turn) {
    int words[4] = {-1, 0, 0, 0};
    if (turn < my.limit) rf_load_words(words, &my.tasks[(rf_i64)turn * gridDim.x + blockIdx.x].feature);
    rf_task task = {words[0], words[1], min(words[2], my.bags), words[3]};
    if (task.feature < 0 || !rf_is_feature(my, task.feature)) task.feature = -1;
    if (RF_FOREIGN && task.feature >= 0) {
        const rf_feature &feature = my.features[task.feature];
        const rf_i64 rows = rf_load(&feature.rows);
        const rf_u64 bytes = (rf_u64)rows * rf_load(&feature.pitch);
        const bool can = rows <= RF_RING && bytes <= RF_RING && bytes % WORD == 0 &&
                         (rf_u64)rf_load(&feature.weight) % WORD == 0 && task.first_bag >= 0 &&
                         task.first_bag < task.last_bag && task.last_bag - task.first_bag <= MOST_BAGS;
        if (!can) task.feature = -1;
    }
    return task;
}

/* The lookups of a task are what its warps wait for next. */
RF_INLINE void prefetch_lookups(const rf_fused_arguments &my, const rf_task &task) {
    const RF_OFFSET *offsets = my.offsets + (rf_i64)task.feature * my.bags;
    if (task.first_bag >= task.last_bag) return; /* of a mapping for some bags more */
    const RF_OFFSET begin = rf_load(offsets + task.first_bag), end = rf_load(offsets + task.last_bag);
    if (begin < 0 || begin > end || end > my.end - my.lead) return;
    prefetch_bulk(my.indices + my.lead + begin, my.indices + my.lead + end);
}

/* The place of a length among the classes, the longest first: its exponent, and three bits behind the first. */
RF_INLINE int length_class(int length) {
    const int code = (__float_as_int((float)length) >> 20) - (127 << 3) + 1; /* of 1: 1 */
    return LENGTHS - 1 - min(max(code, 0), LENGTHS - 1);
}

/* All helpers have come here. */
RF_INLINE void helpers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(HELPERS) : "memory"); }

/* A warp: counts of classes become places where they start. */
RF_INLINE void starts_from_counts(int4 *counts) {
    const int4 of = counts[threadIdx.x % 32];
    const int all = of.x + of.y + of.z + of.w;
    int sum = all;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const int lower = __shfl_up_sync(RF_FULL_WARP, sum, apart);
        if ((int)threadIdx.x % 32 >= apart) sum += lower;
    }
    const int before = sum - all;
    counts[threadIdx.x % 32] = {before, before + of.x, before + of.x + of.y, before + of.x + of.y + of.z};
}

/* The helpers: ask for the offsets of a task, and wait for them. */
RF_INLINE void copy_offsets(const rf_fused_arguments &my, const rf_task &task) {
    const int count = task.last_bag - task.first_bag;
    const RF_OFFSET *offsets = my.offsets + (rf_i64)task.feature * my.bags + task.first_bag;
    for (int i = helper(); i <= count; i += HELPERS) copy_element(&the_ring().offsets[i], offsets + i);
    the_ring().starts[helper()] = 0;
    copies_wait();
    helpers_meet();
}

/* The helpers: list the bags of a task, by counting how many there are of each class. */
RF_INLINE void list_bags(const rf_fused_arguments &my, const rf_task &task, bag_list &list) {
    constexpr int EACH = MOST_BAGS / HELPERS;
    int *starts = the_ring().starts;
    const int count = task.last_bag - task.first_bag;
    const bool bad_start = rf_bad_start(my, task.feature, task.first_bag);
    bool bad = bad_start;
    rf_bag bags[EACH];
    int class_of[EACH], place[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int bag = helper() + k * HELPERS;
        bags[k] = {0, 0};
        if (bag >= count) continue;
        const RF_OFFSET begin = the_ring().offsets[bag], end = the_ring().offsets[bag + 1];
        if ((!RF_CHECK || rf_good_bag(my, begin, end)) && !(bad_start && bag == 0)) {
            bags[k] = {(RF_POSITION)begin + my.lead, (RF_POSITION)end + my.lead};
        } else {
            bad = true;
        }
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
    if (RF_CHECK && bad) rf_report_bags(my, task.feature, task.first_bag, task.last_bag, 1);
    helpers_meet();
}

/* What is being copied, and how much of the ring is taken. */
struct copier {
    rf_u32 head = 0, tail = 0; /* bytes that have come and gone */
    rf_u32 place = 0; /* of the head in the ring */
    rf_u32 ends[SLOTS]; /* of tables, as `head` counts */
    int gone = 0; /* tables that all warps have left */

    RF_INLINE void free_oldest() {
        barrier_wait(&the_ring().empty[gone % SLOTS], gone / SLOTS & 1);
        tail = gone % SLOTS ? ends[1] : ends[0];
        gone++;
    }
    /* Copies from byte `done` of a table on, as far as there is room, or waits for it. Returns how far it came. */
    RF_INLINE rf_u32 copy(const rf_u8 *from, rf_u32 bytes, rf_u32 done, int turn, bool waits) {
        const rf_u32 taken = (bytes + LINE - 1) / LINE * LINE;
        ends[0] = turn % SLOTS ? ends[0] : head + taken - done;
        ends[1] = turn % SLOTS ? head + taken - done : ends[1];
        while (done < taken) {
            const rf_u32 piece = min(min(COPY, taken - done), RF_RING - place);
            while (head + piece - tail > RF_RING) {
                if (!waits) return done;
                free_oldest();
            }
            copy_bulk(the_ring().bytes + place, from + done, min(piece, bytes - done),
                      &the_ring().full[turn % SLOTS]);
            done += piece;
            head += piece;
            place = place + piece == RF_RING ? 0 : place + piece;
        }
        return done;
    }
};

/* The first helper: lays a task out for warps, where all have left the one before the last. */
RF_INLINE void lay_out(const rf_fused_arguments &my, const rf_task &task, int turn, copier &copies) {
    ring &to = the_ring();
    while (copies.gone <= turn - SLOTS) copies.free_oldest();
    /* None comes to turn + SLOTS before this one is listed. */
    to.claims[(turn + SLOTS) % (2 * SLOTS)] = 0;
    if (task.feature < 0) {
        to.tasks[turn % SLOTS].feature = -1;
        return;
    }
    const rf_feature &feature = my.features[task.feature];
    to.tasks[turn % SLOTS] = {task.feature,
                              task.first_bag,
                              task.last_bag,
                              task.schedule,
                              my.output + rf_load(&feature.output_offset),
                              rf_rows_of(feature),
                              (RF_INDEX)rf_load(&feature.padding_idx),
                              copies.place};
}

/* The helpers: bring the tables of the block's list, and list their bags. The first of them copies. */
RF_INLINE void bring_tables(const rf_fused_arguments &my) {
    ring &to = the_ring();
    copier copies;
    for (int turn = 0;; turn++) {
        const rf_task task = task_of(my, turn);
        if (task.feature < 0) {
            if (helper() > 0) return;
            lay_out(my, task, turn, copies);
            barrier_arrive(&to.listed[turn % SLOTS]);
            return;
        }
        const rf_feature &feature = my.features[task.feature];
        const rf_u8 *from = rf_load(&feature.weight);
        const rf_u32 bytes = (rf_u32)rf_load(&feature.rows) * rf_load(&feature.pitch);
        rf_u32 done = 0;
        copy_offsets(my, task); /* the first thing, since copies of tables keep memory busy */
        if (helper() == 0) {
            lay_out(my, task, turn, copies);
            barrier_expect(&to.full[turn % SLOTS], bytes);
            done = copies.copy(from, bytes, 0, turn, false);
        }
        helpers_meet();
        list_bags(my, task, to.lists[turn % SLOTS]);
        if (helper() > 0) continue;
        barrier_arrive(&to.listed[turn % SLOTS]);
        prefetch_lookups(my, task);
        prefetch_bulk(from + done, from + bytes);
        copies.copy(from, bytes, done, turn, true);
    }
}

RF_INLINE void ring_new() {
    ring &made = the_ring();
    if (threadIdx.x < LINE / 4) ((int *)made.zeros)[threadIdx.x] = 0;
    if (threadIdx.x < 2 * SLOTS) made.claims[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            barrier_new(&made.listed[i], 1);
            barrier_new(&made.full[i], 1);
            barrier_new(&made.empty[i], WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
}

#endif
