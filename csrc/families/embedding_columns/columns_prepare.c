/* Prepares the arguments of a call's kernels: checks, tensors, partition of the samples. */
#include <inttypes.h>

#include "core/validate.h"
#include "families/embedding_columns/embedding_columns.h"

static const char operator_name[] = "embedding_columns";

enum {
    LEAST_SAMPLES = 8,
    BLOCKS_OF_SM = 3 /* that keep it busy */,
    BAG_BLOCKS_OF_SM = 4,
    MOST_SHARED = 48 << 10
};

_Static_assert(RF_COLUMN_TENSOR_BYTES == RF_COLUMNS_MOST_UNITS * RF_COLUMNS_UNIT &&
                   RF_COLUMN_DENSE_BYTES == sizeof(rf_columns_dense) &&
                   RF_COLUMN_INPUT_BYTES == sizeof(rf_columns_tensor) &&
                   RF_COLUMN_BUFFER_BYTES == sizeof(rf_columns_buffer),
               "the sizes in the public header");

/* Returns true if an input takes one unit. */
static bool is_short(const rf_column_input *input) {
    return input->width > 0 && input->sample_stride >= 0 && input->sample_stride <= UINT32_MAX &&
           input->value_stride >= 0 && input->value_stride <= UINT32_MAX;
}

/* Counts the leading inputs of one unit. */
static int64_t count_short(const rf_embedding_columns_params *params) {
    int64_t count = 0;
    while (count < params->n_inputs && is_short(&params->inputs[count])) count++;
    return count;
}

/* Returns the units before the buffers, and with them. */
static int64_t input_units(const rf_embedding_columns_params *params, int64_t n_short) {
    return n_short + (params->n_inputs - n_short) * RF_COLUMNS_UNITS_OF_TENSOR;
}
static int64_t all_units(const rf_embedding_columns_params *params, int64_t n_short) {
    return input_units(params, n_short) +
           (params->n_buffers + RF_COLUMNS_BUFFERS_OF_UNIT - 1) / RF_COLUMNS_BUFFERS_OF_UNIT;
}

static rf_status check_limits(const rf_embedding_columns_params *params, const rf__columns *columns,
                              const int64_t *program_on_device) {
    const rf_columns_header *header = columns->header;
    const int64_t task_words = sizeof(rf_columns_task) / sizeof(int64_t);
    const int64_t n_short = count_short(params);
    RF__REFUSE_IF(params->n_inputs > RF_COLUMNS_MOST_UNITS ||
                      params->n_buffers > RF_COLUMNS_MOST_UNITS * RF_COLUMNS_BUFFERS_OF_UNIT ||
                      all_units(params, n_short) > RF_COLUMNS_MOST_UNITS,
                  RF_ERR_UNSUPPORTED,
                  "the call has " RF__I64 " inputs, of which " RF__I64
                  " are dense and come first, and " RF__I64
                  " buffers; expected %d bytes of them at most, where such a dense input has %d, "
                  "another input %d and a buffer %d. Pack them into fewer inputs or buffers.",
                  params->n_inputs, n_short, params->n_buffers, (int)RF_COLUMN_TENSOR_BYTES,
                  (int)RF_COLUMN_DENSE_BYTES, (int)RF_COLUMN_INPUT_BYTES, (int)RF_COLUMN_BUFFER_BYTES);
    RF__REFUSE_IF(params->output_stride > UINT32_MAX / 8, RF_ERR_UNSUPPORTED,
                  "output_stride is " RF__I64 "; expected at most %u on a GPU", params->output_stride,
                  (unsigned)(UINT32_MAX / 8));
    RF__REFUSE_IF(program_on_device == NULL || (uintptr_t)program_on_device % 16 != 0, RF_ERR_VALUE,
                  "program_on_device is %p; expected a copy of the program, aligned to 16 bytes",
                  (const void *)program_on_device);
    RF__REFUSE_IF(header->tasks_at < 0 || header->tasks_at > header->words || header->n_tasks < 0 ||
                      header->n_tasks > (header->words - header->tasks_at) / task_words ||
                      header->n_bag_tasks < 0 || header->n_bag_tasks > header->n_tasks ||
                      header->body_words < 0 || header->body_words > header->words ||
                      header->task_columns < 0 || header->task_columns > RF_COLUMNS_LANES,
                  RF_ERR_VALUE, "%s",
                  "program has tasks beyond its words, so it was changed after it was made");
    return RF_OK;
}

