/* Statuses and messages of the operators for invalid arguments and contents. */
#include <stdio.h>
#include <string.h>

#include "check.h"

void test_status(void) {
    static const struct {
        rf_status status;
        const char *python, *text;
    } list[] = {
#define STATUS_ROW(code, python, text) {code, python, text},
        RF_STATUS_LIST(STATUS_ROW)
#undef STATUS_ROW
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        CHECK(strcmp(rf_status_text(list[i].status), list[i].text) == 0, "status %zu: %s", i,
              rf_status_text(list[i].status));
        CHECK(strcmp(rf_status_python(list[i].status), list[i].python) == 0, "status %zu: %s", i,
              rf_status_python(list[i].status));
    }
    CHECK(rf_status_text((rf_status)1000) && rf_status_text((rf_status)1000)[0],
          "no text for an unknown status");
    CHECK(rf_status_python((rf_status)1000)[0], "no exception for an unknown status");
    CHECK(strcmp(rf_version(), RECFUSE_VERSION) == 0, "%s", rf_version());
}

/* The message must contain all words of `words` (separated by '|'). */
static void expect(rf_status got, rf_status want, const char *words, const char *change, int line) {
    CHECK(got == want, "line %d: %s: \"%s\" instead of \"%s\": %s", line, change, rf_status_text(got),
          rf_status_text(want), rf_last_error());
    if (want == RF_OK || got == RF_OK) return;
    while (*words) {
        char word[64];
        const size_t length = strcspn(words, "|");
        snprintf(word, sizeof word, "%.*s", (int)length, words);
        CHECK(strstr(rf_last_error(), word), "line %d: %s: no \"%s\" in: %s", line, change, word,
              rf_last_error());
        words += length + (words[length] == '|');
    }
}

enum { ROWS = 4, DIM = 2, BAGS = 3, LOOKUPS = 6, FEATURES = 2 };

static const float weight[2 * ROWS * DIM] = {1, 2, 3, 4, 5, 6, 7, 8};
static const float samples[LOOKUPS] = {1, 1, 1, 1, 1, 1};
static float output[BAGS * DIM * FEATURES];

