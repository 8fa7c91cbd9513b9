/* Fused embedding bag, schedule "staged": tables of narrow rows are copied to shared memory and pooled from there.
 *
 * A row of 32 bytes costs L2 as much as one of 128: what limits such tables is the number of rows, not of bytes. Where
 * a batch reads a table's rows more than once, it is cheaper to copy the table as a whole and to read rows on chip.
 *
 * Who does what. One block an SM, for as long as there are tasks: a task is all bags of one feature, and each block has
 * its own list of them (csrc/cuda/fused_staged.c), about equally long. A warp of its own copies the tables of the list
 * one after another into a ring of RF_RING bytes, by the bulk copy engine, as far ahead as there is room; a table may
 * lie across the ring's end. RF_BLOCK threads pool, as by the schedule "pool" (fused_pool.cuh) in all but where rows come
 * from: a table's first ids are loaded before the table is there. When all warps have left a table its room is free.
 *
 * The kernel of the other features runs beside this one, on what registers and shared memory are left (RF_BESIDE).
 *
 * Launch: grid [lists], block [RF_BLOCK + 32], dynamic shared memory: the ring, and 128 bytes. Compute capability 9.0.
 */
#include "fused_pool.cuh"

#ifndef RF_SCHEDULES
#define RF_SCHEDULES(X) X(0, 2, 0, 16, 16, 2, 1, 1, 0, 0, 16, 8, 2, 1)
#endif
#ifndef RF_RING
#define RF_RING 204800
#endif

constexpr int SLOTS = 4; /* tables that are in the ring at once, or on their way */
constexpr rf_u32 COPY = 16384; /* bytes of one copy */
constexpr int WARPS = RF_BLOCK / 32;

struct ring {
    rf_u8 bytes[RF_RING];
    rf_u64 full[SLOTS], empty[SLOTS];
    rf_u32 base[SLOTS]; /* where a table begins */
};

extern __shared__ __align__(128) rf_u8 shared[];

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

/* A copy that tells `barrier` of its end; addresses and bytes are multiples of 16. */
RF_INLINE void copy_bulk(void *to, const rf_u8 *from, rf_u32 bytes, rf_u64 *barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            address_of(to)),
        "l"(from), "r"(bytes), "r"(address_of(barrier))
        : "memory");
}

RF_INLINE rf_bytes<4> load_shared(rf_u32 from, const rf_bytes<4> &) {
    rf_bytes<4> to;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to.word[0]) : "r"(from));
    return to;
}
RF_INLINE rf_bytes<8> load_shared(rf_u32 from, const rf_bytes<8> &) {
    rf_bytes<8> to;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to.word[0]), "=r"(to.word[1]) : "r"(from));
    return to;
}
RF_INLINE rf_bytes<16> load_shared(rf_u32 from, const rf_bytes<16> &) {
    rf_bytes<16> to;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.word[0]), "=r"(to.word[1]), "=r"(to.word[2]), "=r"(to.word[3])
                 : "r"(from));
    return to;
}

/* Table number `turn` of the block's list, in the ring. */
struct from_ring {
    int turn;
    rf_u32 base;

    RF_INLINE void wait() {
        barrier_wait(&the_ring().full[turn % SLOTS], turn / SLOTS & 1);
        base = the_ring().base[turn % SLOTS];
    }
    template <class S> RF_INLINE typename S::vector load(const rf_pool_place<S> &my, RF_INDEX id, int) const {
        const rf_u32 at = base + (rf_u32)id * (S::LANES * S::ALIGN) + rf_thread_column<S>() * S::ALIGN;
        const rf_u32 in_ring =
            min(at, at - RF_RING); /* unsigned: one that has not come round is the larger */
        return load_shared(address_of(the_ring().bytes) + in_ring, typename S::vector());
    }
};

template <int KIND, int DTYPE, int ALIGN, int STORE, int LANES, int VECTORS, int WHOLE, int POOLING,
          int PADDED, int THREADS, int DISTANCE, int STATION, int SPLIT>
