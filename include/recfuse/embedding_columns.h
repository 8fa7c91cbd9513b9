/* Embedding columns: from raw feature values to pooled rows of tables, many columns in one call (Pan et al., RECom,
 * ASPLOS'23, sections 3 and 5).
 *
 * A column takes the values that each sample has of a feature (or the pairs of values of two features: a cross), turns
 * each into the index of a row by a few steps, and pools the rows; or it writes the values themselves. */
#ifndef RECFUSE_API_EMBEDDING_COLUMNS_H
#define RECFUSE_API_EMBEDDING_COLUMNS_H

#include "recfuse/fused_embedding_bag.h"

RF_BEGIN_DECLARATIONS

/* What a step makes of a value, which is a float32 or an int64: name, text. Where a step below takes a float, an integer
 * is first rounded to the nearest one; where it takes an integer, a float is RF_ERR_TYPE: cast it first.
 *
 *   affine          float: v * a + b, rounded after each of the two
 *   log1p           float: log(1 + v), computed in float64 and then rounded
 *   clip            float: at least a, at most b; a NaN stays one
 *   cast            to an integer, toward zero; beyond int64 the nearest one; a NaN is INT64_MIN
 *   clip_integer    integer: at least a, at most b
 *   modulo          integer: the remainder of the division by a >= 1, in [0, a)
 *   bucketize       float: how many of the b boundaries from boundaries[a] on are less than it; of a NaN: b
 *   bucketize_right float: how many are not greater than it; of a NaN: b
 *   hash            integer: rf_hash_integer(v, b) * a / 2^64, in [0, a), 1 <= a < 2^31
 *   vocabulary      integer: its place among the b words from vocabulary[a] on; -1: it is none of them
 *
 * a and b of affine and clip are float32: their bits are the low half of the int64. */
#define RF_COLUMN_STEP_LIST(X)                      \
    X(RF_COLUMN_AFFINE, "affine")                   \
    X(RF_COLUMN_LOG1P, "log1p")                     \
    X(RF_COLUMN_CLIP, "clip")                       \
    X(RF_COLUMN_CAST, "cast")                       \
    X(RF_COLUMN_CLIP_INTEGER, "clip_integer")       \
    X(RF_COLUMN_MODULO, "modulo")                   \
    X(RF_COLUMN_BUCKETIZE, "bucketize")             \
    X(RF_COLUMN_BUCKETIZE_RIGHT, "bucketize_right") \
    X(RF_COLUMN_HASH, "hash")                       \
    X(RF_COLUMN_VOCABULARY, "vocabulary")

typedef enum rf_column_operation {
#define RF_COLUMN_STEP_ENUM(name, text) name,
    RF_COLUMN_STEP_LIST(RF_COLUMN_STEP_ENUM)
#undef RF_COLUMN_STEP_ENUM
} rf_column_operation;

/* All int64_t here and below, so that int64 tensors [n, fields] are arrays of these. */
typedef struct rf_column_step {
    int64_t operation; /* rf_column_operation */
    int64_t a, b;
} rf_column_step;

/* Which values a sample has, and how each is prepared. Several columns may share a source. */
typedef struct rf_column_source {
    int64_t input; /* which of the call's inputs */
    int64_t slot; /* dense: the first of a sample's values in it; jagged: which of its features */
    int64_t width; /* dense: how many values a sample has, >= 1; jagged: 0 */
    int64_t first_step, n_steps;
} rf_column_source;

/* Weighted, mean: the sum divided by the sum of weights. sqrtn: by the square root of the number of rows or, weighted, of
 * the sum of squared weights. A sum of weights of 0 leaves nothing finite: what is pooled is infinite or NaN, and which
 * of them may differ between a call of columns, which divides the sum, and factors of lookups, which are divided each. */
typedef enum rf_column_pooling {
    RF_COLUMN_SUM,
    RF_COLUMN_MEAN,
    RF_COLUMN_MAX,
    RF_COLUMN_SQRTN
} rf_column_pooling;

/* What becomes of an index that is no row. A number >= 0: that row is read instead. */
enum { RF_COLUMN_INVALID_ERROR = -2, RF_COLUMN_INVALID_DROPPED = -1 };
/* What a sample without an index has; dropped ones are none. A number >= 0: that row's values. */
enum { RF_COLUMN_EMPTY_FILL = -1 };

