/* Schedule "pool" of the fused embedding bag: groups of lanes pool the bags of one feature.
 *
 * Thread mapping. THREADS threads share a bag. LANES of them read a row, VECTORS vectors of ALIGN bytes each;
 * so SLOTS = THREADS / LANES rows of the bag are read at once, and a warp has 32 / THREADS bags if THREADS is
 * less than a warp. A slot has DISTANCE rows in flight and loads BATCH indices at a time (indices.cuh), CHUNK
 * consecutive indices by each load. The indices of the next rows, or of the next bag, are loaded while rows
 * are in flight, and offsets one bag earlier. A warp continues until the longest of its bags is done.
 *
 * The sums of slots are reduced by shuffles in which each lane keeps half of its elements, down to one
 * element: a butterfly of whole vectors takes up to four times as many. The sums of warps and blocks that
 * share a bag are added in the order of their numbers: results are bit-identical from run to run.
 *
 * A maximum is taken by one slot in the order of the lookups: torch's rule for NaN depends on it.
 */
#ifndef RECFUSE_FUSED_POOL_CUH
#define RECFUSE_FUSED_POOL_CUH

#include "families/fused_embedding_bag/pool/indices.cuh"

template <int DTYPE, int ALIGN_, int STORE_, int LANES_, int VECTORS_, int WHOLE_, int POOLING_, int PADDED_,
          int THREADS_, int DISTANCE_, int SPLIT_>
struct rf_fused_shape {
    typedef rf_element<DTYPE> element;
    typedef rf_bytes<ALIGN_> vector;
    static constexpr int ALIGN = ALIGN_, STORE = STORE_, LANES = LANES_, VECTORS = VECTORS_;
    static constexpr int POOLING = POOLING_, PADDED = PADDED_, DISTANCE = DISTANCE_;
    static constexpr bool SPLIT = SPLIT_ > 1; /* blocks share bags */
    static constexpr bool WHOLE = WHOLE_; /* LANES lanes read the whole row at once */
    static constexpr bool QUANTIZED = rf_is_quantized(DTYPE); /* codes, with a scale and a bias a row */
    static constexpr int ELEMENTS = ALIGN_ * 8 / element::BITS; /* per vector */
    static constexpr int GROUP = THREADS_ < 32 ? THREADS_ : 32; /* lanes of a warp that share a bag */
    static constexpr int WARPS = THREADS_ / GROUP;              /* warps that share a bag */
    static constexpr int SLOTS = GROUP / LANES_;                /* slots of a bag in a warp */
    static constexpr int BATCH = rf_fused_indices_at_once(DISTANCE_); /* indices that a slot loads at once */
    static constexpr int CHUNK = LANES_ < BATCH ? LANES_ : BATCH; /* consecutive indices of a load */
    static constexpr int LOADS = BATCH / CHUNK;
    static constexpr int APART = CHUNK * SLOTS; /* lookups between two loads */
    static constexpr int STRIDE = BATCH * SLOTS * WARPS; /* lookups between two batches */
    static constexpr int SHAPE =
        rf_fused_shape_code(DTYPE, ALIGN_, STORE_, LANES_, VECTORS_, WHOLE_, POOLING_, PADDED_);
    static constexpr int KEPT =
        ELEMENTS > SLOTS ? ELEMENTS / SLOTS : 1; /* elements of a sum that a lane keeps */
    /* Returns the index of a chunk that this lane loads; surplus lanes load an index again. */
    static RF_INLINE int index_of_lane() { return threadIdx.x % LANES % CHUNK; }
};

/* Adds the sums of the slots. This lane keeps S::KEPT elements of the result, from element `first` on. */
template <class S, int N, int APART> RF_INLINE void rf_merge_slots(float *sum, int &first) {
    if constexpr (APART < S::GROUP) {
        if constexpr (N > 1) {
            const bool upper = threadIdx.x & APART;
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                const float kept = upper ? sum[i + N / 2] : sum[i], given = upper ? sum[i] : sum[i + N / 2];
                sum[i] = kept + __shfl_xor_sync(RF_FULL_WARP, given, APART);
            }
            first += upper ? N / 2 : 0;
            rf_merge_slots<S, N / 2, 2 * APART>(sum, first);
        } else {
            sum[0] += __shfl_xor_sync(RF_FULL_WARP, sum[0], APART);
            rf_merge_slots<S, 1, 2 * APART>(sum, first);
        }
    }
}