/* A valid call, modified by a statement, must return a status and a message with these words. */
#define EMBEDDING_BAG(want, words, change)                                                               \
    do {                                                                                                 \
        int64_t indices[] = {0, 1, 2, 3, 0, 1};                                                          \
        int64_t offsets[] = {0, 2, 5, 6};                                                                \
        rf_embedding_bag_params call = {weight,  ROWS, DIM,      DIM,      RF_FLOAT32, indices, LOOKUPS, \
                                        offsets, BAGS, RF_INT64, RF_INT64, false,      true,    RF_SUM,  \
                                        -1,      NULL, -1,       output,   DIM};                         \
        const rf_executor *executor = NULL;                                                              \
        change;                                                                                          \
        expect(rf_embedding_bag_cpu(&call, executor), want, words, #change, __LINE__);                   \
    } while (0)

void test_embedding_bag_errors(void) {
    EMBEDDING_BAG(RF_OK, "", (void)indices);
    EMBEDDING_BAG(RF_OK, "", call.include_last_offset = true);
    EMBEDDING_BAG(RF_OK, "", call.sample_weights = samples);

    /* Contents. */
    EMBEDDING_BAG(RF_ERR_INDEX, "indices[1] is 4|bag 0|4 rows|0 to 3", indices[1] = 4);
    EMBEDDING_BAG(RF_ERR_INDEX, "-1|bag 1", indices[2] = -1);
    EMBEDDING_BAG(RF_ERR_INDEX, "9223372036854775807|bag 2", indices[5] = INT64_MAX);
    EMBEDDING_BAG(RF_ERR_INDEX, "-9223372036854775808", indices[0] = INT64_MIN);
    EMBEDDING_BAG(RF_ERR_INDEX, "4294967296", indices[0] = 1LL << 32);
    EMBEDDING_BAG(RF_ERR_INDEX, "7", call.padding_idx = 0; indices[3] = 7);
    EMBEDDING_BAG(RF_ERR_INDEX, "7", executor = &executor_threads; indices[3] = 7);
    EMBEDDING_BAG(RF_ERR_OFFSET, "offsets|5|4", offsets[2] = 4; offsets[1] = 5);
    EMBEDDING_BAG(RF_ERR_OFFSET, "offsets|1", offsets[0] = 1);
    EMBEDDING_BAG(RF_ERR_OFFSET, "offsets|-1", offsets[0] = -1);
    EMBEDDING_BAG(RF_ERR_OFFSET, "offsets|7|6", offsets[2] = 7);
    EMBEDDING_BAG(RF_ERR_OFFSET, "offsets|7|6", call.include_last_offset = true; offsets[3] = 7);
    EMBEDDING_BAG(RF_ERR_OFFSET, "offsets", offsets[1] = INT64_MAX);
    EMBEDDING_BAG(RF_ERR_OFFSET, "offsets", offsets[1] = INT64_MIN);

    /* Arguments. */
    EMBEDDING_BAG(RF_ERR_VALUE, "weight|-1", call.rows = -1);
    EMBEDDING_BAG(RF_ERR_VALUE, "weight|-1", call.dim = -1);
    EMBEDDING_BAG(RF_ERR_VALUE, "lookups is -1", call.lookups = -1);
    EMBEDDING_BAG(RF_ERR_VALUE, "bags -1", call.bags = -1);
    EMBEDDING_BAG(RF_ERR_VALUE, "weight|NULL", call.weight = NULL);
    EMBEDDING_BAG(RF_ERR_VALUE, "indices|NULL", call.indices = NULL);
    EMBEDDING_BAG(RF_ERR_VALUE, "offsets|NULL", call.offsets = NULL; call.include_last_offset = true);
    EMBEDDING_BAG(RF_ERR_VALUE, "lookups is 5|bags 3|offsets", call.offsets = NULL; call.lookups = 5);
    EMBEDDING_BAG(RF_ERR_VALUE, "output|NULL", call.output = NULL);
    EMBEDDING_BAG(RF_ERR_VALUE, "weight_stride|1|2", call.weight_stride = 1);
    EMBEDDING_BAG(RF_ERR_VALUE, "output_stride|1|2", call.output_stride = 1);
    EMBEDDING_BAG(RF_ERR_VALUE, "padding_idx|4", call.padding_idx = 4);
    EMBEDDING_BAG(RF_ERR_VALUE, "padding_idx|-2", call.padding_idx = -2);
    EMBEDDING_BAG(RF_ERR_UNSUPPORTED, "sum", call.sample_weights = samples; call.pooling = RF_MEAN);
    EMBEDDING_BAG(RF_ERR_UNSUPPORTED, "sum", call.sample_weights = samples; call.pooling = RF_MAX);
    EMBEDDING_BAG(RF_ERR_VALUE, "pooling|3", call.pooling = (rf_pooling)3);
    EMBEDDING_BAG(RF_ERR_VALUE, "prefetch_distance|-2", call.prefetch_distance = -2);
    EMBEDDING_BAG(RF_ERR_TYPE, "dtype|3", call.dtype = (rf_dtype)3);
    EMBEDDING_BAG(RF_ERR_TYPE, "index_type|2", call.index_type = (rf_int_type)2);
    EMBEDDING_BAG(RF_ERR_TYPE, "offset_type|2", call.offset_type = (rf_int_type)2);

    /* Nothing to read: no pointer is needed. */
    EMBEDDING_BAG(RF_OK, "", call.lookups = 0; call.indices = NULL; call.rows = 0; call.weight = NULL;
                  offsets[1] = offsets[2] = 0);
    EMBEDDING_BAG(RF_OK, "", call.bags = 0; call.lookups = 0;
                  call.offsets = call.indices = call.output = NULL);
    EMBEDDING_BAG(RF_ERR_INDEX, "0", call.rows = 0; call.weight = NULL);
}

/* Enough work for several threads, on an executor that runs no range. */
void test_executor_failure(void) {
    enum { WIDE = 256, MANY = 512 };
    static float rows[ROWS * WIDE], pooled[MANY * WIDE];
    static int64_t indices[MANY], offsets[MANY];
    for (int i = 0; i < MANY; i++) offsets[i] = i;
    const rf_embedding_bag_params call = {rows,    ROWS, WIDE,     WIDE,     RF_FLOAT32, indices, MANY,
                                          offsets, MANY, RF_INT64, RF_INT64, false,      true,    RF_SUM,
                                          -1,      NULL, -1,       pooled,   WIDE};
    expect(rf_embedding_bag_cpu(&call, &executor_failing), RF_ERR_INTERNAL, "thread", "a failing executor",
           __LINE__);
    expect(rf_embedding_bag_cpu(&call, &executor_threads), RF_OK, "", "a working executor", __LINE__);
}

#define FUSED(want, words, change)                                                              \
    do {                                                                                        \
        int64_t indices[] = {0, 1, 2, 3, 0, 1};                                                 \
        int64_t offsets[] = {0, 2, 3, 4, 4, 5, 6};                                              \
        rf_buffer buffers[] = {{.data = weight, .numel = 2 * ROWS * DIM, .dtype = RF_FLOAT32}}; \
        rf_feature features[] = {{0, 0, ROWS, DIM, RF_SUM, -1, 0},                              \
                                 {0, ROWS * DIM, ROWS, DIM, RF_SUM, -1, DIM}};                  \
        rf_fused_embedding_bag_params                                                           \
            call = {buffers, 1,          features, FEATURES,       indices,       LOOKUPS,      \
                    offsets, BAGS,       RF_INT64, RF_INT64,       true,          NULL,         \
                    -1,      RF_FLOAT32, output,   FEATURES * DIM, FEATURES * DIM};             \
        const rf_executor *executor = NULL;                                                     \
        change;                                                                                 \
        expect(rf_fused_embedding_bag_cpu(&call, executor), want, words, #change, __LINE__);    \
    } while (0)

/* The table as codes; its memory has enough bytes for them and for their parameters. */
#define CODES(of, bytes)                                     \
    buffers[0] = (rf_buffer){.data = weight,                 \
                             .numel = 2 * ROWS * DIM,        \
                             .dtype = of,                    \
                             .parameters_dtype = RF_FLOAT16, \
                             .parameters = weight,           \
                             .pitch = bytes,                 \
                             .parameters_pitch = 4}

void test_fused_embedding_bag_errors(void) {
    FUSED(RF_OK, "", (void)indices);
    FUSED(RF_OK, "", call.sample_weights = samples);

    /* Contents: the feature is named too. */
    FUSED(RF_ERR_INDEX, "indices[2] is 4|feature 0|bag 1|0 to 3", indices[2] = 4);
    FUSED(RF_ERR_INDEX, "-5|feature 1|bag 2", indices[5] = -5);
    FUSED(RF_ERR_INDEX, "9|feature 1", executor = &executor_threads; indices[4] = 9);
    FUSED(RF_ERR_OFFSET, "offsets|feature 1", offsets[4] = 5; offsets[5] = 4);
    FUSED(RF_ERR_OFFSET, "offsets|2", offsets[0] = 2);
    FUSED(RF_ERR_OFFSET, "offsets|7|6", offsets[6] = 7);
    FUSED(RF_ERR_OFFSET, "offsets", offsets[3] = INT64_MIN);
    FUSED(RF_ERR_OFFSET, "offsets", offsets[3] = INT64_MAX);

    /* Arguments. */
    FUSED(RF_ERR_VALUE, "n_features is -1", call.n_features = -1);
    FUSED(RF_ERR_VALUE, "n_buffers -1", call.n_buffers = -1);
    FUSED(RF_ERR_VALUE, "lookups is -1", call.lookups = -1);
    FUSED(RF_ERR_VALUE, "bags -1", call.bags = -1);
    FUSED(RF_ERR_VALUE, "bags", call.bags = INT64_MAX);
    FUSED(RF_ERR_VALUE, "output|-1", call.output_dim = -1);
    FUSED(RF_ERR_VALUE, "stride|3|4", call.output_stride = 3);
    FUSED(RF_ERR_VALUE, "prefetch_distance|-2", call.prefetch_distance = -2);
    FUSED(RF_ERR_VALUE, "indices|NULL", call.indices = NULL);
    FUSED(RF_ERR_VALUE, "offsets|NULL", call.offsets = NULL);
    FUSED(RF_ERR_VALUE, "output|NULL", call.output = NULL);
    FUSED(RF_ERR_VALUE, "weights[0]|NULL", buffers[0].data = NULL);
    FUSED(RF_ERR_TYPE, "dtype|9", buffers[0].dtype = (rf_dtype)9);
    FUSED(RF_ERR_TYPE, "dtype|3", buffers[0].dtype = RF_FLOAT64);
    FUSED(RF_ERR_TYPE, "output_dtype|5", call.output_dtype = (rf_dtype)5);
    FUSED(RF_ERR_TYPE, "index_type|2", call.index_type = (rf_int_type)2);

    /* Codes. */
    FUSED(RF_OK, "", CODES(RF_INT8_ROWS, 2));
    FUSED(RF_OK, "", CODES(RF_INT4_ROWS, 1));
    FUSED(RF_ERR_INDEX, "indices[2] is 4|feature 0", CODES(RF_INT4_ROWS, 1); indices[2] = 4);
    FUSED(RF_ERR_TYPE, "parameters_dtype|2", CODES(RF_INT8_ROWS, 2);
          buffers[0].parameters_dtype = RF_BFLOAT16);
    FUSED(RF_ERR_VALUE, "parameters|NULL", CODES(RF_INT8_ROWS, 2); buffers[0].parameters = NULL);
    FUSED(RF_ERR_VALUE, "pitch of 1", CODES(RF_INT8_ROWS, 1));
    FUSED(RF_ERR_VALUE, "3|pitch", CODES(RF_INT8_ROWS, 2); buffers[0].parameters_pitch = 3);
    FUSED(RF_ERR_VALUE, "features[1]|element 7", CODES(RF_INT8_ROWS, 2); features[1].weight_offset = 7);
    FUSED(RF_ERR_VALUE, "1 columns of int4", CODES(RF_INT4_ROWS, 1); features[0].dim = 1);
    FUSED(RF_ERR_UNSUPPORTED, "pooling|mean", CODES(RF_INT8_ROWS, 2); call.sample_weights = samples;
          features[0].pooling = RF_MEAN);

    /* Features. */
    FUSED(RF_ERR_VALUE, "features[1]|weights[1]", features[1].buffer = 1);
    FUSED(RF_ERR_VALUE, "features[1]|weights[-1]", features[1].buffer = -1);
    FUSED(RF_ERR_VALUE, "features[1]|16", features[1].weight_offset = 9);
    FUSED(RF_ERR_VALUE, "features[1]", features[1].weight_offset = -1);
    FUSED(RF_ERR_VALUE, "features[0]", features[0].rows = 9);
    FUSED(RF_ERR_VALUE, "features[0]", features[0].rows = -1);
    FUSED(RF_ERR_VALUE, "features[0]", features[0].rows = 1LL << 62);
    FUSED(RF_ERR_VALUE, "features[0]", features[0].weight_offset = INT64_MAX);
    FUSED(RF_ERR_VALUE, "features[0]", features[0].dim = -1);
    FUSED(RF_ERR_VALUE, "feature 0|pooling|3", features[0].pooling = 3);
    FUSED(RF_ERR_VALUE, "feature 0|pooling", features[0].pooling = 1LL << 32);
    FUSED(RF_ERR_VALUE, "feature 0|padding_idx|4", features[0].padding_idx = 4);
    FUSED(RF_ERR_VALUE, "features[1]|column", features[1].output_column = 3);
    FUSED(RF_ERR_VALUE, "features[1]|column", features[1].output_column = -1);
    FUSED(RF_ERR_VALUE, "features[1]|column", features[1].output_column = INT64_MAX);
    FUSED(RF_ERR_VALUE, "output_column 0|expected 2", features[1].output_column = 0);
    FUSED(RF_ERR_UNSUPPORTED, "sum|feature 1", call.sample_weights = samples; features[1].pooling = RF_MEAN);

    /* Nothing to do. */
    FUSED(RF_OK, "", call.bags = 0; call.lookups = 0; offsets[0] = 0; call.output = NULL);
    FUSED(RF_OK, "", call.n_features = 0; call.features = NULL; call.output_dim = 0; call.lookups = 0);
}
