/* recfuse: embedding operators for recommendation models. The public C API.
 *
 * C99, independent of torch and of Python: raw pointers in, a status code out. Nothing here prints,
 * exits, or keeps a pointer after it returns. Every function is thread-safe.
 *
 *   rf_   public names       rf__  internal names (no promise)
 */
#ifndef RECFUSE_H
#define RECFUSE_H

#include <stdbool.h>
#include <stdint.h>

#if defined(__GNUC__)
#define RF_API __attribute__((visibility("default")))
#else
#define RF_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define RECFUSE_VERSION "0.1.0"

/* One list of statuses: code, the Python exception that it becomes (Python's own, or of recfuse.errors), text. Memory is
 * the host's, device memory a GPU's. Internal: a bug, or a package that is not whole. */
#define RF_STATUS_LIST(X)                                               \
    X(RF_OK, "", "ok")                                                  \
    X(RF_ERR_VALUE, "ValueError", "a bad argument")                     \
    X(RF_ERR_TYPE, "TypeError", "a type that is not supported")         \
    X(RF_ERR_INDEX, "IndexError", "an index out of range")              \
    X(RF_ERR_MEMORY, "MemoryError", "out of memory")                    \
    X(RF_ERR_UNSUPPORTED, "NotImplementedError", "not supported here")  \
    X(RF_ERR_INTERNAL, "InternalError", "an internal error")            \
    X(RF_ERR_NO_DEVICE, "NoDeviceError", "no GPU, or no driver for it") \
    X(RF_ERR_CUDA, "CudaError", "the CUDA driver failed")               \
    X(RF_ERR_COMPILE, "CompileError", "a GPU kernel does not compile")  \
    X(RF_ERR_OUT_OF_MEMORY, "MemoryError", "out of device memory")

typedef enum rf_status {
#define RF_STATUS_ENUM(code, python, text) code,
    RF_STATUS_LIST(RF_STATUS_ENUM)
#undef RF_STATUS_ENUM
} rf_status;

/* Static text of a status; never NULL. */
RF_API const char *rf_status_text(rf_status status);
/* Name of the Python exception a status becomes; "" for RF_OK. */
RF_API const char *rf_status_python(rf_status status);
/* What the last failing call on this thread found and what is allowed; "" when there was none. UTF-8. The
 * pointer is valid until the next failing call on this thread. */
RF_API const char *rf_last_error(void);
/* RECFUSE_VERSION of the library in use. */
RF_API const char *rf_version(void);

typedef enum rf_dtype { RF_FLOAT32, RF_FLOAT16, RF_BFLOAT16 } rf_dtype;
typedef enum rf_int_type { RF_INT32, RF_INT64 } rf_int_type;
/* The numbers are those of ATen's _embedding_bag. */
typedef enum rf_pooling { RF_SUM, RF_MEAN, RF_MAX } rf_pooling;

/* How a call spreads its work over threads. `parallel_for` cuts [begin, end) into ranges, calls
 * body(from, to, context) on each, possibly at once, and returns 0 when all have returned. */
typedef struct rf_executor {
    int32_t threads; /* ranges worth making; 1 runs on the caller's thread */
    int32_t (*parallel_for)(int64_t begin, int64_t end, int64_t grain,
                            void (*body)(int64_t from, int64_t to, void *context), void *context);
} rf_executor;

/* One table: bag b pools the rows indices[offsets[b]] ... indices[offsets[b + 1] - 1].
 * The last bag ends at `lookups` unless include_last_offset. */
typedef struct rf_embedding_bag_params {
    const void *weight; /* [rows, dim] of dtype, any alignment; NULL only when rows * dim == 0 */
    int64_t rows, dim; /* >= 0 */
    int64_t weight_stride; /* elements from one row to the next, >= dim */
    rf_dtype dtype; /* of weight and output; sums are in float32 */
    const void *indices; /* [lookups] of index_type, each in [0, rows) */
    int64_t lookups;
    const void *offsets; /* [bags], or [bags + 1] with include_last_offset; rising, from 0 */
    int64_t bags;
    rf_int_type index_type; /* of indices */
    rf_int_type offset_type; /* of offsets */
    bool include_last_offset;
    bool check_bounds; /* check indices and offsets; off: bad ones are undefined behaviour */
    rf_pooling pooling;
    int64_t padding_idx; /* lookups of this row are skipped; -1: none */
    const float *sample_weights; /* [lookups], may be NULL; RF_SUM only */
    int32_t prefetch_distance; /* lookups ahead; 0: no prefetching, -1: a good default */
    void *output; /* [bags, dim] of dtype, wholly written */
    int64_t output_stride; /* elements from one bag to the next, >= dim */
} rf_embedding_bag_params;

