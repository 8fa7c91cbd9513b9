/* Many embedding bags in one call. */
#ifndef RECFUSE_API_FUSED_EMBEDDING_BAG_H
#define RECFUSE_API_FUSED_EMBEDDING_BAG_H

#include "recfuse/embedding_bag.h"

RF_BEGIN_DECLARATIONS

/* A buffer that tables are packed into. Of RF_INT8_ROWS and RF_INT4_ROWS it has codes of rows of one dim, numel / dim rows:
 * the codes of row r begin at data + r * pitch, of int4 the first in the low half of a byte; its scale and its bias are at
 * parameters + r * parameters_pitch. A value is scale * code + bias. Parameters lie between the codes, or elsewhere. */
typedef struct rf_buffer {
    const void *data; /* [numel] of dtype, aligned to its element; codes need no alignment */
    int64_t numel;
    rf_dtype dtype;
    /* Only of codes, else zeros; but rows of floats with gaps between them have a pitch too. */
    rf_dtype parameters_dtype; /* RF_FLOAT16; on the CPU RF_FLOAT32 too */
    const void *parameters; /* [rows][2]; on a GPU aligned to 4 bytes, and parameters_pitch too */
    int64_t pitch, parameters_pitch; /* bytes */
} rf_buffer;

/* A table within memory that other tables share, such as an inference module of FBGEMM has. All int64_t, so that an int64
 * tensor [n_tables, 8] is an array of these. */
#define RF_STORED_TABLE_FIELDS(X)                                                                      \
    X(int64_t, memory) /* number of the memory */                                                      \
    X(int64_t, first) /* byte at which row 0 begins; of codes their first byte */                      \
    X(int64_t, rows)                                                                                   \
    X(int64_t, dim)                                                                                    \
    X(int64_t, dtype) /* rf_dtype */                                                                   \
    X(int64_t, pitch) /* bytes from a row to the next, of the parameters too */                        \
    X(int64_t, parameters) /* byte at which the scale and the bias of row 0 are; 0 if it has floats */ \
    X(int64_t, parameters_dtype) /* RF_FLOAT16 or RF_FLOAT32; 0 if it has floats */
typedef struct rf_stored_table {
    RF_STORED_TABLE_FIELDS(RF_FIELD)
} rf_stored_table;

/* Memory with tables, and the memory with their parameters, which may be the same. */
typedef struct rf_memory {
    const void *data; /* [bytes] */
    const void *parameters; /* [parameters_bytes] */
    int64_t bytes, parameters_bytes;
} rf_memory;

/* Describes tables as buffers, buffers[t] for tables[t]; reads no row. The buffers point into the memory, which must
 * outlive them. RF_ERR_VALUE: a table that does not lie within its memory, rows that overlap, floats that are not aligned. */
RF_API rf_status rf_stored_tables_buffers(const rf_stored_table *tables, int64_t n_tables,
                                          const rf_memory *memories, int64_t n_memories, rf_buffer *buffers);

/* A feature: a table inside a buffer, and the position of its bags in the output. Several features may share
 * a table. All int64_t, so that an int64 tensor [n_features, 7] is an array of these. */
#define RF_FEATURE_FIELDS(X)                                                  \
    X(int64_t, buffer) /* number of the buffer */                             \
    X(int64_t, weight_offset) /* first element of the table in that buffer */ \
    X(int64_t, rows)                                                          \
    X(int64_t, dim)                                                           \
    X(int64_t, pooling) /* rf_pooling */                                      \
    X(int64_t, padding_idx) /* -1: no such row */                             \
    X(int64_t, output_column) /* first column in the output: the end of the previous feature */
typedef struct rf_feature {
    RF_FEATURE_FIELDS(RF_FIELD)
} rf_feature;

/* Many tables in one call, feature-major: bag b of feature f pools the indices from
 * offsets[f * bags + b] to offsets[f * bags + b + 1]. */
typedef struct rf_fused_embedding_bag_params {
    const rf_buffer *buffers; /* [n_buffers] */
    int64_t n_buffers;
    const rf_feature *features; /* [n_features], in the order of their columns */
    int64_t n_features;
    const void *indices; /* [lookups] of index_type */
    int64_t lookups;
    const void *offsets; /* [n_features * bags + 1] of offset_type; rising from 0, on the CPU to lookups */
    int64_t bags; /* a feature */
    rf_int_type index_type;
    rf_int_type offset_type;
    bool check_bounds; /* as in rf_embedding_bag_params */
    const float *sample_weights; /* [lookups], may be NULL; then every pooling is RF_SUM */
    int32_t prefetch_distance; /* as in rf_embedding_bag_params */
    rf_dtype output_dtype;
    void *output; /* [bags, output_dim] of output_dtype, completely written */
    int64_t output_dim;
    int64_t output_stride; /* elements from one bag to the next, >= output_dim */
} rf_fused_embedding_bag_params;