/* One column: output[sample, output_column ... + n_dims] = scale * pooled[first_dim ... + n_dims].
 * Numeric (buffer -1): the left source's values as floats; dense, n_dims is its width, not scaled. */
typedef struct rf_column {
    int64_t left; /* its source */
    int64_t right; /* of a cross the other source, else -1 */
    int64_t
        cross_buckets; /* of a cross: rf_hash_integers(l, r, cross_seed) * cross_buckets / 2^64, < 2^31; else 0 */
    int64_t cross_seed;
    int64_t buffer; /* which of the call's buffers has its table; -1: numeric */
    int64_t weight_offset; /* first element of the table in that buffer */
    int64_t rows, dim;
    int64_t pooling; /* rf_column_pooling */
    int64_t
        weighted; /* 1: rows times the weights of the left source's input, which is jagged; no cross, no max */
    int64_t invalid; /* RF_COLUMN_INVALID_*, or a row */
    int64_t empty; /* RF_COLUMN_EMPTY_FILL, or a row (times 1, if weighted) */
    int64_t fill; /* the value of empty samples: the bits of a float32; not scaled */
    int64_t first_dim, n_dims; /* of the table's columns those that are written */
    int64_t scale; /* the bits of a float32 */
    int64_t output_column; /* first column in the output: where the column before ends */
} rf_column;

/* All that is known of the columns before a batch comes. */
typedef struct rf_columns {
    const rf_column *columns; /* [n_columns], in the order of the output */
    int64_t n_columns;
    const rf_column_source *sources; /* [n_sources] */
    int64_t n_sources;
    const rf_column_step *steps; /* [n_steps] */
    int64_t n_steps;
    const float *boundaries; /* [n_boundaries]; those of a step rise, or stay, and none is NaN */
    int64_t n_boundaries;
    const int64_t *vocabulary; /* [n_vocabulary]; words of a step differ */
    int64_t n_vocabulary;
} rf_columns;

/* Checks columns and lays them out for calls: *program [*words] is the caller's, to be freed below. It has no pointers:
 * it may be copied, stored and sent to a device. RF_ERR_VALUE names the column. */
RF_API rf_status rf_embedding_columns_program(const rf_columns *columns, int64_t **program, int64_t *words);
/* Frees a program; NULL is fine. */
RF_API void rf_embedding_columns_program_free(int64_t *program);

typedef enum rf_column_type { RF_COLUMN_FLOAT32, RF_COLUMN_INT32, RF_COLUMN_INT64 } rf_column_type;

/* A tensor of features. Dense: a sample has `width` values; jagged: it has a bag of each of `features`. */
typedef struct rf_column_input {
    const void *values; /* dense [batch, width], jagged [lookups], of type */
    rf_column_type type;
    int64_t width; /* dense: values a sample; jagged: 0 */
    int64_t sample_stride, value_stride; /* dense: elements from one sample, or value, to the next */
    int64_t features; /* jagged */
    int64_t lookups; /* jagged */
    const void
        *offsets; /* jagged [features * batch + 1] of offset_type, feature-major, rising, from 0; else NULL */
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
    bool
        check_bounds; /* of invalid indices that are errors, and of offsets; off: such an index counts as dropped, bad
                        * offsets are undefined behaviour */
    rf_dtype output_dtype;
    void *output; /* [batch, output_dim] of output_dtype, wholly written */
    int64_t output_dim; /* as the program's columns add up to */
    int64_t output_stride; /* elements from one sample to the next, >= output_dim */
} rf_embedding_columns_params;

/* Computes all columns. `executor` may be NULL: the caller's thread. Returns when all is written. RF_ERR_VALUE (the
 * program does not fit the inputs or buffers, bad offsets), RF_ERR_TYPE (a step cannot take the input's type),
 * RF_ERR_INDEX, RF_ERR_MEMORY: `output` is then undefined. */
RF_API rf_status rf_embedding_columns_cpu(const rf_embedding_columns_params *params,
                                          const rf_executor *executor);

/* What a call that was started ended with; `message`: what rf_last_error would say, for the time of this call alone. */
typedef void (*rf_embedding_columns_done)(void *context, rf_status status, const char *message);

/* The same by threads of the library, `threads` >= 1 of them at most, which are started at the first call and then stay. What
 * can be known without a look at contents is returned at once. Else RF_OK, and `done` is called once, when all is written or
 * an error in the contents was found, on one of the threads, or on the caller's where there is nothing to write; it must
 * not wait for another call. Before it is called all that `params` points to must stay as it is, but not `params` itself.
 * Calls begin in their order, and may overlap. Bits of the output are those of rf_embedding_columns_cpu. */
