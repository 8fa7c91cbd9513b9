/* Commands about csrc/gpu/driver: errors that kernels record, launches and tensor maps as the driver gets
 * them. */
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "../check.h"
#include "gpu/driver/error_check.h"
#include "gpu/driver/launch.h"
#include "gpu/driver/tensor_map.h"
#include "program.h"

static const rf__cuda_device *gpu_of_errors;
static rf__cuda_error_word word_of_errors;
static atomic_int raised;

static void *raise_error(void *argument) {
    (void)argument;
    const rf_status status = rf__cuda_check_word(gpu_of_errors, word_of_errors, NULL);
    CHECK(status == RF_OK || status == RF_ERR_INDEX, "%s", rf_last_error());
    if (status == RF_ERR_INDEX) atomic_fetch_add(&raised, 1);
    return NULL;
}

/* As rf_report of gpu/device/common.cuh; returns true if it was the first report. */
static bool record_write(const rf__cuda_error_word *word, rf_error_record record) {
    rf_u32 *claimed = word->on_device.claimed;
    rf_error_record *to = word->on_device.record;
    uint32_t before = __atomic_load_n(&to->raised, __ATOMIC_ACQUIRE);
    const size_t fields = offsetof(rf_error_record, raised);
    if (!__atomic_compare_exchange_n(claimed, &before, before + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        return false;
    record.ready = RF_ERROR_NONE;
    memcpy(to, &record, fields);
    __atomic_store_n(&to->ready, RF_ERROR_READY, __ATOMIC_RELEASE);
    return true;
}

static void expect_error(const rf__cuda_device *gpu, const rf__cuda_error_word *word, rf_status want,
                         const char *words) {
    const rf_status status = rf__cuda_check_word(gpu, *word, NULL);
    CHECK(status == want && strstr(rf_last_error(), words) != NULL, "no \"%s\" in: %s", words,
          rf_last_error());
    CHECK(rf__cuda_check_word(gpu, *word, NULL) == RF_OK, "raised twice");
}

/* errors_of_two: an error of one model's calls is not raised by another model's, and no error is lost. */
static void errors_of_two(char **arguments) {
    (void)arguments;
    const rf__cuda_device *gpu = NULL;
    static const float tables[2][4];
    CHECK(rf__cuda_device_get(0, &gpu) == RF_OK, "%s", rf_last_error());
    const rf__cuda_error_word first = rf__cuda_error_word_of(&gpu->errors, tables[0], 10);
    const rf__cuda_error_word second = rf__cuda_error_word_of(&gpu->errors, tables[1], 10);
    const rf__cuda_error_word other_shape = rf__cuda_error_word_of(&gpu->errors, tables[0], 11);
    const rf__cuda_error_word again = rf__cuda_error_word_of(&gpu->errors, tables[0], 10);
    CHECK(first.record != second.record && first.record != other_shape.record, "one word for two");
    CHECK(first.record == again.record && first.on_device.claimed == again.on_device.claimed,
          "another word for the same table");
    rf_error_record record = {.argument = RF_ARGUMENT_indices, .feature = -1, .value = 12, .limit = 10};
    const int memsets = driver_calls("cuMemsetD32Async");
    CHECK(record_write(&first, record), "not recorded");
    CHECK(rf__cuda_check_word(gpu, second, NULL) == RF_OK, "a good call raised another's error");
    record.value = 13;
    CHECK(record_write(&second, record), "another's error hid this one");
    CHECK(!record_write(&second, record), "the first one was written over");
    expect_error(gpu, &first, RF_ERR_INDEX, "is 12");
    record.value = 14; /* of earlier work in a stream, which has not run since */
    CHECK(record_write(&first, record), "lost between raising and clearing");
    CHECK(driver_calls("cuMemsetD32Async") == memsets, "a stream had to clear a word");
    CHECK(rf_cuda_check(0) == RF_ERR_INDEX && strstr(rf_last_error(), "left 1 more") != NULL, "%s",
          rf_last_error());
    CHECK(rf_cuda_check(0) == RF_ERR_INDEX && strstr(rf_last_error(), "more") == NULL, "%s", rf_last_error());
    CHECK(rf_cuda_check(0) == RF_OK, "%s", rf_last_error());

    /* More tables than words: some share a word, and every error is still raised. */
    for (uintptr_t i = 1; i <= 3 * RF__CUDA_ERROR_WORDS; i++) {
        const rf__cuda_error_word word = rf__cuda_error_word_of(&gpu->errors, (const void *)(i * 4096), i);
        CHECK(record_write(&word, record), "table %d cannot record", (int)i);
        expect_error(gpu, &word, RF_ERR_INDEX, "is 14");
    }
    CHECK(rf_cuda_check(0) == RF_OK, "%s", rf_last_error());
    CHECK(context_depth() == 0, "a context was left on the stack");
}

/* errors: a recorded error is raised once, not during a capture, and by one of many threads. */
static void errors(char **arguments) {
    (void)arguments;
    const rf__cuda_device *gpu = NULL;
    CHECK(rf__cuda_device_get(0, &gpu) == RF_OK, "%s", rf_last_error());
    const rf__cuda_error_word word = rf__cuda_error_word_of(&gpu->errors, NULL, 0);
    CHECK(rf__cuda_check_word(gpu, word, NULL) == RF_OK, "%s", rf_last_error());
    rf_error_record record = {.argument = RF_ARGUMENT_indices,
                              .operator_number = RF_OPERATOR_embedding_bag,
                              .feature = -1,
                              .position = 70,
                              .bag = 3,
                              .value = 12,
                              .limit = 10,
                              .lookups = 100};
    CHECK(record_write(&word, record), "not recorded");
    CHECK(rf__cuda_check_word(gpu, word, capturing_stream()) == RF_OK, "raised during a capture");
    expect_error(
        gpu, &word, RF_ERR_INDEX,
        "recfuse.embedding_bag: indices[70] is 12, for bag 3; expected 0 to 9, less than the 10 rows");
    record.feature = 4;
    CHECK(record_write(&word, record), "not recorded");
    expect_error(gpu, &word, RF_ERR_INDEX, "indices[70] is 12, for feature 4, bag 3; expected");
    record.operator_number = RF_OPERATOR_embedding_columns, record.argument = RF_ARGUMENT_column_index;
    record.position = -1;
    CHECK(record_write(&word, record), "not recorded");
    expect_error(gpu, &word, RF_ERR_INDEX,
                 "embedding_columns: the index of values is 12, of column 4 and sample 3; expected 0 to 9");
    record.operator_number = RF_OPERATOR_embedding_bag, record.argument = RF_ARGUMENT_indices;
    record.position = 70, record.limit = 0;
    CHECK(record_write(&word, record), "not recorded");
    expect_error(gpu, &word, RF_ERR_INDEX, "its table has no rows, so no index is valid");
    record.limit = 10, record.bag = -1, record.argument = RF_ARGUMENT_rows;
    CHECK(record_write(&word, record), "not recorded");
    expect_error(gpu, &word, RF_ERR_INDEX, "rows[70] is 12; expected 0 to 9");
    record.operator_number = RF_OPERATOR_ikbo_linear_chain, record.argument = RF_ARGUMENT_maps,
    record.feature = 1;
    CHECK(record_write(&word, record), "not recorded");
    expect_error(gpu, &word, RF_ERR_INDEX,
                 "recfuse.ikbo_linear_chain: maps[1][70] is 12; expected 0 to 9, less than the 10 items");
    record.operator_number = RF_OPERATOR_ikbo_linear, record.argument = RF_ARGUMENT_cand_to_user;
    record.feature = -1, record.limit = 0;
    CHECK(record_write(&word, record), "not recorded");
    expect_error(
        gpu, &word, RF_ERR_INDEX,
        "recfuse.ikbo_linear: cand_to_user[70] is 12, but x_user has no items, so no index is valid");
    record.operator_number = RF_OPERATOR_ikbo_attention, record.argument = RF_ARGUMENT_attending_to;
    CHECK(record_write(&word, record), "not recorded");
    expect_error(gpu, &word, RF_ERR_INDEX,
                 "recfuse.ikbo_attention: cand_to_user[70] is 12, but k has no users, so no index is valid");
    record.argument = RF_ARGUMENT_kv_lengths, record.lookups = 9;
    CHECK(record_write(&word, record), "not recorded");
    expect_error(gpu, &word, RF_ERR_VALUE,
                 "kv_lengths[70] is 12; expected 0 to 9, the positions of a user of k (found on the GPU");
    record.argument = RF_ARGUMENT_kv_offsets, record.position = 0, record.limit = 4;
    CHECK(record_write(&word, record), "not recorded");
    expect_error(gpu, &word, RF_ERR_VALUE,
                 "kv_offsets[0] is 12; expected 4 to 9, the positions of k, from the offset before on (");
    record = (rf_error_record){.argument = RF_ARGUMENT_offsets, .feature = -1, .value = 5, .lookups = 100};
    CHECK(record_write(&word, record), "not recorded");
    expect_error(gpu, &word, RF_ERR_OFFSET, "offsets[0] is 5; expected 0, where the first bag begins");
    record.position = 2, record.bag = 2, record.limit = 7;
    CHECK(record_write(&word, record), "not recorded");
    expect_error(gpu, &word, RF_ERR_OFFSET,
                 "offsets[2] is 5, for bag 2; expected 7 (where the bag before begins");
    record.operator_number = 77; /* an invalid record still results in a message */
    CHECK(record_write(&word, record), "not recorded");
    expect_error(gpu, &word, RF_ERR_INTERNAL, "operator 77");

    gpu_of_errors = gpu;
    word_of_errors = word;
    record.argument = RF_ARGUMENT_indices, record.operator_number = RF_OPERATOR_pin_rows;
    for (int i = 0; i < 20; i++) {
        atomic_store(&raised, 0);
        CHECK(record_write(&word, record), "not recorded");
        run_threads(raise_error, NULL);
        CHECK(atomic_load(&raised) == 1, "raised %d times", atomic_load(&raised));
    }
    CHECK(context_depth() == 0, "a context was left on the stack");
}

/* launch: the driver gets grid, block, stream and argument as they are, and an attribute for each wish. */
static void launch(char **arguments) {
    (void)arguments;
    const rf__cuda_device *hopper = NULL, *ampere = NULL;
    const uint64_t argument = 0x1234567890abcdef;
    rf__launch_config config = {.grid = {5, 6, 7},
                                .block = {64, 2, 3},
                                .shared_bytes = 1000,
                                .cooperative = true,
                                .programmatic = true,
                                .stream = capturing_stream()};
    CHECK(rf__cuda_device_get(0, &hopper) == RF_OK && rf__cuda_device_get(1, &ampere) == RF_OK, "%s",
          rf_last_error());
    CHECK(rf__cuda_enter(hopper) == RF_OK && rf__launch(hopper, &config, &argument) == RF_OK, "%s",
          rf_last_error());
    const fake_launch *got = driver_last_launch();
    CHECK(memcmp(got->config.grid, config.grid, sizeof config.grid) == 0 &&
              memcmp(got->config.block, config.block, sizeof config.block) == 0 &&
              got->config.shared_bytes == 1000 && got->config.stream == config.stream,
          "not as given");
    CHECK(memcmp(got->first_word, &argument, sizeof argument) == 0, "another argument");
    CHECK(got->config.n_attributes == 2 && got->attributes[0].id == RF__CU_LAUNCH_ATTRIBUTE_COOPERATIVE &&
              got->attributes[0].value.cooperative == 1 &&
              got->attributes[1].id == RF__CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
              got->attributes[1].value.programmatic_stream_serialization == 1,
          "%u attributes", got->config.n_attributes);
    CHECK(rf__launch(ampere, &config, &argument) == RF_OK && got->config.n_attributes == 1,
          "a GPU that cannot overlap launches was asked to");
    config = (rf__launch_config){.grid = {8}, .block = {32}, .cluster = {2}};
    CHECK(rf__launch(hopper, &config, &argument) == RF_OK, "%s", rf_last_error());
    CHECK(got->config.grid[1] == 1 && got->config.grid[2] == 1 && got->config.block[1] == 1 &&
              got->config.block[2] == 1,
          "a dimension that is left out");
    const unsigned int *cluster = got->attributes[0].value.cluster;
    CHECK(got->config.n_attributes == 1 &&
              got->attributes[0].id == RF__CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION && cluster[0] == 2 &&
              cluster[1] == 1 && cluster[2] == 1,
          "another cluster");
    const int launches = driver_calls("cuLaunchKernelEx");
    CHECK(rf__launch(ampere, &config, &argument) == RF_ERR_UNSUPPORTED &&
              strstr(rf_last_error(), "sm_80") != NULL,
          "%s", rf_last_error());
    CHECK(driver_calls("cuLaunchKernelEx") == launches, "launched nevertheless");
    config.cluster[0] = config.grid[0] = 0;
    CHECK(rf__launch(hopper, &config, &argument) == RF_ERR_CUDA, "a grid of no blocks");
    rf__cuda_leave();
    CHECK(context_depth() == 0, "a context was left on the stack");
}

/* tensor_map: the driver gets the tensor unchanged, and never a tensor beyond its limits. */
static void tensor_map(char **arguments) {
    (void)arguments;
    static _Alignas(16) char data[32];
    const rf__cuda_driver *driver = NULL;
    rf__cu_tensor_map map;
    /* [2, 3, 5, 100, 64] of bfloat16 */
    const rf__tensor_map_params good = {.data = data,
                                        .dtype = RF_BFLOAT16,
                                        .dimensions = 5,
                                        .sizes = {64, 100, 5, 3, 2},
                                        .pitches = {2, 128, 12800, 64000, 192000},
                                        .box = {32, 100, 1, 1, 2},
                                        .swizzle = 64};
    CHECK(rf__cuda_driver_get(&driver) == RF_OK, "%s", rf_last_error());
    CHECK(rf__tensor_map_encode(driver, &good, &map) == RF_OK, "%s", rf_last_error());
    const fake_tensor_map *got = driver_last_tensor_map();
    CHECK(got->type == RF__CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 && got->dimensions == 5 && got->data == data &&
              got->swizzle == RF__CU_TENSOR_MAP_SWIZZLE_64B && got->interleave == 0 && got->fill == 0 &&
              got->promotion == RF__CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
          "not as given");
    for (int i = 0; i < 5; i++) {
        CHECK(got->sizes[i] == (uint64_t)good.sizes[i] && got->box[i] == (uint32_t)good.box[i] &&
                  got->steps[i] == 1,
              "dimension %d", i);
        CHECK(i == 4 || got->pitches[i] == (uint64_t)good.pitches[i + 1], "pitch of dimension %d", i + 1);
    }
    rf__tensor_map_params params = good;
    params.box[0] = 128;
    params.sizes[0] = 128;
    params.pitches[1] = 256;
    params.swizzle = 0;
    CHECK(rf__tensor_map_encode(driver, &params, &map) == RF_OK &&
              driver_last_tensor_map()->promotion == RF__CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
          "L2 reads whole boxes ahead");
    params = good;
    const int calls = driver_calls("cuTensorMapEncodeTiled");
#define REFUSED(want, words, change)                                  \
    do {                                                              \
        params = good;                                                \
        change;                                                       \
        CHECK(rf__tensor_map_encode(driver, &params, &map) == want && \
                  strstr(rf_last_error(), words) != NULL,             \
              "%s: %s", #change, rf_last_error());                    \
    } while (0)
    REFUSED(RF_ERR_VALUE, "aligned to 16", params.data = data + 8);
    REFUSED(RF_ERR_VALUE, "aligned to 16", params.data = NULL);
    REFUSED(RF_ERR_TYPE, "dtype is 3", params.dtype = (rf_dtype)3);
    REFUSED(RF_ERR_VALUE, "rank is 0", params.dimensions = 0);
    REFUSED(RF_ERR_VALUE, "rank is 6", params.dimensions = 6);
    REFUSED(RF_ERR_VALUE, "dimension 1 has 0 elements", params.sizes[1] = 0);
    REFUSED(RF_ERR_VALUE, "dimension 4 has 4294967297 elements", params.sizes[4] = 4294967297);
    REFUSED(RF_ERR_VALUE, "box has 0 elements of dimension 2", params.box[2] = 0);
    REFUSED(RF_ERR_VALUE, "box has 257 elements of dimension 1", params.box[1] = 257);
    REFUSED(RF_ERR_VALUE, "pitch of 120 bytes", params.pitches[1] = 120);
    REFUSED(RF_ERR_VALUE, "pitch of 0 bytes", params.pitches[3] = 0);
    REFUSED(RF_ERR_VALUE, "pitch of 1099511627776 bytes", params.pitches[2] = INT64_C(1) << 40);
    REFUSED(RF_ERR_VALUE, "the box is 8 bytes wide", params.box[0] = 4);
    REFUSED(RF_ERR_VALUE, "the box is 128 bytes wide", params.box[0] = 64);
    REFUSED(RF_ERR_VALUE, "swizzle is 16 bytes", params.swizzle = 16);
    CHECK(driver_calls("cuTensorMapEncodeTiled") == calls, "the driver was asked");
    params = (rf__tensor_map_params){.data = data, .dimensions = 1, .sizes = {8}, .box = {4}};
    CHECK(rf__tensor_map_encode(driver, &params, &map) == RF_OK && got->dimensions == 1 &&
              got->swizzle == 0 && got->type == RF__CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
          "%s", rf_last_error());
#undef REFUSED
}

/* tensor_map_kept: an encoded tensor is reused without the driver; any other tensor is encoded. */
static void tensor_map_kept(char **arguments) {
    (void)arguments;
    enum { MAPS = 20 }; /* more than are kept */
    static _Alignas(16) char data[MAPS][16];
    const rf__cuda_driver *driver = NULL;
    rf__cu_tensor_map map;
    rf__tensor_map_params params = {.data = data,
                                    .dtype = RF_FLOAT16,
                                    .dimensions = 2,
                                    .sizes = {64, 100},
                                    .pitches = {0, 128},
                                    .box = {64, 32},
                                    .swizzle = 128};
    const rf__tensor_map_params good = params;
    CHECK(rf__cuda_driver_get(&driver) == RF_OK, "%s", rf_last_error());
#define ENCODED(want, change)                                                                       \
    do {                                                                                            \
        const int calls = driver_calls("cuTensorMapEncodeTiled");                                   \
        change;                                                                                     \
        memset(&map, 0, sizeof map);                                                                \
        CHECK(rf__tensor_map_encode(driver, &params, &map) == RF_OK, "%s", rf_last_error());        \
        CHECK(driver_calls("cuTensorMapEncodeTiled") == calls + (want) && *(const char *)&map == 1, \
              "%s: not %d calls, or no map", #change, want);                                        \
    } while (0)
    ENCODED(1, (void)0);
    ENCODED(0, (void)0);
    ENCODED(1, params.sizes[1] = 101);
    ENCODED(1, params.pitches[1] = 256);
    ENCODED(1, params.box[1] = 16);
    ENCODED(1, params.dtype = RF_BFLOAT16);
    ENCODED(1, params.swizzle = 0);
    ENCODED(0, params = good);
    for (int i = 1; i < MAPS; i++) ENCODED(1, params.data = data[i]);
    ENCODED(0, params.data = data[MAPS - 2]);
    ENCODED(1, params = good);
#undef ENCODED
}

const command driver_commands[] = {
    {"errors", 0, errors},         {"errors_of_two", 0, errors_of_two},     {"launch", 0, launch},
    {"tensor_map", 0, tensor_map}, {"tensor_map_kept", 0, tensor_map_kept},
};
const int n_driver_commands = (int)(sizeof driver_commands / sizeof driver_commands[0]);