/* Pools every feature. As rf_embedding_bag_cpu otherwise. */
RF_API rf_status rf_fused_embedding_bag_cpu(const rf_fused_embedding_bag_params *params,
                                            const rf_executor *executor);

/* The kinds of schedules for the bags of a feature of a fused call on a GPU: name, text. */
#define RF_FUSED_KIND_LIST(X)           \
    X(RF_FUSED_KIND_DEFAULT, "")        \
    X(RF_FUSED_KIND_POOL, "pool")       \
    X(RF_FUSED_KIND_COLUMNS, "columns") \
    X(RF_FUSED_KIND_STAGED, "staged")

typedef enum rf_fused_kind { RF_FUSED_KIND_LIST(RF_CODE_NAME) } rf_fused_kind;

/* The schedule of one feature. All int32_t, so that an int32 tensor [n_features, 5] is an array of these. 0
 * anywhere: the default.
 *   kind      rf_fused_kind: groups of threads a bag; lanes over output columns, for short bags; tables staged
 *             in shared memory
 *   threads   that share a bag, a power of two; pool: from those that a row takes to 64; staged: 2 to 32
 *   distance  pool: rows in flight a thread: 1, 2, 4, 8 or 16
 *   split     pool: blocks that share a bag, 1 ... 64
 *   expected  mean lookups of a bag, in sixteenths of a lookup; -1: no lookups; 0: unknown */
#define RF_FUSED_SCHEDULE_FIELDS(X) \
    X(int32_t, kind)                \
    X(int32_t, threads)             \
    X(int32_t, distance)            \
    X(int32_t, split)               \
    X(int32_t, expected)
typedef struct rf_fused_schedule {
    RF_FUSED_SCHEDULE_FIELDS(RF_FIELD)
} rf_fused_schedule;

/* The plan of a fused call on a GPU. */
typedef struct rf_fused_plan {
    const rf_fused_schedule *schedules; /* [n_features], may be NULL: all defaults */
    int32_t warps; /* most warps that an SM runs at once, 2 ... 64; 0: the default */
    const int32_t *mapping; /* [rows, 8] on the host, of rf_fused_embedding_bag_map; may be NULL */
    int64_t mapping_rows;
    const void *mapping_on_device; /* [rows, 8] aligned to 16 bytes: its copy; NULL: the call makes one */
    const rf_cuda_allocator *allocator; /* [1], NULL: the driver, which waits for the device to free */
} rf_fused_plan;

/* Bytes of device memory that the call below wants to work in; 0 is possible. Copies the call's descriptions
 * to the device, as the call would; compiles no kernel. */
RF_API rf_status rf_fused_embedding_bag_workspace(const rf_fused_embedding_bag_params *params,
                                                  const rf_fused_plan *plan, const rf_cuda_stream *stream,
                                                  int64_t *bytes);

/* Pools every feature on a GPU, as rf_embedding_bag_cuda does for one; `features` and `buffers` are on the
 * host, except for the buffers' data. `plan` may be NULL: all defaults. The assignment of work to blocks is
 * made before the launch: by plan->mapping; or from the number of bags, if `expected` is known in all of
 * plan->schedules; or else by a small kernel from the offsets. A mapping that does not contain each bag of
 * each feature once is RF_ERR_VALUE. mapping_on_device is read by this call, and by all replays of a graph
 * that captured it. `workspace`: workspace_bytes of device memory, at least as many as returned above,
 * aligned to 16 bytes, reusable for later work on the stream; NULL: plan->allocator's, if there is one.
 *
 * Descriptions of features and tasks stay on the device, for repeated calls on the stream: 64 bytes per
 * feature and 32 per task. The 256 most recently used descriptions of all operators stay on each device, and
 * at most 128 MiB; a call has two. They come from plan->allocator. Descriptions of a captured call are
 * separate from these and stay until the process ends, in memory of the driver, because graphs may be
 * replayed on any stream: only such a call waits, the first time, for the copy of its own descriptions.
 */
RF_API rf_status rf_fused_embedding_bag_cuda(const rf_fused_embedding_bag_params *params,
                                             const rf_fused_plan *plan, void *workspace,
                                             int64_t workspace_bytes, const rf_cuda_stream *stream);

/* Computes the assignment of work to blocks for a batch whose offsets are on the host. Reads the features,
 * buffers (not their data), sizes, output and offsets of `params`; offsets must be host memory. Heavy tasks
 * come first. The caller frees *mapping [*rows, 8] by rf_fused_mapping_free. Needs no GPU: `sms` is the
 * number of its SMs, `stage` whether it can stage tables (compute capability 9.0 and 10.0). RF_ERR_VALUE:
 * offsets that decrease. */
RF_API rf_status rf_fused_embedding_bag_map(const rf_fused_embedding_bag_params *params,
                                            const rf_fused_plan *plan, int32_t sms, bool stage,
                                            int32_t **mapping, int64_t *rows);
/* Frees a mapping; NULL is fine. */
RF_API void rf_fused_mapping_free(int32_t *mapping);

RF_END_DECLARATIONS

#endif
