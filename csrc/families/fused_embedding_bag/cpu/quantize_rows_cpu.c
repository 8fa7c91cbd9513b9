/* rf_quantize_rows_cpu, rf_dequantize_rows_cpu. Threads take rows; a row is read in blocks, first for its range and
 * then for its codes, so no memory of a row's size is needed. */
#include <math.h>
#include <pthread.h>
#include <string.h>

#include "core/half.h"
#include "core/isa.h"
#include "families/fused_embedding_bag/cpu/pool.h"

enum { BLOCK = 64, GRAIN_ELEMENTS = 65536 };

static const float most = 65504; /* the largest half */

typedef struct task {
    const char *operator_name;
    const rf_float_rows *floats;
    const rf_quantized_rows *codes;
    const rf__pool_kernels *kernels;
    rf__row_format float_row;
    pthread_mutex_t lock;
    double largest_error; /* under `lock`, as the next */
    int64_t bad_row, bad_column; /* the first value that has no code; bad_row INT64_MAX: none */
    double bad_value;
} task;

static float half_value(uint16_t bits) { return rf__f16_to_f32(bits); }

/* Returns the largest half that is not above a value. Requires a value within the range of halves. */
static uint16_t half_below(float value) {
    const uint16_t nearest = rf__f32_to_f16(value);
    if (half_value(nearest) <= value) return nearest;
    if ((nearest & 0x7fffu) == 0) return 0x8001u; /* the least below zero */
    return (uint16_t)(nearest & 0x8000u ? nearest + 1 : nearest - 1);
}

/* Returns the least half, 0 or more, by which code `levels` reaches from `bias` to `largest`. */
static uint16_t scale_of(double bias, double largest, double levels) {
    const uint16_t nearest = rf__f32_to_f16((float)((largest - bias) / levels));
    uint16_t bits =
        nearest > 0 ? (uint16_t)(nearest - 1) : 0; /* the conversion to float may have rounded up */
    while ((double)half_value(bits) * levels + bias < largest) bits++;
    return bits;
}

static const char *float_block(const task *of, int64_t row, int64_t column) {
    return (const char *)of->floats->weight + rf__row_offset(&of->float_row, row, column);
}

static int64_t block_columns(const task *of, int64_t column) {
    const int64_t left = of->codes->dim - column;
    return left < BLOCK ? left : BLOCK;
}

static void report(task *of, int64_t row, int64_t column, double value) {
    pthread_mutex_lock(&of->lock);
    if (row < of->bad_row) {
        of->bad_row = row;
        of->bad_column = column;
        of->bad_value = value;
    }
    pthread_mutex_unlock(&of->lock);
}

/* Finds the least and the largest value of a row; false: a value that has no code is reported. */
static bool row_range(task *of, int64_t row, float *least, float *largest) {
    float values[BLOCK];
    *least = INFINITY, *largest = -INFINITY;
    for (int64_t column = 0; column < of->codes->dim; column += BLOCK) {
        const int64_t columns = block_columns(of, column);
        of->kernels->load(float_block(of, row, column), of->floats->dtype, columns, values);
        for (int64_t i = 0; i < columns; i++) {
            if (!(fabsf(values[i]) <= most)) {
                report(of, row, column + i, values[i]);
                return false;
            }
            if (values[i] < *least) *least = values[i];
            if (values[i] > *largest) *largest = values[i];
        }
    }
    return true;
}

/* Writes the codes of `columns` values, and returns the largest error. */
static double block_codes(const float *values, int64_t columns, double scale, double bias, int levels,
                          uint8_t *codes) {
    double error = 0;
    for (int64_t i = 0; i < columns; i++) {
        const double value = values[i];
        const double nearest = scale > 0 ? (value - bias) / scale + 0.5 : 0.0;
        const int code = nearest < levels ? (int)nearest : levels;
        const double distance = fabs(value - (scale * code + bias));
        if (distance > error) error = distance;
        codes[i] = (uint8_t)code;
    }
    return error;
}

