/* Shared by the kernels of embedding columns: a task and its body in shared memory, and the values of a
 * source. */
#ifndef RECFUSE_COLUMNS_CUH
#define RECFUSE_COLUMNS_CUH

#include "gpu/device/element.cuh"
#include "families/embedding_columns/device/column_values.h"

#ifndef RF_UNITS
#define RF_UNITS 48
#endif
#ifndef RF_CHECK
#define RF_CHECK 1
#endif
#ifndef RF_OUTPUT
#define RF_OUTPUT RF_FLOAT32
#endif
#ifndef RF_TABLES
#define RF_TABLES RF_FLOAT32 /* of all tables; -1: the dtypes differ */
#endif

#include "families/embedding_columns/columns_args.h"

enum { BLOCK = RF_COLUMNS_BLOCK, WARPS = BLOCK / 32, OUTPUT_BYTES = rf_element<RF_OUTPUT>::BYTES };

/* A task and its body in shared memory, and the samples of a block. */
struct rf_column_work {
    const rf_u8 *shared; /* the task, followed by its body */
    rf_i64 first; /* first sample of the block */
    int samples;
    int most; /* the largest number of samples of a block with a task of this kind */

    RF_INLINE const rf_columns_task &task() const { return *(const rf_columns_task *)shared; }
    RF_INLINE const rf_u8 *body() const { return shared + sizeof(rf_columns_task); }
    RF_INLINE const rf_columns_column &column(int i) const { return ((const rf_columns_column *)body())[i]; }
    RF_INLINE const rf_columns_source &source(int i) const {
        return ((const rf_columns_source *)(body() + task().sources_at))[i];
    }
    RF_INLINE const rf_columns_step &step(int i) const {
        return ((const rf_columns_step *)(body() + task().steps_at))[i];
    }
    RF_INLINE rf_columns_lane lane(int i) const {
        return ((const rf_columns_lane *)(body() + task().lanes_at))[i];
    }
};

/* Returns the block's work after copying the task and its body into shared memory. A read of a column's
 * description would otherwise be two dependent loads. */
RF_INLINE rf_column_work rf_column_work_of(const rf_columns_args &args, rf_u8 *shared) {
    enum { AT_ONCE = 4, HEAD = sizeof(rf_columns_task) / 16 };
    const rf_u32 bag_blocks = (rf_u32)(args.bag_tasks * args.bag_tiles);
    const bool of_bags = blockIdx.x < bag_blocks;
    const rf_u32 block = of_bags ? blockIdx.x : blockIdx.x - bag_blocks;
    const rf_u32 tiles = (rf_u32)(of_bags ? args.bag_tiles : args.tiles);
    const int number = (int)(block / tiles), tile = (int)(block - number * tiles);
    const rf_columns_task *task = args.tasks + (of_bags ? 0 : args.bag_tasks) + number;
    const rf_bytes<16> *body = (const rf_bytes<16> *)(args.program + rf_load(&task->body_at));
    const int pieces = rf_load(&task->words) / 2;
    rf_bytes<16> *to = (rf_bytes<16> *)shared + HEAD;
    if (threadIdx.x < HEAD)
        ((rf_bytes<16> *)shared)[threadIdx.x] = rf_load((const rf_bytes<16> *)task + threadIdx.x);
#pragma unroll 1
    for (int at = threadIdx.x; at < pieces; at += AT_ONCE * BLOCK) {
        rf_bytes<16> part[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (at + i * BLOCK < pieces) part[i] = rf_load(body + at + i * BLOCK);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (at + i * BLOCK < pieces) to[at + i * BLOCK] = part[i];
    }
    const int most = of_bags ? args.bag_samples : args.samples;
    const rf_i64 first = (rf_i64)tile * most;
    __syncthreads();
    return {shared, first, (int)min(args.batch - first, (rf_i64)most), most};
}

/* The values of a source: value i is at `first` + i * `stride` bytes. The index i counts samples, bags or the
 * whole batch. */
struct rf_column_place {
    const rf_u8 *first;
    rf_i64 stride;
    int type;
};

RF_INLINE int rf_column_bytes(int type) { return type == RF_COLUMN_INT64 ? 8 : 4; }

/* N values during the steps of their source. Either all are floats or all are integers. */
template <int N> struct rf_column_values {
    rf_i64 integer[N]; /* an integer, or the bits of a float */

    RF_INLINE float number(int i) const { return __uint_as_float((rf_u32)integer[i]); }
    RF_INLINE void set(int i, float value) { integer[i] = (rf_i64)__float_as_uint(value); }
    /* Returns the value with a number that is unknown at compile time, by selects: registers have no
     * addresses. */
    RF_INLINE rf_i64 of(int number) const {
        rf_i64 found = integer[0];
#pragma unroll
        for (int i = 1; i < N; i++)
            if (i == number) found = integer[i];
        return found;
    }
    /* Loads the values at[i] of a source. */
    RF_INLINE void load(const rf_column_place &place, const rf_i64 (&at)[N]) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const rf_u8 *from = place.first + at[i] * place.stride;
            integer[i] = place.type == RF_COLUMN_INT64 ? rf_load((const rf_i64 *)from)
                                                       : (rf_i64)rf_load((const int *)from);
        }
    }
};