/* Pools into `output`. Empty bags give zeros. `executor` may be NULL: the caller's thread.
 * RF_ERR_VALUE, RF_ERR_INDEX: see rf_last_error; `output` is then undefined. */
RF_API rf_status rf_embedding_bag_cpu(const rf_embedding_bag_params *params, const rf_executor *executor);

/* A buffer that tables are packed into. */
typedef struct rf_buffer {
    const void *data; /* [numel] of dtype, aligned to its element */
    int64_t numel;
    rf_dtype dtype;
} rf_buffer;

/* One feature: a table inside a buffer, and where its bags go. Several features may share a table.
 * All int64_t, so that an int64 tensor [n_features, 7] is an array of these. */
typedef struct rf_feature {
    int64_t buffer; /* which of the buffers */
    int64_t weight_offset; /* first element of the table in that buffer */
    int64_t rows, dim;
    int64_t pooling; /* rf_pooling */
    int64_t padding_idx; /* -1: none */
    int64_t output_column; /* first column in the output: where the feature before ends */
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
    const void *offsets; /* [n_features * bags + 1] of offset_type; rising, from 0 */
    int64_t bags; /* a feature */
    rf_int_type index_type;
    rf_int_type offset_type;
    bool check_bounds; /* as in rf_embedding_bag_params */
    const float *sample_weights; /* [lookups], may be NULL; then every pooling is RF_SUM */
    int32_t prefetch_distance; /* as in rf_embedding_bag_params */
    rf_dtype output_dtype;
    void *output; /* [bags, output_dim] of output_dtype, wholly written */
    int64_t output_dim;
    int64_t output_stride; /* elements from one bag to the next, >= output_dim */
} rf_fused_embedding_bag_params;

/* Pools every feature. As rf_embedding_bag_cpu otherwise. */
RF_API rf_status rf_fused_embedding_bag_cpu(const rf_fused_embedding_bag_params *params,
                                            const rf_executor *executor);

/* The gradient of one of the weights of a fused call: of buffers[group] seen as rows [rows, dim]. Features in other
 * buffers are not looked at. The contents of indices and offsets may be bad: such lookups do not count. */
typedef struct rf_fused_backward_params {
    const rf_feature
        *features; /* [n_features]; those of the group: tables of `dim` columns inside it, that begin at a
                                   whole row */
    int64_t n_features;
    const void *indices; /* [lookups] of index_type */
    int64_t lookups;
    const void *offsets; /* [n_features * bags + 1] of offset_type */
    int64_t bags; /* a feature */
    rf_int_type index_type;
    rf_int_type offset_type;
    const float *sample_weights; /* [lookups], may be NULL; then every pooling of the group is RF_SUM */
    const void *grad; /* [bags, output_dim] of grad_dtype: the gradient of the call's output */
    int64_t output_dim;
    rf_dtype grad_dtype;
    const int64_t *winners; /* [bags, output_dim], may be NULL if no feature of the group is RF_MAX */
    int64_t group;
    int64_t rows, dim; /* of the weight */
    rf_dtype dtype; /* of the gradient that is written; sums are in float32 */
    bool scale_grad_by_freq; /* each row's gradient is divided by the number of its lookups */
} rf_fused_backward_params;

/* Writes the dense gradient to output [rows, dim] of params->dtype: rows without lookups are zeros. The same bits
 * for any executor, which may be NULL: the caller's thread. RF_ERR_VALUE, RF_ERR_TYPE, RF_ERR_MEMORY. */
RF_API rf_status rf_fused_embedding_bag_backward_cpu(const rf_fused_backward_params *params, void *output,
                                                     const rf_executor *executor);

/* Where a sparse gradient goes. */
typedef struct rf_sparse_output {
    /* Called once at most, with the number of rows that have a gradient: gives *rows [count] and *values [count, dim]
     * of params->dtype. Its failure is the call's. */
    rf_status (*allocate)(void *context, int64_t count, int64_t **rows, void **values);
    void *context; /* [1], may be NULL: handed to allocate */
} rf_sparse_output;

/* The same as rows, rising, and their values; rows without lookups are left out (all, if dim is 0). */
RF_API rf_status rf_fused_embedding_bag_sparse_backward_cpu(const rf_fused_backward_params *params,
                                                            const rf_sparse_output *output,
                                                            const rf_executor *executor);