RF_API rf_status rf_embedding_columns_start_cpu(const rf_embedding_columns_params *params, int32_t threads,
                                                rf_embedding_columns_done done, void *context);

/* Tensors of a call on a GPU travel with it, in at most RF_COLUMN_TENSOR_BYTES: dense inputs that come before all jagged
 * ones, with strides below 2^32, need the least. */
enum {
    RF_COLUMN_TENSOR_BYTES = 32256,
    RF_COLUMN_DENSE_BYTES = 16,
    RF_COLUMN_INPUT_BYTES = 48,
    RF_COLUMN_BUFFER_BYTES = 8
};
/* The same on a GPU: pointers of inputs, and data of buffers and output, are of that device. program_on_device
 * [program_words], aligned to 16 bytes: a copy of the program, which the work reads; that it is one is not looked at.
 * Put into the stream and not waited for; may be captured in a CUDA graph. Bad contents as with rf_embedding_bag_cuda:
 * an index that is an error counts as dropped, a bag with bad offsets as empty. More tensors than have room:
 * RF_ERR_UNSUPPORTED. */
RF_API rf_status rf_embedding_columns_cuda(const rf_embedding_columns_params *params,
                                           const int64_t *program_on_device, const rf_cuda_stream *stream);

/* The columns of tables as one fused call: bag b of the t-th column of a table has lookups offsets[t * batch + b] to
 * offsets[t * batch + b + 1], in the columns' order; their sum (maximum: their largest), each row times its factor, is
 * the column's pooled row before empty samples are filled and before scale. Samples that are filled have no lookup; one
 * that is given a row has that. For gradients. */
typedef struct rf_embedding_columns_lookups {
    int64_t *offsets; /* [table columns * batch + 1] */
    int64_t
        *indices; /* [capacity] of rows in each column's table; those behind the last offset are undefined */
    float *
        factors; /* [capacity]: weights, divided as the pooling says; may be NULL: where no column needs them */
    int64_t capacity;
} rf_embedding_columns_lookups;

/* How many lookups all samples have at most, without a look at contents: dense ones by their width; -1: a cross of two
 * jagged sources has no such bound. */
RF_API rf_status rf_embedding_columns_capacity(const rf_embedding_columns_params *params, int64_t *capacity);
/* Writes offsets, and indices and factors unless `indices` is NULL; output of `params` is not used. RF_ERR_VALUE: more
 * than the capacity. */
RF_API rf_status rf_embedding_columns_lookups_cpu(const rf_embedding_columns_params *params,
                                                  const rf_embedding_columns_lookups *lookups,
                                                  const rf_executor *executor);

/* The same on a GPU, as rf_embedding_columns_cuda otherwise: offsets, indices and factors are of that device. Lookups beyond
 * the capacity are not written, and no error. Works in memory of `allocator`; NULL: the driver, which waits for the device
 * to free. */
RF_API rf_status rf_embedding_columns_lookups_cuda(const rf_embedding_columns_params *params,
                                                   const int64_t *program_on_device,
                                                   const rf_embedding_columns_lookups *lookups,
                                                   const rf_cuda_allocator *allocator,
                                                   const rf_cuda_stream *stream);

/* XXH64 (the specification of xxHash, fast 64-bit variant) of the 8 bytes of an integer, low byte first; of the 16 of two. */
RF_API uint64_t rf_hash_integer(int64_t value, uint64_t seed);
/* As above, of two integers: the 16 bytes one after the other. */
RF_API uint64_t rf_hash_integers(int64_t left, int64_t right, uint64_t seed);

/* XXH64 of `count` byte strings: string i is bytes[offsets[i]] ... bytes[offsets[i + 1] - 1]. hashes [count]: the same
 * bits as int64. A string of 8 bytes has the hash of their integer. `executor` may be NULL. RF_ERR_VALUE: offsets that
 * do not rise from >= 0 to at most n_bytes. */
RF_API rf_status rf_hash_strings_cpu(const void *bytes, int64_t n_bytes, const void *offsets,
                                     rf_int_type offset_type, int64_t count, uint64_t seed, int64_t *hashes,
                                     const rf_executor *executor);

RF_END_DECLARATIONS

#endif