/* Computes for N values the number of the `count` ascending boundaries that are less than each; `right`: not
 * greater. All N values share the search steps. */
template <int N>
RF_INLINE void rf_column_search(rf_column_values<N> &values, const float *boundaries, int count, bool right) {
    int found[N] = {};
    for (int step = count > 0 ? 1 << (31 - __clz(count)) : 0; step > 0; step >>= 1) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int next = found[i] + step;
            const float boundary = boundaries[min(next, count) - 1], value = values.number(i);
            const bool before = right ? !(boundary > value) : !(boundary >= value);
            if (next <= count && before) found[i] = next;
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) values.integer[i] = found[i];
}

template <int N>
RF_INLINE void rf_column_buckets(rf_column_values<N> &values, const float *boundaries,
                                 const rf_columns_step &step) {
    const bool right = step.operation == RF_COLUMN_BUCKETIZE_RIGHT;
    const float inverse = __uint_as_float((rf_u32)step.b);
    if (inverse == 0.0f) return rf_column_search(values, boundaries, step.count, right);
#pragma unroll
    for (int i = 0; i < N; i++)
        values.integer[i] = rf_column_bucket_even(values.number(i), boundaries, step.count, inverse, right);
}

/* A call, because the inlined code for long words would take registers from all other code. */
static __device__ __noinline__ rf_i64 rf_column_word_called(rf_i64 value, const rf_i64 *words, int count) {
    return rf_column_word(value, words, words + count, count);
}
static __device__ __noinline__ float rf_column_log1p_called(float value) { return rf_column_log1p(value); }
static __device__ __noinline__ rf_i64 rf_column_modulo_called(rf_i64 value, rf_i64 divisor) {
    return rf_column_modulo(value, divisor);
}