/* Which row of its table won each column of each bag of each feature of pooling RF_MAX: winners [bags, output_dim], -1
 * where no lookup counts and in the columns of other features. params->output is not looked at. */
RF_API rf_status rf_fused_embedding_bag_winners_cpu(const rf_fused_embedding_bag_params *params,
                                                    int64_t *winners, const rf_executor *executor);

/* The gradient of the sample weights of a call whose features are all RF_SUM, from grad [bags, output_dim] of grad_dtype:
 * output [lookups], 0 where a lookup does not count. params->output and sample_weights are not looked at. */
RF_API rf_status rf_fused_embedding_bag_sample_weights_backward_cpu(
    const rf_fused_embedding_bag_params *params, const void *grad, rf_dtype grad_dtype, float *output,
    const rf_executor *executor);

/* What the compiler said about a GPU kernel, and where the kernel came from. -1: it did not say. */
typedef struct rf_kernel_info {
    int32_t registers; /* a thread */
    int32_t spill_bytes; /* a thread, stores and loads together */
    int32_t stack_bytes; /* a thread */
    int32_t shared_bytes; /* a block */
    int64_t cubin_bytes;
    double seconds; /* that this call took */
    bool cached; /* taken from the cache on disk */
    char path[512]; /* of the entry there; "": none could be written, or longer than this */
} rf_kernel_info;

/* Where rows in flight wait until they are summed (Jain et al., MICRO'24, section IV-B): name, text. */
#define RF_STATION_LIST(X)             \
    X(RF_STATION_DEFAULT, "")          \
    X(RF_STATION_NONE, "none")         \
    X(RF_STATION_REGISTER, "register") \
    X(RF_STATION_SHARED, "shared")     \
    X(RF_STATION_LOCAL, "local")       \
    X(RF_STATION_L1, "l1")

typedef enum rf_station {
#define RF_STATION_ENUM(name, text) name,
    RF_STATION_LIST(RF_STATION_ENUM)
#undef RF_STATION_ENUM
} rf_station;

/* How a GPU kernel works; the result does not depend on it but for the order of sums. 0 anywhere: a good
 * default for the GPU, the table and the batch. */
typedef struct rf_embedding_bag_schedule {
    rf_station station;
    int32_t distance; /* rows in flight for each row that a warp reads at once, 1 ... 64; none: 1 */
    int32_t threads; /* that share a bag: a power of two, 1 ... 1,024; at least those that a row takes */
    int32_t block; /* threads of a block: a power of two, 32 ... 1,024; at least `threads` */
    int32_t warps; /* most warps that an SM runs at once, 1 ... 64; registers and shared memory see to it */
    int32_t parts; /* 1, 2, 4, 8 or 16: bags sweep together through so many parts of the table, so that
                       * rows which several need are found in L2 */
    int32_t segment; /* lookups of a bag listed at a time: a power of two, 1 ... 256; at least the
                       * threads of a warp that share it */
} rf_embedding_bag_schedule;

enum { RF_SCHEDULE_TEXT_BYTES = 160 };

/* Reads "station=register distance=8": fields in any order, spaces between; NULL and "": all defaults.
 * RF_ERR_VALUE: an unknown field or a value that is not allowed. */
RF_API rf_status rf_embedding_bag_schedule_parse(const char *text, rf_embedding_bag_schedule *schedule);
/* Writes the fields that are not 0 to text [RF_SCHEDULE_TEXT_BYTES]. */
RF_API void rf_embedding_bag_schedule_print(const rf_embedding_bag_schedule *schedule, char *text);

/* Where GPU work goes. */
typedef struct rf_cuda_stream {
    int32_t device; /* ordinal */
    void *stream; /* [1] CUstream of that device, may be NULL: the default stream */
} rf_cuda_stream;

/* Pools on a GPU; pointers of `params` are of that device, prefetch_distance is not used. The work is put
 * into the stream and not waited for; it may be captured in a CUDA graph. The kernel is compiled at its first
 * use, or comes from the cache. `schedule` may be NULL: all defaults.
 *
 * Bad contents: a bad index or offset counts as an empty row or bag, and the kernel keeps the first one. The first
 * later call with the same table (its address and rows; of a fused call the first buffer and the shape) that begins
 * after the kernel has found it, on whatever stream, raises it instead of running; with check_bounds off, or while its
 * stream is captured, a call raises nothing. Calls with other tables run. rf_cuda_check raises what is left of any. A
 * call never waits to find out, so one that is put into a stream behind a bad one may still run, and keeps what it
 * finds itself if the first was raised by then. */
