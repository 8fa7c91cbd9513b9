/* Embedding columns: from raw feature values to pooled rows of tables, many columns in one call (Pan et al.,
 * RECom, ASPLOS'23, sections 3 and 5).
 *
 * A column takes the values that each sample has of a feature (or the pairs of values of two features: a
 * cross), turns each into the index of a row by a few steps, and pools the rows; or it writes the values
 * themselves. */
#ifndef RECFUSE_API_EMBEDDING_COLUMNS_H
#define RECFUSE_API_EMBEDDING_COLUMNS_H

#include "recfuse/embedding_columns_codes.h"
#include "recfuse/fused_embedding_bag.h"

RF_BEGIN_DECLARATIONS

/* All int64_t here and below, so that int64 tensors [n, fields] are arrays of these. */
#define RF_COLUMN_STEP_FIELDS(X)                    \
    X(int64_t, operation) /* rf_column_operation */ \
    X(int64_t, a)                                   \
    X(int64_t, b)
typedef struct rf_column_step {
    RF_COLUMN_STEP_FIELDS(RF_FIELD)
} rf_column_step;

/* The values of a sample, and their preparation. Several columns may share a source. */
#define RF_COLUMN_SOURCE_FIELDS(X)                                                                    \
    X(int64_t, input) /* number among the call's inputs */                                            \
    X(int64_t, slot) /* dense: the first of a sample's values in it; jagged: which of its features */ \
    X(int64_t, width) /* dense: how many values a sample has, >= 1; jagged: 0 */                      \
    X(int64_t, first_step)                                                                            \
    X(int64_t, n_steps)
typedef struct rf_column_source {
    RF_COLUMN_SOURCE_FIELDS(RF_FIELD)
} rf_column_source;

/* One column: output[sample, output_column ... + n_dims] = scale * pooled[first_dim ... + n_dims].
 * Numeric (buffer -1): the left source's values as floats; dense, n_dims is its width, not scaled.
 *   left, right         its source; of a cross the other source, else -1
 *   cross_buckets       of a cross: rf_hash_integers(l, r, cross_seed) * cross_buckets / 2^64, < 2^31; else 0
 *   buffer              number of the buffer of its table; -1: numeric
 *   weight_offset       first element of the table in that buffer
 *   pooling             rf_column_pooling
 *   weighted            1: rows times the weights of the left source's input, which is jagged; no cross, no max
 *   invalid             rf_column_invalid, or a row
 *   empty               rf_column_empty, or a row (times 1, if weighted)
 *   fill                the value of empty samples: the bits of a float32; not scaled
 *   first_dim, n_dims   the columns of the table that are written
 *   scale               the bits of a float32
 *   output_column       first column in the output: the end of the previous column */
#define RF_COLUMN_FIELDS(X)   \
    X(int64_t, left)          \
    X(int64_t, right)         \
    X(int64_t, cross_buckets) \
    X(int64_t, cross_seed)    \
    X(int64_t, buffer)        \
    X(int64_t, weight_offset) \
    X(int64_t, rows)          \
    X(int64_t, dim)           \
    X(int64_t, pooling)       \
    X(int64_t, weighted)      \
    X(int64_t, invalid)       \
    X(int64_t, empty)         \
    X(int64_t, fill)          \
    X(int64_t, first_dim)     \
    X(int64_t, n_dims)        \
    X(int64_t, scale)         \
    X(int64_t, output_column)
typedef struct rf_column {
    RF_COLUMN_FIELDS(RF_FIELD)
} rf_column;

/* The facts about columns that are known before a batch. */
typedef struct rf_columns {
    const rf_column *columns; /* [n_columns], in the order of the output */
    int64_t n_columns;
    const rf_column_source *sources; /* [n_sources] */
    int64_t n_sources;
    const rf_column_step *steps; /* [n_steps] */
    int64_t n_steps;
    const float *boundaries; /* [n_boundaries]; those of a step do not decrease, and are not NaN */
    int64_t n_boundaries;
    const int64_t *vocabulary; /* [n_vocabulary]; words of a step differ */
    int64_t n_vocabulary;
} rf_columns;

/* Checks columns and lays them out for calls: *program [*words] is the caller's, to be freed below. It has no
 * pointers: it may be copied, stored and sent to a device. RF_ERR_VALUE names the column. */
RF_API rf_status rf_embedding_columns_program(const rf_columns *columns, int64_t **program, int64_t *words);
/* Frees a program; NULL is fine. */
RF_API void rf_embedding_columns_program_free(int64_t *program);

/* A tensor of features. Dense: a sample has `width` values; jagged: it has a bag of each of `features`. */
typedef struct rf_column_input {
    const void *values; /* dense [batch, width], jagged [lookups], of type */
    rf_column_type type;
    int64_t width; /* dense: values a sample; jagged: 0 */
    int64_t sample_stride, value_stride; /* dense: elements from one sample, or value, to the next */
    int64_t features; /* jagged */
    int64_t lookups; /* jagged */
    const void *
        offsets; /* jagged [features * batch + 1] of offset_type, feature-major, ascending, from 0; else NULL */
    rf_int_type offset_type;
    const float *weights; /* jagged [lookups], may be NULL */
} rf_column_input;

typedef struct rf_embedding_columns_params {
    const int64_t *program; /* [program_words], on the host */
    int64_t program_words;
    const rf_buffer *buffers; /* [n_buffers] */
    int64_t n_buffers;
    const rf_column_input *inputs; /* [n_inputs] */
    int64_t n_inputs;
    int64_t batch; /* samples */
    /* Check offsets, and invalid indices that are errors; if false, such an index counts as dropped, and
     * invalid offsets are undefined behaviour. */
    bool check_bounds;
    rf_dtype output_dtype;
    void *output; /* [batch, output_dim] of output_dtype, completely written */
    int64_t output_dim; /* total of the program's columns */
    int64_t output_stride; /* elements from one sample to the next, >= output_dim */
} rf_embedding_columns_params;

