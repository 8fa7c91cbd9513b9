/* The embedding bag: one table. */
#ifndef RECFUSE_API_EMBEDDING_BAG_H
#define RECFUSE_API_EMBEDDING_BAG_H

#include "recfuse/cuda.h"
#include "recfuse/embedding_bag_codes.h"

RF_BEGIN_DECLARATIONS

/* One table: bag b pools the rows indices[offsets[b]] ... indices[offsets[b + 1] - 1].
 * The last bag ends at `lookups` unless include_last_offset. */
typedef struct rf_embedding_bag_params {
    const void *weight; /* [rows, dim] of dtype, any alignment; NULL only when rows * dim == 0 */
    int64_t rows, dim; /* >= 0 */
    int64_t weight_stride; /* elements from one row to the next, >= dim */
    rf_dtype dtype; /* of weight and output; sums are in float32 */
    const void *indices; /* [lookups] of index_type, each in [0, rows) */
    int64_t lookups;
    const void *offsets; /* [bags], or [bags + 1] with include_last_offset; rising, from 0. NULL: bags are
                          * equally long */
    int64_t bags;
    rf_int_type index_type; /* of indices */
    rf_int_type offset_type; /* of offsets */
    bool include_last_offset;
    bool check_bounds; /* check indices and offsets; if false, invalid ones are undefined behaviour */
    rf_pooling pooling;
    int64_t padding_idx; /* lookups of this row are skipped; -1: no such row */
    const float *sample_weights; /* [lookups], may be NULL; RF_SUM only */
    int32_t prefetch_distance; /* lookups between a prefetch and its use; 0: no prefetching, -1: default */
    void *output; /* [bags, dim] of dtype, completely written */
    int64_t output_stride; /* elements from one bag to the next, >= dim */
} rf_embedding_bag_params;

/* Pools into `output`. Empty bags give zeros. `executor` may be NULL: the caller's thread. Returns when all
 * is written; allocates nothing. RF_ERR_VALUE, RF_ERR_TYPE, RF_ERR_INDEX, RF_ERR_UNSUPPORTED (sample weights
 * of a mean or maximum), RF_ERR_INTERNAL (the executor failed): see rf_last_error; `output` is then
 * undefined. */
RF_API rf_status rf_embedding_bag_cpu(const rf_embedding_bag_params *params, const rf_executor *executor);

/* The schedule of a GPU kernel; it affects the result only through the order of sums. 0 in any field: the
 * default for the GPU, the table and the batch. */
typedef struct rf_embedding_bag_schedule {
    rf_station station;
    int32_t distance; /* rows in flight for each row that a warp reads at once, 1 ... 64; station none: 1 */
    int32_t threads; /* that share a bag: a power of two, 1 ... 1,024; at least those that a row takes */
    int32_t block; /* threads of a block: a power of two, 32 ... 1,024; at least `threads` */
    int32_t warps; /* most warps that an SM runs at once, 1 ... 64; registers and shared memory see to it */
    int32_t parts; /* 1, 2, 4, 8 or 16: bags sweep together through this many parts of the table, so that rows
                    * which several bags need hit L2 */
    int32_t segment; /* lookups of a bag listed at a time: a power of two, 1 ... 256; at least the
                       * threads of a warp that share it */
    int32_t bags; /* short bags of a warp: a power of two, 1 ... 32; only `block` and `warps` go with it */
} rf_embedding_bag_schedule;

enum { RF_SCHEDULE_TEXT_BYTES = 160 };

/* Reads "station=register distance=8": fields in any order, spaces between; NULL and "": all defaults.
 * RF_ERR_VALUE: an unknown field or a value that is not allowed. */
RF_API rf_status rf_embedding_bag_schedule_parse(const char *text, rf_embedding_bag_schedule *schedule);
/* Writes the fields that are not 0 to text [RF_SCHEDULE_TEXT_BYTES]. */
RF_API void rf_embedding_bag_schedule_print(const rf_embedding_bag_schedule *schedule, char *text);

/* Pools on a GPU; pointers of `params` are of that device, prefetch_distance is not used. Puts the work into
 * the stream without waiting; it may be captured in a CUDA graph. The kernel is compiled at its first use, or
 * read from the cache: a call waits for that once per variant, and never for the device. At most 65,535 * 64
 * columns and 2^31 - 1 blocks of bags: else RF_ERR_UNSUPPORTED. `schedule` may be NULL: all defaults.
 *
 * Invalid contents: an invalid index or offset counts as an empty row or bag, and the kernel records the
 * first one. The first later call with the same table (its address and rows; of a fused call the first buffer
 * and the shape) that begins after the report, on any stream, raises it instead of running; with check_bounds
 * off, or while its stream is captured, a call raises nothing. Calls with other tables run. rf_cuda_check
 * raises all remaining errors. A call never waits for errors, so a call queued after an invalid one may still
 * run, and records its own errors if the first was raised by then.
 */
RF_API rf_status rf_embedding_bag_cuda(const rf_embedding_bag_params *params,
                                       const rf_embedding_bag_schedule *schedule,
                                       const rf_cuda_stream *stream);

/* The measurement of rf_embedding_bag_measure: every schedule on every batch, in turns. */
typedef struct rf_embedding_bag_measurement {
    const rf_embedding_bag_params *batches; /* [n_batches], one table */
    int64_t n_batches;
    const rf_embedding_bag_schedule *schedules; /* [n_schedules] */
    int64_t n_schedules;
    /* Puts preparatory work, for example rf_pin_rows_cuda, into the stream before each batch; it is included
     * in the time. May be NULL. */
    rf_status (*prepare)(void *context, const rf_embedding_bag_params *batch, const rf_cuda_stream *stream);
    void *context; /* [1], may be NULL: handed to prepare */
    int64_t rounds;
    double *seconds; /* [n_schedules, rounds]: of one batch, by events of the device */
} rf_embedding_bag_measurement;

/* Each round runs each schedule once over all batches, in a rotating order; an untimed round comes first.
 * Waits for the device. */
RF_API rf_status rf_embedding_bag_measure(const rf_embedding_bag_measurement *measurement,
                                          const rf_cuda_stream *stream);

RF_END_DECLARATIONS

#endif