RF_API rf_status rf_embedding_bag_cuda(const rf_embedding_bag_params *params,
                                       const rf_embedding_bag_schedule *schedule,
                                       const rf_cuda_stream *stream);

/* Compiles the kernel that rf_embedding_bag_cuda would use, or finds it in the cache; needs no GPU. Of
 * `params` only sizes and types are looked at, and whether sample_weights is NULL. `alignment`: bytes that
 * rows and output are aligned to (16 for torch's tensors). arch: "sm_90a" and so on. *complete is the
 * schedule with its defaults for a typical GPU of that arch. `info` and `complete` may be NULL. */
RF_API rf_status rf_embedding_bag_compile(const rf_embedding_bag_params *params,
                                          const rf_embedding_bag_schedule *schedule, int32_t alignment,
                                          const char *arch, rf_kernel_info *info,
                                          rf_embedding_bag_schedule *complete);

/* What rf_embedding_bag_measure times: every schedule on every batch, in turns. */
typedef struct rf_embedding_bag_measurement {
    const rf_embedding_bag_params *batches; /* [n_batches], one table */
    int64_t n_batches;
    const rf_embedding_bag_schedule *schedules; /* [n_schedules] */
    int64_t n_schedules;
    const void
        *pinned_rows; /* [n_pinned] of pinned_type, may be NULL; pinned anew before each batch, in time */
    int64_t n_pinned;
    rf_int_type pinned_type;
    int64_t rounds;
    double *seconds; /* [n_schedules, rounds]: of one batch, by events of the device */
} rf_embedding_bag_measurement;

/* Each round runs each schedule once over all batches, in an order that rotates; the first round is preceded by
 * an untimed one. Waits for the device. */
RF_API rf_status rf_embedding_bag_measure(const rf_embedding_bag_measurement *measurement,
                                          const rf_cuda_stream *stream);

/* How a GPU works on the bags of one feature of a fused call: name, text. */
#define RF_FUSED_KIND_LIST(X)           \
    X(RF_FUSED_KIND_DEFAULT, "")        \
    X(RF_FUSED_KIND_POOL, "pool")       \
    X(RF_FUSED_KIND_COLUMNS, "columns") \
    X(RF_FUSED_KIND_STAGED, "staged")

typedef enum rf_fused_kind {
#define RF_FUSED_KIND_ENUM(name, text) name,
    RF_FUSED_KIND_LIST(RF_FUSED_KIND_ENUM)
#undef RF_FUSED_KIND_ENUM
} rf_fused_kind;

/* The schedule of one feature. All int32_t, so that an int32 tensor [n_features, 6] is an array of these. 0
 * anywhere: a good default. */
typedef struct rf_fused_schedule {
    int32_t kind; /* rf_fused_kind: groups of threads a bag; lanes over output columns, for short bags; tables
                       * staged in shared memory */
    int32_t threads; /* that share a bag, a power of two; pool: from those that a row takes to 64; staged: 2
                      * to 32 */
    int32_t distance; /* pool: rows in flight a thread: 1, 2, 4, 8 or 16 */
    int32_t station; /* pool: rf_station, where they wait */
    int32_t split; /* pool: blocks that share a bag, 1 ... 64 */
    int32_t expected; /* lookups of a bag times 16, -1: none; 0: not known */
} rf_fused_schedule;

/* A caller's allocator of device memory. Memory belongs to the stream that it was made for: what is released may be
 * given out again at once for work that follows on that stream, as torch's allocator does. Functions and context must
 * live as long as the process, and be safe to call from any thread; no lock is held and no context entered in calls. */
typedef struct rf_cuda_allocator {
    void *context; /* [1] or NULL: handed to both functions */
    /* bytes > 0, of the stream's device, aligned to 16 bytes; *block is what release() wants. `lasts`: it is kept beyond
     * the call that makes it, for calls that come again; never asked for a stream that is captured. */
    rf_status (*allocate)(void *context, int64_t bytes, bool lasts, const rf_cuda_stream *stream,
                          void **memory, void **block);
    /* All work that uses the memory is in its stream. */
    void (*release)(void *context, void *block);
} rf_cuda_allocator;

/* How a GPU works on a fused call. */
typedef struct rf_fused_plan {
    const rf_fused_schedule *schedules; /* [n_features], may be NULL: all defaults */
    int32_t warps; /* most warps that an SM runs at once, 2 ... 64; 0: a good default */
    const int32_t *mapping; /* [rows, 8] on the host, of rf_fused_embedding_bag_map; may be NULL */
    int64_t mapping_rows;
    const void *mapping_on_device; /* [rows, 8] aligned to 16 bytes: its copy; NULL: the call makes one */
    const rf_cuda_allocator *allocator; /* [1], NULL: the driver, which waits for the device to free */
} rf_fused_plan;