/* Computes all columns. `executor` may be NULL: the caller's thread. Returns when all is written.
 * RF_ERR_VALUE (the program does not fit the inputs or buffers, invalid offsets), RF_ERR_TYPE (a step cannot
 * take the input's type), RF_ERR_INDEX, RF_ERR_MEMORY: `output` is then undefined. */
RF_API rf_status rf_embedding_columns_cpu(const rf_embedding_columns_params *params,
                                          const rf_executor *executor);

/* The result of a started call; `message`: the text of rf_last_error, valid only during this call. */
typedef void (*rf_embedding_columns_done)(void *context, rf_status status, const char *message);

/* As above, by threads of the library, `threads` >= 1 of them at most, which the first call starts and which
 * then stay. Errors that can be found without reading contents are returned at once. Otherwise returns RF_OK,
 * and `done` is called once, when everything is written or an error in the contents was found, on one of the
 * threads, or on the caller's thread if there is nothing to write; it must not wait for another call. All
 * data to which `params` points must stay valid and unchanged until then, but not `params` itself. Calls
 * begin in their order, and may overlap. The output is bit-identical to that of rf_embedding_columns_cpu. */
RF_API rf_status rf_embedding_columns_start_cpu(const rf_embedding_columns_params *params, int32_t threads,
                                                rf_embedding_columns_done done, void *context);

/* Tensors of a call on a GPU are kernel parameters, at most RF_COLUMN_TENSOR_BYTES: dense inputs before all
 * jagged ones, with strides below 2^32, need the least. */
enum {
    RF_COLUMN_TENSOR_BYTES = 32256,
    RF_COLUMN_DENSE_BYTES = 16,
    RF_COLUMN_INPUT_BYTES = 48,
    RF_COLUMN_BUFFER_BYTES = 8
};
/* As above, on a GPU: pointers of inputs, and data of buffers and output, are of that device.
 * program_on_device [program_words], aligned to 16 bytes, must be a copy of the program, which the work reads
 * and nothing checks. Puts the work into the stream without waiting; it may be captured in a CUDA graph.
 * Invalid contents as with rf_embedding_bag_cuda: an index that is an error counts as dropped, a bag with
 * invalid offsets as empty. Too many tensors: RF_ERR_UNSUPPORTED. */
RF_API rf_status rf_embedding_columns_cuda(const rf_embedding_columns_params *params,
                                           const int64_t *program_on_device, const rf_cuda_stream *stream);

/* The columns of tables as one fused call: bag b of the t-th column of a table has lookups offsets[t * batch
 * + b] to offsets[t * batch + b + 1], in the columns' order. Their sum (maximum: their largest), each row
 * times its factor, is the column's pooled row before empty samples are filled and before scale. Filled
 * samples have no lookup; a sample with a substitute row has that lookup. For gradients. */
typedef struct rf_embedding_columns_lookups {
    int64_t *offsets; /* [table columns * batch + 1] */
    int64_t *indices; /* [capacity] of rows in each column's table; undefined past the last offset */
    float *
        factors; /* [capacity]: weights, divided according to the pooling; may be NULL if no column needs them */
    int64_t capacity;
} rf_embedding_columns_lookups;

/* Returns an upper bound of the lookups of all samples without reading contents: dense ones by their width;
 * -1: a cross of two jagged sources has no such bound. */
RF_API rf_status rf_embedding_columns_capacity(const rf_embedding_columns_params *params, int64_t *capacity);
/* Writes offsets, and indices and factors unless `indices` is NULL; output of `params` is not used.
 * RF_ERR_VALUE: more than the capacity. */
RF_API rf_status rf_embedding_columns_lookups_cpu(const rf_embedding_columns_params *params,
                                                  const rf_embedding_columns_lookups *lookups,
                                                  const rf_executor *executor);

/* As above, on a GPU, otherwise as rf_embedding_columns_cuda: offsets, indices and factors are of that
 * device. Lookups beyond the capacity are not written, without an error. Works in memory of `allocator`;
 * NULL: of the driver, which waits for the device to free it. */
RF_API rf_status rf_embedding_columns_lookups_cuda(const rf_embedding_columns_params *params,
                                                   const int64_t *program_on_device,
                                                   const rf_embedding_columns_lookups *lookups,
                                                   const rf_cuda_allocator *allocator,
                                                   const rf_cuda_stream *stream);

/* XXH64 (the specification of xxHash, fast 64-bit variant) of the 8 bytes of an integer, low byte first; of
 * the 16 of two. */
RF_API uint64_t rf_hash_integer(int64_t value, uint64_t seed);
/* As above, for two integers: the 16 bytes one after the other. */
RF_API uint64_t rf_hash_integers(int64_t left, int64_t right, uint64_t seed);

/* XXH64 of `count` byte strings: string i is bytes[offsets[i]] ... bytes[offsets[i + 1] - 1]. hashes [count]:
 * the same bits as int64. A string of 8 bytes has the hash of their integer. `executor` may be NULL.
 * RF_ERR_VALUE: offsets that do not rise from >= 0 to at most n_bytes. */
RF_API rf_status rf_hash_strings_cpu(const void *bytes, int64_t n_bytes, const void *offsets,
                                     rf_int_type offset_type, int64_t count, uint64_t seed, int64_t *hashes,
                                     const rf_executor *executor);

RF_END_DECLARATIONS

#endif