/* Sums a value over the lanes of a warp that share a bag. */
template <class S> RF_INLINE int rf_sum_of_group(int value) {
#pragma unroll
    for (int apart = 1; apart < S::GROUP; apart *= 2) value += __shfl_xor_sync(RF_FULL_WARP, value, apart);
    return value;
}

/* The partial result of a lane for a bag. */
template <class S> struct rf_pooled {
    float sum[S::VECTORS * S::ELEMENTS];
    int counted; /* lookups that are valid and not padding */
    bool any; /* a row was added, for a maximum */
    float bias; /* of quantised rows: the sum of their biases, each once, in all lanes of the slot */
};

/* The rows in flight of a lane. */
template <class S> struct rf_flight {
    typename S::vector row[S::DISTANCE][S::VECTORS];
    bool there[S::DISTANCE];
    rf_bytes<4> parameters[S::QUANTIZED ? S::DISTANCE : 1]; /* halves: scale, bias */
};

/* The feature of a thread, and its position in the bag's group of threads. */
template <class S> struct rf_pool_place {
    const rf_u8 *table; /* this lane's first vector of row 0 */
    rf_rows rows;
    rf_u32 given_pitch;
    RF_INDEX padding = 0;
    rf_u8 *output; /* this lane's first vector of the output of bag 0 */
    int second; /* bytes from a lane's first vector to its second */
    const rf_u8 *of_parameters; /* of a quantised table: scale and bias of row 0 */
    rf_u32 parameters_pitch;

    RF_INLINE rf_pool_place(const rf_fused_args &args, const rf_fused_task &task) {
        const rf_fused_descriptor &feature = args.features[task.feature];
        const int column = column_of(task);
        table = rf_load(&feature.weight);
        rows = rf_rows_of(feature);
        output = args.output + rf_load(&feature.output_offset) +
                 (rf_i64)column * S::ELEMENTS * rf_element<RF_OUTPUT>::BYTES;
        if (S::WHOLE) {
            table += (rf_i64)column * S::ALIGN;
        } else {
            /* Lanes past the end of a narrow row read its last vector; their results are dropped. */
            const int last = rf_load(&feature.columns) - 1;
            table += (rf_i64)min(column, last) * S::ALIGN;
            second = (min(column + S::LANES, last) - min(column, last)) * S::ALIGN;
            given_pitch = rf_load(&feature.pitch);
        }
        if (S::PADDED) padding = (RF_INDEX)rf_load(&feature.padding_idx);
        if (S::QUANTIZED) {
            of_parameters = rf_load(&feature.parameters);
            parameters_pitch = rf_load(&feature.parameters_pitch);
        }
        /* One base address, to which one instruction adds the offset of a row. */
        asm volatile("" : "+l"(table));
    }
    RF_INLINE rf_u32 pitch() const { return S::WHOLE ? S::LANES * S::ALIGN : given_pitch; }
    /* Returns vector `i` of this lane in a row. */
    RF_INLINE typename S::vector row(rf_row_number number, int i) const {
        return rf_load((const typename S::vector *)(rf_row(table, number, pitch()) + i * second));
    }
    /* Returns the scale and the bias of a row. */
    RF_INLINE rf_bytes<4> parameters(rf_row_number number) const {
        return rf_load((const rf_bytes<4> *)rf_row(of_parameters, number, parameters_pitch));
    }
    static RF_INLINE int slot() { return threadIdx.x % S::GROUP / S::LANES; }
    /* Returns the lane's first vector of a row. */
    static RF_INLINE int column_of(const rf_fused_task &task) {
        return (S::WHOLE ? 0 : task.slice * S::LANES * S::VECTORS) + threadIdx.x % S::LANES;
    }
};

/* Loads the rows of a round. */
template <class S>
RF_INLINE void rf_fetch(const rf_pool_place<S> &from, int round, const rf_four_rows (&numbers)[S::BATCH / 4],
                        rf_flight<S> &flight) {
#pragma unroll
    for (int k = 0; k < S::DISTANCE; k++) {
        const int place = round * S::DISTANCE + k;
        const rf_row_number number = numbers[place / 4].number[place % 4];
        flight.there[k] = number != RF_NO_ROW;
        if (S::QUANTIZED) {
            flight.parameters[k] = {};
            if (flight.there[k]) flight.parameters[k] = from.parameters(number);
        }
#pragma unroll
        for (int i = 0; i < S::VECTORS; i++) {
            flight.row[k][i] = {};
            if (flight.there[k]) flight.row[k][i] = from.row(number, i);
        }
    }
}