/* Applies the steps of a source to its values. Returns true if the results are floats. */
template <int N>
RF_INLINE bool rf_column_steps(const rf_columns_args &args, const rf_column_work &work,
                               const rf_columns_source &source, int type, rf_column_values<N> &values) {
    bool floats = type == RF_COLUMN_FLOAT32;
#pragma unroll 1
    for (int k = 0; k < source.n_steps; k++) {
        const rf_columns_step &step = work.step(source.first_step + k);
        const int operation = step.operation;
        const bool of_floats = operation <= RF_COLUMN_CAST || operation == RF_COLUMN_BUCKETIZE ||
                               operation == RF_COLUMN_BUCKETIZE_RIGHT;
        if (of_floats && !floats) {
            if (operation == RF_COLUMN_CAST) continue;
#pragma unroll
            for (int i = 0; i < N; i++) values.set(i, (float)values.integer[i]);
        }
        floats = operation <= RF_COLUMN_CLIP;
        const float a = __uint_as_float((rf_u32)step.a), b = __uint_as_float((rf_u32)step.b);
#define RF_EACH(expression)                                   \
    _Pragma("unroll") for (int i = 0; i < N; i++) expression; \
    break
        switch (operation) {
        case RF_COLUMN_AFFINE:
            RF_EACH(values.set(i, rf_column_affine(values.number(i), a, b)));
        case RF_COLUMN_LOG1P:
            RF_EACH(values.set(i, rf_column_log1p_called(values.number(i))));
        case RF_COLUMN_CLIP:
            RF_EACH(values.set(i, rf_column_clip(values.number(i), a, b)));
        case RF_COLUMN_CAST:
            RF_EACH(values.integer[i] = rf_column_cast(values.number(i)));
        case RF_COLUMN_CLIP_INTEGER:
            RF_EACH(values.integer[i] = rf_column_clip_integer(values.integer[i], step.a, step.b));
        case RF_COLUMN_MODULO:
            RF_EACH(values.integer[i] = rf_column_modulo_called(values.integer[i], step.a));
        case RF_COLUMN_HASH:
            RF_EACH(values.integer[i] = (rf_i64)rf_column_high(
                        rf_column_hash(values.integer[i], (rf_u64)step.b), (rf_u64)step.count));
        case RF_COLUMN_VOCABULARY: {
            const rf_i64 *words =
                step.a >= 0 ? (const rf_i64 *)(work.body() + step.a) : args.vocabulary + ~step.a;
            RF_EACH(values.integer[i] = rf_column_word_called(values.integer[i], words, step.count));
        }
        default: /* one of the two steps that find buckets */
            if (step.a >= 0)
                rf_column_buckets(values, (const float *)(work.body() + step.a), step);
            else
                rf_column_buckets(values, args.boundaries + ~step.a, step);
        }
#undef RF_EACH
    }
    return floats;
}

/* Returns an input of any form as rf_columns_tensor. */
RF_INLINE rf_columns_tensor rf_column_tensor_of(const rf_columns_args &args, int number) {
    if (number >= args.n_dense)
        return ((const rf_columns_tensor *)(args.tensors + args.n_dense))[number - args.n_dense];
    const rf_columns_dense &dense = args.tensors[number];
    return {(const rf_u8 *)(dense.values & (((rf_u64)1 << RF_COLUMNS_HIGH_BYTE) - 1)),
            nullptr,
            nullptr,
            (rf_i64)dense.sample_stride,
            (rf_i64)dense.value_stride,
            (rf_i32)(dense.values >> RF_COLUMNS_HIGH_BYTE),
            0};
}

/* Returns the place of the dense values `value` of all samples. */
RF_INLINE rf_column_place rf_column_dense(const rf_columns_args &args, const rf_columns_source &source,
                                          int value) {
    const rf_columns_tensor input = rf_column_tensor_of(args, source.input);
    const int bytes = rf_column_bytes(input.type);
    return {input.values + (source.slot + value) * input.value_stride * bytes, input.sample_stride * bytes,
            input.type};
}

static __device__ __noinline__ void rf_column_report(rf_error_word errors, rf_argument argument, int column,
                                                     rf_i64 position, rf_i64 sample, rf_i64 value,
                                                     rf_i64 limit, rf_i64 lookups) {
    const rf_offender found = {argument, position, sample, value, limit, lookups};
    rf_report<RF_OPERATOR_embedding_columns>(errors, found, column);
}

/* Returns the row of an index, or -1. Sets `bad` to `number` if the index is an error. */
RF_INLINE rf_i64 rf_column_row(const rf_columns_column &column, rf_i64 index, int number, int &bad) {
    if ((rf_u64)index < (rf_u64)column.rows) return index;
    if (column.invalid != RF_COLUMN_INVALID_ERROR) return column.invalid;
    bad = number;
    return -1;
}

/* The rows of a table from the first element that is written on. */
struct rf_column_table {
    const rf_u8 *rows;
    rf_i64 pitch;
    int dtype;
};
RF_INLINE rf_column_table rf_column_table_of(const rf_columns_args &args, const rf_columns_column &column) {
    const rf_columns_buffer buffer =
        ((const rf_columns_buffer *)(args.tensors + args.buffers_at))[column.buffer];
    const int dtype = RF_TABLES >= 0 ? RF_TABLES : (int)(buffer >> RF_COLUMNS_HIGH_BYTE);
    const int bytes = rf_table_element_bytes(dtype);
    const rf_u8 *data = (const rf_u8 *)(buffer & (((rf_u64)1 << RF_COLUMNS_HIGH_BYTE) - 1));
    return {data + (column.weight_offset + column.first_dim) * bytes, (rf_i64)column.dim * bytes, dtype};
}