/* Quantises a row; false: a value has no code. */
static bool quantize_row(task *of, int64_t row, double *error) {
    const rf_quantized_rows *to = of->codes;
    const bool is_int4 = to->dtype == RF_INT4_ROWS;
    const int levels = is_int4 ? 15 : 255;
    uint8_t codes[BLOCK];
    float values[BLOCK], least = 0, largest = 0;
    if (!row_range(of, row, &least, &largest)) return false;
    const uint16_t bias = half_below(least);
    const uint16_t scale = scale_of(half_value(bias), largest, levels);
    const uint16_t parameters[2] = {scale, bias};
    memcpy((char *)to->parameters + row * to->parameters_pitch, parameters, sizeof parameters);
    for (int64_t column = 0; column < to->dim; column += BLOCK) {
        const int64_t columns = block_columns(of, column);
        of->kernels->load(float_block(of, row, column), of->floats->dtype, columns, values);
        const double of_block =
            block_codes(values, columns, half_value(scale), half_value(bias), levels, codes);
        if (of_block > *error) *error = of_block;
        for (int64_t i = 0; is_int4 && i < columns / 2; i++)
            codes[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
        memcpy((char *)to->codes + row * to->pitch + rf__elements_bytes(to->dtype, column), codes,
               (size_t)rf__elements_bytes(to->dtype, columns));
    }
    return true;
}

static void quantize(int64_t from, int64_t end, void *context) {
    task *of = context;
    double error = 0;
    for (int64_t row = from; row < end; row++)
        if (!quantize_row(of, row, &error)) break;
    pthread_mutex_lock(&of->lock);
    if (error > of->largest_error) of->largest_error = error;
    pthread_mutex_unlock(&of->lock);
}

static void dequantize_row(const task *of, int64_t row) {
    const rf_quantized_rows *from = of->codes;
    const char *at = (const char *)from->parameters + row * from->parameters_pitch;
    const char *codes = (const char *)from->codes + row * from->pitch;
    float values[BLOCK];
    for (int64_t column = 0; column < from->dim; column += BLOCK) {
        const int64_t columns = block_columns(of, column);
        of->kernels->load_codes(rf__element_at(codes, from->dtype, column), from->dtype, at,
                                from->parameters_dtype, columns, values);
        of->kernels->store((char *)of->floats->weight + rf__row_offset(&of->float_row, row, column),
                           of->floats->dtype, columns, values);
    }
}

static void dequantize(int64_t from, int64_t end, void *context) {
    for (int64_t row = from; row < end; row++) dequantize_row(context, row);
}

/* Bytes of each row, `pitch` bytes from the row before. */
typedef struct span {
    uintptr_t at;
    int64_t pitch, bytes;
} span;

/* Returns true if no row of one shares a byte with a row of the other; both have `rows` rows. */
static bool are_apart(span one, span other, int64_t rows) {
    if (rows == 0 || one.bytes == 0 || other.bytes == 0) return true;
    const uintptr_t one_end = one.at + (uintptr_t)((rows - 1) * one.pitch + one.bytes);
    const uintptr_t other_end = other.at + (uintptr_t)((rows - 1) * other.pitch + other.bytes);
    if (one_end <= other.at || other_end <= one.at) return true;
    if (rows == 1 || one.pitch != other.pitch) return false;
    int64_t from = (int64_t)(other.at - one.at) % one.pitch; /* of the other's bytes after the one's */
    if (from < 0) from += one.pitch;
    return from >= one.bytes && from + other.bytes <= one.pitch;
}

static rf_status check(const char *operator_name, const rf_float_rows *floats,
                       const rf_quantized_rows *codes) {
    RF__REFUSE_IF(codes->dtype != RF_INT8_ROWS && codes->dtype != RF_INT4_ROWS, RF_ERR_TYPE,
                  "dtype of codes is %d; expected RF_INT8_ROWS or RF_INT4_ROWS", (int)codes->dtype);
    RF__REFUSE_IF(codes->rows < 0 || codes->dim < 0 || (codes->dtype == RF_INT4_ROWS && codes->dim % 2 != 0),
                  RF_ERR_VALUE,
                  "the table has " RF__I64 " rows and " RF__I64
                  " columns; expected 0 or more, and for int4 an even number of columns",
                  codes->rows, codes->dim);
    RF_CHECK(rf__check_dtype(operator_name, "dtype of weight", floats->dtype));
    const bool is_empty = codes->rows == 0;
    RF__REFUSE_IF(!is_empty && (codes->parameters == NULL ||
                                (codes->dim > 0 && (codes->codes == NULL || floats->weight == NULL))),
                  RF_ERR_VALUE, "%s is NULL; expected a pointer to its elements",
                  codes->parameters == NULL ? "parameters"
                  : codes->codes == NULL    ? "codes"
                                            : "weight");
    const int64_t bytes = rf__elements_bytes(codes->dtype, codes->dim);
    RF__REFUSE_IF(codes->rows > 1 &&
                      (codes->pitch < bytes || floats->stride < codes->dim ||
                       codes->parameters_pitch < rf__parameters_bytes(codes->parameters_dtype)),
                  RF_ERR_VALUE,
                  "rows are " RF__I64 " bytes of codes, " RF__I64 " bytes of parameters and " RF__I64
                  " floats apart; expected at least a row, as in contiguous tensors",
                  codes->pitch, codes->parameters_pitch, floats->stride);
    const span of_codes = {(uintptr_t)codes->codes, codes->pitch, bytes};
    const span of_parameters = {(uintptr_t)codes->parameters, codes->parameters_pitch,
                                rf__parameters_bytes(codes->parameters_dtype)};
    const span of_floats = {(uintptr_t)floats->weight, rf__elements_bytes(floats->dtype, floats->stride),
                            rf__elements_bytes(floats->dtype, codes->dim)};
    RF_FAIL_IF(!are_apart(of_codes, of_parameters, codes->rows) ||
                   !are_apart(of_codes, of_floats, codes->rows) ||
                   !are_apart(of_parameters, of_floats, codes->rows),
               RF_ERR_VALUE,
               "recfuse.%s: weight, codes and parameters share bytes; expected rows that do not overlap",
               operator_name);
    return RF_OK;
}

static rf_status run(task *of, const rf_executor *executor,
                     void (*body)(int64_t from, int64_t end, void *context)) {
    const char *operator_name = of->operator_name;
    const int64_t rows = of->codes->rows, dim = of->codes->dim > 0 ? of->codes->dim : 1;
    const int64_t grain = GRAIN_ELEMENTS / dim > 0 ? GRAIN_ELEMENTS / dim : 1;
    rf_status status = RF_OK;
    of->kernels = rf__isa_in_use()->kernels;
    of->float_row = rf__row_format_of(of->floats->dtype, of->codes->dim, of->floats->stride);
    of->bad_row = INT64_MAX;
    if (rows == 0) return RF_OK;
    RF__REFUSE_IF(pthread_mutex_init(&of->lock, NULL) != 0, RF_ERR_MEMORY, "no mutex for " RF__I64 " rows",
                  rows);
    if (executor == NULL || executor->threads <= 1 || rows <= grain)
        body(0, rows, of);
    else if (executor->parallel_for(0, rows, grain, body, of) != 0)
        status = rf__fail(RF_ERR_INTERNAL, "recfuse.%s: the thread pool failed", operator_name);
    pthread_mutex_destroy(&of->lock);
    return status;
}

rf_status rf_quantize_rows_cpu(const rf_float_rows *from, const rf_quantized_rows *to, double *largest_error,
                               const rf_executor *executor) {
    static const char operator_name[] = "quantize_rows";
    task of = {.operator_name = operator_name, .floats = from, .codes = to};
    RF_CHECK(check(operator_name, from, to));
    RF__REFUSE_IF(to->parameters_dtype != RF_FLOAT16, RF_ERR_TYPE,
                  "parameters_dtype is %d; expected RF_FLOAT16", (int)to->parameters_dtype);
    RF_CHECK(run(&of, executor, quantize));
    RF__REFUSE_IF(of.bad_row != INT64_MAX, RF_ERR_VALUE,
                  "weight[" RF__I64 ", " RF__I64 "] is %g; expected finite values from -65504 to 65504, the "
                  "range of float16",
                  of.bad_row, of.bad_column, of.bad_value);
    if (largest_error != NULL) *largest_error = of.largest_error;
    return RF_OK;
}

rf_status rf_dequantize_rows_cpu(const rf_quantized_rows *from, const rf_float_rows *to,
                                 const rf_executor *executor) {
    static const char operator_name[] = "dequantize_rows";
    task of = {.operator_name = operator_name, .floats = to, .codes = from};
    RF_CHECK(check(operator_name, to, from));
    RF_CHECK(rf__check_dtype(operator_name, "dtype of parameters", from->parameters_dtype));
    return run(&of, executor, dequantize);
}