/* Adds the rows that rf_fetch loaded; missing rows are zeros. `position`: the slot's first lookup. */
template <class S>
RF_INLINE void rf_add_flight(const float *sample_weights, RF_POSITION position, int round,
                             const rf_flight<S> &flight, rf_pooled<S> &to) {
#pragma unroll
    for (int k = 0; k < S::DISTANCE; k++) {
        const int place = round * S::DISTANCE + k;
        const RF_POSITION at = position + place / S::CHUNK * S::APART + place % S::CHUNK;
        const bool there = flight.there[k];
        float scale = RF_WEIGHTED && there ? rf_load(sample_weights + at) : 0.0f, bias = 0.0f;
        if (S::QUANTIZED) {
            const rf_element<RF_FLOAT16> half;
            const float of_row = half.get(flight.parameters[k], 0);
            bias = half.get(flight.parameters[k], 1) * (RF_WEIGHTED ? scale : 1.0f);
            scale = of_row * (RF_WEIGHTED ? scale : 1.0f);
            to.bias += bias;
        }
#pragma unroll
        for (int i = 0; i < S::VECTORS; i++) {
#pragma unroll
            for (int e = 0; e < S::ELEMENTS; e++) {
                float &sum = to.sum[i * S::ELEMENTS + e];
                float value = S::element::get(flight.row[k][i], e);
                if (S::POOLING == RF_MAX) {
                    if (S::QUANTIZED) value = fmaf(scale, value, bias);
                    if (there && (!to.any || value > sum)) sum = value;
                } else if (RF_WEIGHTED || S::QUANTIZED) {
                    sum = fmaf(scale, value, sum);
                } else {
                    sum += value;
                }
            }
        }
        if (S::POOLING == RF_MAX) to.any |= there;
    }
}

/* Returns this block's part of a bag. */
template <class S>
RF_INLINE rf_bag rf_load_part(const rf_fused_args &args, const rf_fused_task &task, const RF_OFFSET *offsets,
                              int bag, int &bad) {
    const rf_bag whole = rf_load_bag(args, offsets, bag, task.last_bag, bad);
    if (!S::SPLIT) return whole;
    const int parts = rf_fused_shares(task.share);
    const RF_POSITION share = (whole.end - whole.begin + parts - 1) / parts;
    const RF_POSITION begin = min(whole.begin + (rf_fused_share_of(task.share)) * share, whole.end);
    return {begin, min(begin + share, whole.end)};
}

/* Returns a sum or its mean. */
template <class S> RF_INLINE float rf_pooled_value(float sum, rf_i64 count) {
    return S::POOLING == RF_MEAN && count > 1 ? rf_divide(sum, (float)count) : sum;
}

/* The sums of blocks that share bags: [parts][bags][LANES * VECTORS * ELEMENTS + 1] floats. The last is the
 * number of lookups counted. */
template <class S> struct rf_shared_bags {
    static constexpr int WIDTH = S::LANES * S::VECTORS * S::ELEMENTS;
    float *sums;
    int bags;

    RF_INLINE rf_shared_bags(const rf_fused_args &args, const rf_fused_task &task)
        : sums(args.partials + (rf_i64)task.partials * 32), bags(task.last_bag - task.first_bag) {}
    RF_INLINE float *of(int part, int bag) const { return sums + ((rf_i64)part * bags + bag) * (WIDTH + 1); }
};

/* Finishes a bag: reduces the sums of slots and warps; one lane per range of elements stores it, or writes it
 * for the reduction over blocks. */