/* Computes the indices of N lookups, not yet checked against the table: of one value, or of the hash of two
 * values. where(right, source, at) returns the place of the values of a source and sets their numbers. */
template <int N, class W>
RF_INLINE void rf_column_indices(const rf_columns_args &args, const rf_column_work &work,
                                 const rf_columns_column &column, const W &where,
                                 rf_column_values<N> &values) {
    rf_column_values<N> left = {};
    const int sides = column.right >= 0 ? 2 : 1;
#pragma unroll 1
    for (int side = 0; side < sides; side++) { /* both sides share the code of the steps */
        const rf_columns_source &source = work.source(side == 0 ? column.left : column.right);
        rf_i64 at[N];
        const rf_column_place place = where(side, source, at);
        left = values;
        values.load(place, at);
        rf_column_steps(args, work, source, place.type, values);
    }
    if (sides == 1) return;
#pragma unroll
    for (int i = 0; i < N; i++)
        values.integer[i] =
            (rf_i64)rf_column_high(rf_column_hash_pair(left.integer[i], values.integer[i], column.cross_seed),
                                   (rf_u64)column.cross_buckets);
}

/* Returns true if the output takes V elements of a column at once. Otherwise elements are written singly: the
 * rows of the output may have any length, and narrow columns of numbers may lie between others. */
template <int V>
RF_INLINE bool rf_column_is_whole(const rf_columns_args &args, const rf_columns_column &column) {
    return V == 1 || (args.output_vector >= V && column.output_column % V == 0);
}
template <int V> RF_INLINE void rf_column_store(rf_u8 *to, const float (&values)[V], bool is_whole) {
    if (!is_whole) {
#pragma unroll
        for (int i = 0; i < V; i++)
            *(rf_elements<RF_OUTPUT, 1> *)(to + i * OUTPUT_BYTES) = rf_elements_of<RF_OUTPUT, 1>(values + i);
        return;
    }
    *(rf_elements<RF_OUTPUT, V> *)to = rf_elements_of<RF_OUTPUT, V>(values);
}

/* Returns an address in a row, or a readable address if there is no row. Loads then need no branch, and loads
 * of several rows are issued back to back. */
RF_INLINE const rf_u8 *rf_column_or_any(const rf_columns_args &args, const rf_u8 *row, int behind) {
    return row != nullptr ? row + behind : (const rf_u8 *)args.program;
}

/* Calls work.operator()<V, DTYPE>() for the vector of a task and the dtype of a table. */
template <int V, class W> RF_INLINE void rf_column_for_dtype(int dtype, const W &work) {
    if (RF_TABLES >= 0) return work.template run<V, RF_TABLES >= 0 ? RF_TABLES : 0>();
    if (dtype == RF_FLOAT32) work.template run<V, RF_FLOAT32>();
    if (dtype == RF_FLOAT16) work.template run<V, RF_FLOAT16>();
    if (dtype == RF_BFLOAT16) work.template run<V, RF_BFLOAT16>();
}
template <class W> RF_INLINE void rf_column_for(int vector, int dtype, const W &work) {
    if (vector == 4) return rf_column_for_dtype<4>(dtype, work);
    if (RF_TABLES >= 0 && vector == 2) return rf_column_for_dtype<2>(dtype, work);
    rf_column_for_dtype<1>(dtype, work);
}
/* Returns the vector that the lanes of a task read and write. For mixed dtypes it is 4 or 1, to limit the
 * compile time. */
RF_INLINE int rf_column_width(const rf_columns_args &args, const rf_column_work &work) {
    const int vector = min(work.task().vector, args.vector);
    return RF_TABLES >= 0 || vector == 4 ? vector : 1;
}

#endif