RF_INLINE void run(const rf_fused_arguments &my, const rf_task &task, int turn) {
    typedef rf_fused_shape<DTYPE, ALIGN, STORE, LANES, VECTORS, WHOLE, POOLING, PADDED, THREADS, DISTANCE,
                           STATION, SPLIT>
        shape;
    from_ring source = {turn, 0};
    if (rf_can_pool<shape>(my, task)) {
        rf_pool<shape>(my, task, source, nullptr);
    } else {
        source.wait();
    }
}

/* The end of a list, or what no list may have. */
RF_INLINE bool is_end(const rf_fused_arguments &my, const rf_task &task) {
    if (task.feature < 0 || !rf_is_feature(my, task.feature)) return true;
    const rf_feature &feature = my.features[task.feature];
    return RF_FOREIGN && rf_load(&feature.rows) > RF_RING / (rf_i64)rf_load(&feature.pitch);
}

/* One thread: copies the tables of the list. `head` and `tail` count bytes that have come and gone. */
RF_INLINE void copy_tables(const rf_fused_arguments &my) {
    ring &to = the_ring();
    rf_u32 head = 0, tail = 0, place = 0; /* `place` of the head in the ring */
    int gone = 0;
    rf_u32 sizes[SLOTS];
    for (int turn = 0; turn < my.limit; turn++) {
        const rf_task task = rf_load_task<-1>(my.tasks + (rf_i64)turn * gridDim.x + blockIdx.x);
        if (is_end(my, task)) return;
        const rf_feature &feature = my.features[task.feature];
        const rf_u8 *from = rf_load(&feature.weight);
        const rf_u32 bytes = (rf_u32)rf_load(&feature.rows) * rf_load(&feature.pitch);
        const auto free_oldest = [&]() {
            barrier_wait(&to.empty[gone % SLOTS], gone / SLOTS & 1);
#pragma unroll
            for (int i = 0; i < SLOTS; i++) tail += i == gone % SLOTS ? sizes[i] : 0;
            gone++;
        };
        while (gone <= turn - SLOTS) free_oldest();
        to.base[turn % SLOTS] = place;
#pragma unroll
        for (int i = 0; i < SLOTS; i++) sizes[i] = i == turn % SLOTS ? bytes : sizes[i];
        barrier_expect(&to.full[turn % SLOTS], bytes);
        for (rf_u32 done = 0; done < bytes;) {
            const rf_u32 piece = min(min(COPY, bytes - done), RF_RING - place);
            while (head + piece - tail > RF_RING) free_oldest();
            copy_bulk(to.bytes + place, from + done, piece, &to.full[turn % SLOTS]);
            done += piece;
            head += piece;
            place = place + piece == RF_RING ? 0 : place + piece;
        }
    }
}

RF_INLINE void pool_tables(const rf_fused_arguments &my) {
    for (int turn = 0; turn < my.limit; turn++) {
        const rf_task *at = my.tasks + (rf_i64)turn * gridDim.x + blockIdx.x;
        rf_task task = rf_load_task<-1>(at);
        if (is_end(my, task)) return;
        task.last_bag = min(task.last_bag, my.bags);
        switch (task.schedule) {
#define RF_CASE(number, ...)              \
    case number:                          \
        run<__VA_ARGS__>(my, task, turn); \
        break;
            RF_SCHEDULES(RF_CASE)
#undef RF_CASE
        default:
            from_ring{turn, 0}.wait();
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(&the_ring().empty[turn % SLOTS]);
    }
}

extern "C" __global__ void __launch_bounds__(RF_BLOCK + 32, 1)
    rf_fused_staged(const __grid_constant__ rf_fused_arguments my) {
    rf_wait_for_previous_kernel();
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            barrier_new(&the_ring().full[i], 1);
            barrier_new(&the_ring().empty[i], WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < RF_BLOCK) {
        pool_tables(my);
    } else if (threadIdx.x == RF_BLOCK) {
        copy_tables(my);
    }
}