template <class S>
RF_INLINE void rf_finish_bag(const rf_fused_args &args, const rf_fused_task &task, const RF_OFFSET *offsets,
                             int bag, const rf_pool_place<S> &place, rf_pooled<S> &pooled, float *left) {
    constexpr int FLOATS = S::VECTORS * S::ELEMENTS, PIECES = S::ELEMENTS / S::KEPT;
    int first = 0;
    rf_i64 count = 0;
    if (S::QUANTIZED && S::POOLING != RF_MAX) {
#pragma unroll
        for (int i = 0; i < FLOATS; i++) pooled.sum[i] += pooled.bias;
    }
    if constexpr (S::SLOTS > 1) rf_merge_slots<S, S::ELEMENTS, S::LANES>(pooled.sum, first);
    if (S::PADDED) {
        pooled.counted = rf_sum_of_group<S>(pooled.counted);
        count = pooled.counted;
    } else if (S::SPLIT || S::POOLING == RF_MEAN) {
        /* Read again: keeping it would take registers from the rows in flight. */
        int bad = 0;
        const rf_bag lookups = rf_load_part<S>(args, task, offsets, bag, bad);
        count = lookups.end - lookups.begin;
    }
    if constexpr (S::WARPS > 1) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        __syncthreads(); /* the previous bag has been read */
#pragma unroll
        for (int i = 0; i < FLOATS; i++) left[(warp * (FLOATS + 1) + i) * 32 + lane] = pooled.sum[i];
        left[(warp * (FLOATS + 1) + FLOATS) * 32 + lane] = __int_as_float(pooled.counted);
        __syncthreads();
        if (warp % S::WARPS != 0) return;
#pragma unroll 1
        for (int other = warp + 1; other < warp + S::WARPS; other++) {
#pragma unroll
            for (int i = 0; i < FLOATS; i++) pooled.sum[i] += left[(other * (FLOATS + 1) + i) * 32 + lane];
            if (S::PADDED) count += __float_as_int(left[(other * (FLOATS + 1) + FLOATS) * 32 + lane]);
        }
    }
    if (bag >= task.last_bag || place.slot() >= PIECES) return;
    constexpr int KEPT = S::SLOTS > 1 ? S::KEPT : S::ELEMENTS;
    if constexpr (S::SPLIT) {
        const rf_shared_bags<S> shared(args, task);
        float *to = shared.of(rf_fused_share_of(task.share), bag - task.first_bag);
#pragma unroll
        for (int i = 0; i < S::VECTORS; i++) {
#pragma unroll
            for (int e = 0; e < KEPT; e++)
                to[(threadIdx.x % S::LANES + i * S::LANES) * S::ELEMENTS + first + e] =
                    pooled.sum[i * S::ELEMENTS + e];
        }
        if (threadIdx.x % S::GROUP == 0) to[rf_shared_bags<S>::WIDTH] = (float)count;
        return;
    }
    rf_u8 *to = place.output + (rf_u64)(rf_u32)bag * args.output_pitch;
#pragma unroll
    for (int i = 0; i < S::VECTORS; i++) {
        if (!S::WHOLE &&
            place.column_of(task) + i * S::LANES >= rf_load(&args.features[task.feature].columns))
            continue;
        float values[KEPT];
#pragma unroll
        for (int e = 0; e < KEPT; e++) values[e] = rf_pooled_value<S>(pooled.sum[i * S::ELEMENTS + e], count);
        rf_store<S::STORE, KEPT>(to + (i * S::LANES * S::ELEMENTS + first) * rf_element<RF_OUTPUT>::BYTES,
                                 values);
    }
}

/* The last of the blocks that share bags adds their sums in the order of the parts. */
template <class S> RF_INLINE void rf_finish_shared(const rf_fused_args &args, const rf_fused_task &task) {
    typedef rf_shared_bags<S> shared_bags;
    __shared__ bool last;
    const int parts = rf_fused_shares(task.share);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(args.arrived + task.group, 1u) == (rf_u32)parts - 1;
        if (last) args.arrived[task.group] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    const rf_fused_descriptor &feature = args.features[task.feature];
    const shared_bags shared(args, task);
    const int first = task.slice * shared_bags::WIDTH;
    const int width = min(shared_bags::WIDTH, rf_load(&feature.columns) * S::ELEMENTS - first);
    for (int at = threadIdx.x; at < shared.bags * width; at += RF_BLOCK) {
        const int bag = at / width, column = at % width;
        float sum = 0.0f, count = 0.0f;
        for (int part = 0; part < parts; part++) {
            const float *from = shared.of(part, bag);
            sum += __ldcg(from + column);
            count += __ldcg(from + shared_bags::WIDTH);
        }
        const float value = rf_pooled_value<S>(sum, (rf_i64)count);
        constexpr int BYTES = rf_element<RF_OUTPUT>::BYTES;
        rf_store<BYTES, 1>(args.output + (rf_u64)(task.first_bag + bag) * args.output_pitch +
                               rf_load(&feature.output_offset) + (rf_i64)(first + column) * BYTES,
                           &value);
    }
}