/* Bytes of device memory that the call below wants to work in. */
RF_API rf_status rf_fused_embedding_bag_workspace(const rf_fused_embedding_bag_params *params,
                                                  const rf_fused_plan *plan, const rf_cuda_stream *stream,
                                                  int64_t *bytes);

/* Pools every feature on a GPU, as rf_embedding_bag_cuda does one; `features` and `buffers` themselves, but for
 * buffers' data, are on the host. `plan` may be NULL: all defaults. Which block works on what is decided before the
 * launch: by plan->mapping; or by the number of bags, if all of plan->schedules know what to expect; or else by a
 * small kernel from the offsets. A mapping that does not have each bag of each feature once is RF_ERR_VALUE.
 * mapping_on_device is read by this call, and by all replays of a graph that it is captured in.
 * `workspace`: workspace_bytes of device memory, at least as many as above says, aligned to 16 bytes, free again for
 * work that follows on the stream; NULL: plan->allocator's, if it is given.
 *
 * What describes features to the kernels is kept on the device, for calls that come again on the stream: 48 bytes a
 * feature and 32 a task, of the last 128 different calls of a device and at most 64 MiB of tasks. It comes from
 * plan->allocator. What a captured call needs is kept apart from that until the process ends, in memory of the driver,
 * since graphs may be replayed on any stream: only such a call, the first time, waits, for the copy of its own
 * description. */
RF_API rf_status rf_fused_embedding_bag_cuda(const rf_fused_embedding_bag_params *params,
                                             const rf_fused_plan *plan, void *workspace,
                                             int64_t workspace_bytes, const rf_cuda_stream *stream);

/* Which block works on what, for a batch whose offsets are on the host: of `params` the features, buffers (not their
 * data), sizes and output are looked at, and offsets, which must be host memory. Heavy tasks come first. *mapping
 * [*rows, 8] is the caller's, to be freed with rf_fused_mapping_free. Needs no GPU: `sms` is the number of its
 * SMs, `stage` whether it can stage tables (compute capability 9.0 and 10.0). RF_ERR_VALUE: offsets that decrease. */
RF_API rf_status rf_fused_embedding_bag_map(const rf_fused_embedding_bag_params *params,
                                            const rf_fused_plan *plan, int32_t sms, bool stage,
                                            int32_t **mapping, int64_t *rows);
/* Frees a mapping; NULL is fine. */
RF_API void rf_fused_mapping_free(int32_t *mapping);

/* Rows of a table, to be kept in L2 or let go. */
typedef struct rf_pin_rows_params {
    const void *weight; /* [rows, row_bytes], row_pitch bytes from one to the next */
    int64_t rows, row_bytes, row_pitch;
    const void *hot_rows; /* [n_hot_rows] of index_type, on the device */
    int64_t n_hot_rows;
    rf_int_type index_type;
} rf_pin_rows_params;

/* Brings the rows into L2 and marks them to leave it last (`keep`), or like any other (not `keep`), by a
 * kernel on the stream. A hint: L2 may still evict them. A row outside the table is reported as in
 * rf_embedding_bag_cuda. */
RF_API rf_status rf_pin_rows_cuda(const rf_pin_rows_params *params, bool keep, const rf_cuda_stream *stream);
/* Takes the marks of all lines of the device's L2 away. */
RF_API rf_status rf_unpin_all_cuda(int32_t device);

/* Waits for the device, then raises one of the errors that its kernels have found (RF_ERR_INDEX, RF_ERR_VALUE) and says
 * how many are left, of calls with other tables: RF_OK once all are raised. Not while a stream is captured. */
RF_API rf_status rf_cuda_check(int32_t device);

/* Instruction set of the CPU kernels: "avx512", "avx2", "neon" or "scalar"; chosen once, at the first
 * use, as the best that this CPU has or what RECFUSE_CPU_ISA names if the CPU has it. */
RF_API const char *rf_cpu_isa(void);

/* Asks the system to back [data, data + bytes) with huge pages where it can: fewer TLB misses for
 * large tables. A hint: RF_OK also where it does nothing. The contents are kept. */
RF_API rf_status rf_advise_huge_pages(void *data, int64_t bytes);

#ifdef __cplusplus
}
#endif
#endif