/* The elements of each table that all addresses allow to be moved at once. */
static int32_t table_vector(const rf_embedding_columns_params *params) {
    int32_t vector = RF_COLUMNS_MOST_VECTOR;
    for (int64_t i = 0; i < params->n_buffers; i++)
        while (vector > 1 &&
               !rf__elements_aligned((uintptr_t)params->buffers[i].data, params->buffers[i].dtype, vector))
            vector /= 2;
    return vector;
}

/* And those of the output's rows. */
static int32_t output_vector(const rf_embedding_columns_params *params) {
    int32_t vector = RF_COLUMNS_MOST_VECTOR;
    while (vector > 1 && (params->output_stride % vector != 0 ||
                          !rf__elements_aligned((uintptr_t)params->output, params->output_dtype, vector)))
        vector /= 2;
    return vector;
}

/* Returns as many samples per block as leave each SM some blocks. */
static int32_t samples_of(const rf__gpu *gpu, int64_t tasks, int64_t batch) {
    int32_t samples = RF_COLUMNS_MOST_SAMPLES;
    while (samples > LEAST_SAMPLES &&
           (batch + samples - 1) / samples * tasks < (int64_t)BLOCKS_OF_SM * gpu->sms)
        samples /= 2;
    return samples;
}

/* Returns, for tasks of bags, as few samples as let all of these blocks run concurrently with the others: the
 * lookups of a bag are handled in sequence, and so are the bags of a group of threads. */
static int32_t bag_samples_of(const rf__gpu *gpu, int64_t tasks, int64_t batch, int32_t samples) {
    while (samples > LEAST_SAMPLES &&
           (batch + samples / 2 - 1) / (samples / 2) * tasks <= (int64_t)BAG_BLOCKS_OF_SM * gpu->sms)
        samples /= 2;
    return samples;
}

static int64_t tiles_of(int64_t batch, int32_t samples) { return (batch + samples - 1) / samples; }

static void tensors_put(const rf_embedding_columns_params *params, rf_columns_args *args) {
    for (int64_t i = 0; i < args->n_dense; i++) {
        const rf_column_input *input = &params->inputs[i];
        args->tensors[i] = (rf_columns_dense){.values = (rf_u64)(uintptr_t)input->values |
                                                        (rf_u64)input->type << RF_COLUMNS_HIGH_BYTE,
                                              .sample_stride = (rf_u32)input->sample_stride,
                                              .value_stride = (rf_u32)input->value_stride};
    }
    rf_columns_tensor *tensors = (rf_columns_tensor *)(args->tensors + args->n_dense);
    for (int64_t i = args->n_dense; i < params->n_inputs; i++) {
        const rf_column_input *input = &params->inputs[i];
        tensors[i - args->n_dense] =
            (rf_columns_tensor){.values = input->values,
                                .offsets = input->offsets,
                                .weights = input->weights,
                                .sample_stride = input->width > 0 ? input->sample_stride : input->lookups,
                                .value_stride = input->width > 0 ? input->value_stride : 1,
                                .type = (rf_i32)input->type,
                                .offset_type = (rf_i32)input->offset_type};
    }
    rf_columns_buffer *buffers = (rf_columns_buffer *)(args->tensors + args->buffers_at);
    for (int64_t i = 0; i < params->n_buffers; i++)
        buffers[i] = (rf_columns_buffer)(uintptr_t)params->buffers[i].data |
                     (rf_columns_buffer)params->buffers[i].dtype << RF_COLUMNS_HIGH_BYTE;
}

/* Returns the smallest size, out of those for which kernels are compiled, with at least this many units. */
static int32_t units_of(int64_t units) {
    static const int32_t capacities[] = {RF_COLUMNS_FEW_UNITS, RF_COLUMNS_SOME_UNITS, RF_COLUMNS_MANY_UNITS};
    for (size_t i = 0; i < sizeof capacities / sizeof *capacities; i++)
        if (units <= capacities[i]) return capacities[i];
    return RF_COLUMNS_MOST_UNITS;
}

/* Bytes of inputs, each read once, and of the program. Lengths of jagged inputs are those of their
 * tensors. */