/* Returns true if this schedule can pool the task. */
template <class S> RF_INLINE bool rf_can_pool(const rf_fused_args &args, const rf_fused_task &task) {
    if (!RF_CALLERS_MAPPING) return true;
    if (!rf_is_feature(args, task.feature) || task.first_bag < 0 || task.first_bag >= task.last_bag)
        return false;
    const rf_fused_descriptor &feature = args.features[task.feature];
    if (rf_load(&feature.shape) != S::SHAPE) return false;
    const rf_i64 column = (rf_i64)task.slice * S::LANES * S::VECTORS;
    if (column < 0 || column >= rf_load(&feature.columns)) return false;
    if (!S::SPLIT) return true;
    const rf_i64 floats = (rf_fused_shares(task.share)) * (rf_i64)(task.last_bag - task.first_bag) *
                          (rf_shared_bags<S>::WIDTH + 1);
    return (rf_fused_share_of(task.share)) < rf_fused_shares(task.share) &&
           (rf_u32)task.group < (rf_u32)args.n_groups && task.partials >= 0 &&
           task.partials * 32ll + floats <= args.n_partials * 32ll;
}

/* Pools the bags of a task, THREADS threads each. `handed`: the row indices of the warp; `left`: the sums of
 * all warps. */
template <class S>
RF_INLINE void rf_pool(const rf_fused_args &args, const rf_fused_task &task, rf_row_number *handed,
                       float *left) {
    constexpr int BAGS = RF_BLOCK / (S::GROUP * S::WARPS); /* bags at once */
    constexpr int ROUNDS = S::BATCH / S::DISTANCE;
    const rf_pool_place<S> place(args, task);
    const RF_OFFSET *offsets = args.offsets + (rf_i64)task.feature * args.bags;
    asm volatile("" : "+l"(offsets)); /* else the compiler recomputes it for each bag */
    const int warp = S::WARPS > 1 ? threadIdx.x / 32 % S::WARPS : 0;
    const int first_lookup = (warp * S::LOADS * S::SLOTS + place.slot()) * S::CHUNK + S::index_of_lane();
    const int mine = (int)threadIdx.x / (S::GROUP * S::WARPS); /* number among the BAGS bags */
    const bool bad_start = rf_bad_start(args, task.feature, task.first_bag);
    int bad = bad_start;
    rf_bag next = rf_load_part<S>(args, task, offsets, task.first_bag + BAGS + mine, bad);
    rf_bag now = rf_load_part<S>(args, task, offsets, task.first_bag + mine, bad);
    if (bad_start && mine == 0) now = {0, 0};
    rf_rest rest(now, first_lookup);
    RF_INDEX indices[S::LOADS];
    rf_load_indices<S>(args, rest.position, rest.left, indices);
#pragma unroll 1
    for (int first = task.first_bag; first < task.last_bag; first += BAGS) {
        const rf_bag after = rf_load_part<S>(args, task, offsets, first + 2 * BAGS + mine, bad);
        rf_pooled<S> pooled = {};
        /* At least one iteration, also for empty bags: the body loads the indices of the next bags. */
#pragma unroll 1
        do {
            const RF_POSITION here = rest.position - S::index_of_lane(); /* the slot's first lookup */
            rf_row_number own[S::LOADS];
            rf_four_rows numbers[S::BATCH / 4];
            rf_flight<S> flight;
            rf_look_at<S>(indices, rest.left, place.rows, place.padding, own, bad, pooled.counted);
            rf_hand_out<S>(own, handed, numbers);
#pragma unroll
            for (int round = 0; round < ROUNDS - 1; round++) {
                rf_fetch(place, round, numbers, flight);
                rf_add_flight(args.sample_weights, here, round, flight, pooled);
            }
            rf_fetch(place, ROUNDS - 1, numbers, flight);
            rest.position += S::STRIDE;
            rest.left -= S::STRIDE;
            const rf_rest coming(next, first_lookup);
            const bool more = rest.left > 0;
            rf_load_indices<S>(args, more ? rest.position : coming.position, more ? rest.left : coming.left,
                               indices);
            rf_add_flight(args.sample_weights, here, ROUNDS - 1, flight, pooled);
        } while (__any_sync(RF_FULL_WARP, rest.left > 0));
        if (S::PADDED && (int)threadIdx.x % S::LANES >= S::CHUNK) pooled.counted = 0;
        rf_finish_bag(args, task, offsets, first + mine, place, pooled, left);
        rest = rf_rest(next, first_lookup);
        next = after;
    }
    if constexpr (S::SPLIT) rf_finish_shared<S>(args, task);
    if (RF_CHECK && bad != 0) rf_report_task(args, false);
}

#endif