static int64_t input_bytes(const rf_embedding_columns_params *params) {
    int64_t bytes = params->program_words * (int64_t)sizeof(int64_t);
    for (int64_t i = 0; i < params->n_inputs; i++) {
        const rf_column_input *input = &params->inputs[i];
        const int64_t values = input->width > 0 ? params->batch * input->width : input->lookups;
        bytes += values * (input->type == RF_COLUMN_INT64 ? 8 : 4);
        if (input->weights != NULL) bytes += values * (int64_t)sizeof(float);
        if (input->offsets != NULL) bytes += (params->batch + 1) * (input->offset_type == RF_INT64 ? 8 : 4);
    }
    return bytes;
}

rf_status rf__columns_prepare(const rf__gpu *gpu, const rf_embedding_columns_params *params,
                              const int64_t *program_on_device, bool with_output, rf__launches *launches,
                              rf__columns_launch *launch, rf_columns_args *args) {
    rf__columns columns;
    *launch = (rf__columns_launch){0};
    RF_CHECK(rf__check_columns(params, with_output, &columns));
    RF_CHECK(check_limits(params, &columns, program_on_device));
    const rf_columns_header *header = columns.header;
    /* A program has its own error word for each set of tables. */
    launches->owner = params->n_buffers > 0 ? params->buffers[0].data : params->program;
    launches->shape = (uint64_t)params->program_words;
    launches->checks = params->check_bounds;
    launch->n_tables = header->n_tables;
    launch->has_bags = header->n_bag_tasks > 0;
    launch->read_bytes = input_bytes(params);
    if (params->batch == 0 || header->n_tasks == 0) return RF_OK;
    args->program = program_on_device;
    args->tasks = (const rf_columns_task *)(program_on_device + header->tasks_at);
    args->output = params->output;
    args->output_pitch = rf__elements_bytes(params->output_dtype, params->output_stride);
    args->batch = params->batch;
    args->boundaries = (const float *)(program_on_device + header->boundaries_at);
    args->vocabulary = program_on_device + header->vocabulary_at;
    args->samples = samples_of(gpu, header->n_tasks, params->batch);
    args->bag_samples = bag_samples_of(gpu, header->n_bag_tasks, params->batch, args->samples);
    const int64_t tiles = tiles_of(params->batch, args->samples);
    const int64_t bag_tiles = tiles_of(params->batch, args->bag_samples);
    RF__REFUSE_IF(bag_tiles * header->n_tasks > INT32_MAX, RF_ERR_UNSUPPORTED,
                  RF__I64 " samples of " RF__I64 " columns need more than 2^31 - 1 blocks. Cut the batch.",
                  params->batch, header->n_columns);
    args->tiles = (rf_i32)tiles;
    args->bag_tiles = (rf_i32)bag_tiles;
    args->bag_tasks = (rf_i32)header->n_bag_tasks;
    args->vector = with_output ? table_vector(params) : RF_COLUMNS_MOST_VECTOR;
    args->output_vector = with_output ? output_vector(params) : RF_COLUMNS_MOST_VECTOR;
    args->n_dense = (rf_i32)count_short(params);
    args->buffers_at = (rf_i32)input_units(params, args->n_dense);
    args->unused = 0;
    tensors_put(params, args);
    args->errors = (rf_error_word){0};
    launch->units = units_of(all_units(params, args->n_dense));
    int64_t scratch_bytes = header->task_columns * (args->samples + 1) * (int64_t)sizeof(uint64_t);
    if (header->n_bag_tasks > 0 && scratch_bytes < RF_COLUMNS_BAGS_BYTES)
        scratch_bytes = RF_COLUMNS_BAGS_BYTES;
    const int64_t shared =
        (int64_t)sizeof(rf_columns_task) + header->body_words * (int64_t)sizeof(int64_t) + scratch_bytes;
    RF__REFUSE_IF(shared > MOST_SHARED, RF_ERR_UNSUPPORTED,
                  "a column has so many steps that a block needs " RF__I64
                  " bytes of shared memory; expected "
                  "at most %d",
                  shared, (int)MOST_SHARED);
    launch->shared_bytes = (int32_t)shared;
    launch->blocks =
        (uint32_t)(tiles * (header->n_tasks - header->n_bag_tasks) + bag_tiles * header->n_bag_tasks);
    return RF_OK;
}
