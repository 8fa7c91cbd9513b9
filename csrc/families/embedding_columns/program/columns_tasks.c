/* The work of blocks of a GPU: the last section of a program of embedding columns. */
#include <stdlib.h>
#include <string.h>

#include <recfuse.h>

#include "families/embedding_columns/program/columns_program.h"
#include "core/validate.h"
#include "families/embedding_columns/device/column_program.h"

enum {
    WORD = sizeof(int64_t),
    BODY_BYTES = RF_COLUMNS_MOST_BODY * WORD,
    MOST_ARRAY = 2048, /* bytes of a step's boundaries or words that are worth a copy to shared memory */
    FEW_COLUMNS = 4 /* of a task that ends before an array for which it has no room */
};

/* The program that tasks are added to. */
typedef struct builder {
    rf_columns_header header;
    const rf_columns_column *columns;
    const rf_columns_source *sources;
    const rf_columns_step *steps;
    const float *boundaries;
    const int64_t *vocabulary;
    rf_columns_task *tasks;
    int64_t n_tasks, most_tasks;
    int64_t *bodies; /* of all tasks, one after another */
    int64_t n_words, most_words;
} builder;

/* The task that is being filled: parts of columns. */
typedef struct column_range {
    int32_t column, first, width; /* of its n_dims */
} column_range;

typedef struct open_task {
    column_range ranges[RF_COLUMNS_LANES];
    int32_t n_parts, n_lanes, kind, vector;
    int64_t bytes;
} open_task;

static int64_t rounded(int64_t bytes) { return (bytes + 15) / 16 * 16; }

static const rf_columns_source *source_of(const builder *to, const rf_columns_column *column, bool right) {
    return right && column->right < 0 ? NULL : &to->sources[right ? column->right : column->left];
}

static rf_columns_kind kind_of(const builder *to, const rf_columns_column *column) {
    const rf_columns_source *right = source_of(to, column, true);
    if (column->buffer < 0) return RF_COLUMNS_NUMBERS;
    const bool first_source =
        source_of(to, column, false)->width == 1 && (right == NULL || right->width == 1);
    return first_source ? RF_COLUMNS_ROWS : RF_COLUMNS_BAGS;
}

/* Returns the elements that a lane can access at once in all rows, as far as the program determines it. */
static int32_t vector_of(const rf_columns_column *column) {
    const int64_t all =
        column->weight_offset | column->dim | column->first_dim | column->n_dims | RF_COLUMNS_MOST_VECTOR;
    return column->buffer < 0 ? 1 : (int32_t)(all & -all);
}

static bool has_boundaries(const rf_columns_step *step) {
    return step->operation == RF_COLUMN_BUCKETIZE || step->operation == RF_COLUMN_BUCKETIZE_RIGHT;
}

/* Bytes of a step's boundaries, or words and places. */
static int64_t array_bytes(const rf_columns_step *step) {
    if (has_boundaries(step)) return step->count * (int64_t)sizeof(float);
    return step->operation == RF_COLUMN_VOCABULARY ? step->count * (int64_t)(2 * WORD) : 0;
}

/* Returns the bytes of a column in a body; `arrays`: the part of its arrays, if they are worth it. */
static int64_t column_bytes(const builder *to, const rf_columns_column *column, int64_t *arrays) {
    int64_t bytes = sizeof *column;
    *arrays = 0;
    for (int right = 0; right < 2; right++) {
        const rf_columns_source *source = source_of(to, column, right);
        if (source == NULL) continue;
        bytes += sizeof *source + source->n_steps * (int64_t)sizeof(rf_columns_step);
        for (int32_t i = 0; i < source->n_steps; i++) {
            const int64_t source_of_task = array_bytes(&to->steps[source->first_step + i]);
            if (source_of_task <= MOST_ARRAY) *arrays += rounded(source_of_task);
        }
    }
    return bytes;
}

static bool same_operations(const builder *to, const rf_columns_source *first_source,
                            const rf_columns_source *second_source) {
    if (first_source == NULL || second_source == NULL) return first_source == second_source;
    if (first_source->n_steps != second_source->n_steps) return false;
    for (int32_t i = 0; i < first_source->n_steps; i++)
        if (to->steps[first_source->first_step + i].operation !=
            to->steps[second_source->first_step + i].operation)
            return false;
    return true;
}

static bool are_alike(const builder *to, const open_task *task) {
    const rf_columns_column *first = &to->columns[task->ranges[0].column];
    for (int32_t i = 1; i < task->n_parts; i++)
        for (int right = 0; right < 2; right++)
            if (!same_operations(to, source_of(to, first, right),
                                 source_of(to, &to->columns[task->ranges[i].column], right)))
                return false;
    return true;
}

/* Room for one more task and its body. */
static rf_status grow(builder *to, int64_t words) {
    if (to->n_tasks == to->most_tasks) {
        to->most_tasks = 2 * to->most_tasks + 64;
        void *grown = realloc(to->tasks, (size_t)to->most_tasks * sizeof *to->tasks);
        RF_FAIL_IF(grown == NULL, RF_ERR_MEMORY, "no memory for the tasks of embedding columns");
        to->tasks = grown;
    }
    if (to->n_words + words > to->most_words) {
        to->most_words = 2 * (to->n_words + words);
        void *grown = realloc(to->bodies, (size_t)to->most_words * WORD);
        RF_FAIL_IF(grown == NULL, RF_ERR_MEMORY, "no memory for the tasks of embedding columns");
        to->bodies = grown;
    }
    return RF_OK;
}

/* The write positions in a body. */
typedef struct body {
    char *bytes;
    int64_t arrays_at, n_sources, n_steps;
} body;

/* Copies a source with its steps; returns its number in the body. */
static int32_t source_put(const builder *to, const rf_columns_task *task, body *at,
                          const rf_columns_source *source, const column_range *of) {
    rf_columns_source source_of_task = *source;
    rf_columns_step *steps = (rf_columns_step *)(at->bytes + task->steps_at) + at->n_steps;
    source_of_task.first_step = (int32_t)at->n_steps;
    if (task->kind == RF_COLUMNS_NUMBERS) {
        source_of_task.slot += of->first;
        source_of_task.width = of->width;
    }
    for (int32_t i = 0; i < source->n_steps; i++) {
        steps[i] = to->steps[source->first_step + i];
        const int64_t bytes = array_bytes(&steps[i]);
        if (!has_boundaries(&steps[i]) && steps[i].operation != RF_COLUMN_VOCABULARY) continue;
        const void *from = has_boundaries(&steps[i]) ? (const void *)(to->boundaries + steps[i].a)
                                                     : (const void *)(to->vocabulary + steps[i].a);
        const bool fits = bytes <= MOST_ARRAY && at->arrays_at + rounded(bytes) <= BODY_BYTES;
        steps[i].a = fits ? at->arrays_at : ~steps[i].a;
        if (!fits) continue;
        memcpy(at->bytes + at->arrays_at, from, (size_t)bytes);
        at->arrays_at += rounded(bytes);
    }
    at->n_steps += source->n_steps;
    ((rf_columns_source *)(at->bytes + task->sources_at))[at->n_sources] = source_of_task;
    return (int32_t)at->n_sources++;
}

/* Ends the task: appends its body to the others. */
static rf_status close(builder *to, open_task *open) {
    int64_t n_sources = 0, n_steps = 0;
    if (open->n_parts == 0) return RF_OK;
    for (int32_t i = 0; i < open->n_parts; i++) {
        for (int right = 0; right < 2; right++) {
            const rf_columns_source *source = source_of(to, &to->columns[open->ranges[i].column], right);
            n_sources += source != NULL;
            n_steps += source != NULL ? source->n_steps : 0;
        }
    }
    rf_columns_task task = {.kind = open->kind,
                            .n_columns = open->n_parts,
                            .n_lanes = open->n_lanes,
                            .vector = open->vector,
                            .alike = are_alike(to, open)};
    const int64_t sources_at = open->n_parts * (int64_t)sizeof(rf_columns_column);
    const int64_t steps_at = sources_at + n_sources * (int64_t)sizeof(rf_columns_source);
    const int64_t lanes_at = steps_at + n_steps * (int64_t)sizeof(rf_columns_step);
    const int64_t arrays_at = rounded(lanes_at + RF_COLUMNS_LANES * (int64_t)sizeof(rf_columns_lane));
    const int64_t most = arrays_at > BODY_BYTES ? arrays_at : BODY_BYTES;
    RF_FAIL_IF(arrays_at > INT32_MAX / 2, RF_ERR_UNSUPPORTED, "a column has %lld steps", (long long)n_steps);
    RF_CHECK(grow(to, most / WORD));
    body at = {.bytes = (char *)(to->bodies + to->n_words), .arrays_at = arrays_at};
    memset(at.bytes, 0, (size_t)most);
    task.sources_at = (int32_t)sources_at;
    task.steps_at = (int32_t)steps_at;
    task.lanes_at = (int32_t)lanes_at;
    rf_columns_lane *lanes = (rf_columns_lane *)(at.bytes + lanes_at);
    for (int32_t i = 0; i < open->n_parts; i++) {
        const column_range *of = &open->ranges[i];
        rf_columns_column column = to->columns[of->column];
        column.number = of->column;
        column.left = source_put(to, &task, &at, &to->sources[column.left], of);
        if (column.right >= 0) column.right = source_put(to, &task, &at, &to->sources[column.right], of);
        column.first_dim += of->first;
        column.output_column += of->first;
        column.n_dims = of->width;
        if (of->first > 0) column.table = -1;
        ((rf_columns_column *)at.bytes)[i] = column;
        for (int32_t element = 0; element < of->width; element += open->vector)
            *lanes++ = (rf_columns_lane){(rf_u8)i, (rf_u8)element};
    }
    task.words = (int32_t)(at.arrays_at / WORD);
    task.body_at = to->n_words; /* relative to the first body: moved when that is known */
    to->tasks[to->n_tasks++] = task;
    to->n_words += task.words;
    if (task.words > to->header.body_words) to->header.body_words = task.words;
    if (task.n_columns > to->header.task_columns) to->header.task_columns = task.n_columns;
    *open = (open_task){.kind = open->kind, .vector = open->vector};
    return RF_OK;
}

/* Adds a column to the task, or as many parts of it to one task after another. */
static rf_status add(builder *to, open_task *open, int32_t number) {
    const rf_columns_column *column = &to->columns[number];
    const int32_t most = RF_COLUMNS_LANES * open->vector;
    int32_t first = 0;
    do { /* at least once, because values are checked even without a width */
        int64_t arrays;
        const int32_t width = column->n_dims - first < most ? column->n_dims - first : most;
        const int64_t bytes = column_bytes(to, column, &arrays);
        const int64_t free_bytes =
            BODY_BYTES - 128 - open->bytes; /* lanes, and arrays that begin at 16 bytes */
        const bool is_full = open->n_parts == RF_COLUMNS_LANES ||
                             open->n_lanes + width / open->vector > RF_COLUMNS_LANES || bytes > free_bytes ||
                             (bytes + arrays > free_bytes && open->n_parts >= FEW_COLUMNS);
        if (is_full || open->kind == RF_COLUMNS_BAGS) RF_CHECK(close(to, open));
        open->ranges[open->n_parts++] = (column_range){number, first, width};
        open->n_lanes += width / open->vector;
        open->bytes += bytes + (bytes + arrays <= free_bytes ? arrays : 0);
        first += width;
    } while (first < column->n_dims);
    return RF_OK;
}

/* Tasks of a kind: columns of one alignment after those of another, each in the order of the output. */
static rf_status add_kind(builder *to, rf_columns_kind kind) {
    for (int32_t vector = RF_COLUMNS_MOST_VECTOR; vector > 0; vector /= 2) {
        open_task open = {.kind = (int32_t)kind, .vector = vector};
        for (int64_t i = 0; i < to->header.n_columns; i++)
            if (kind_of(to, &to->columns[i]) == kind && vector_of(&to->columns[i]) == vector)
                RF_CHECK(add(to, &open, (int32_t)i));
        RF_CHECK(close(to, &open));
    }
    return RF_OK;
}

rf_status rf__columns_tasks(int64_t **program, int64_t *words) {
    rf_status status = RF_OK;
    const int64_t *from = *program;
    builder to = {.header = *(const rf_columns_header *)from};
    rf_columns_header *header = &to.header;
    to.columns = (const rf_columns_column *)(from + header->columns_at);
    to.sources = (const rf_columns_source *)(from + header->sources_at);
    to.steps = (const rf_columns_step *)(from + header->steps_at);
    to.boundaries = (const float *)(from + header->boundaries_at);
    to.vocabulary = from + header->vocabulary_at;
    header->body_words = header->task_columns = header->operations = 0;
    for (int64_t i = 0; i < header->n_steps; i++) header->operations |= INT64_C(1) << to.steps[i].operation;
    RF_TRY(add_kind(&to, RF_COLUMNS_BAGS));
    header->n_bag_tasks = to.n_tasks;
    RF_TRY(add_kind(&to, RF_COLUMNS_ROWS));
    RF_TRY(add_kind(&to, RF_COLUMNS_NUMBERS));
    header->tasks_at = rf__round_up(*words, 2);
    header->n_tasks = to.n_tasks;
    const int64_t bodies_at = header->tasks_at + to.n_tasks * (int64_t)(sizeof *to.tasks / WORD);
    header->words = bodies_at + to.n_words;
    int64_t *all = realloc(*program, (size_t)header->words * WORD);
    if (all == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory for the tasks of embedding columns");
        goto out;
    }
    *program = all;
    if (header->tasks_at > *words) all[*words] = 0;
    for (int64_t i = 0; i < to.n_tasks; i++) to.tasks[i].body_at += bodies_at;
    if (to.n_tasks > 0) memcpy(all + header->tasks_at, to.tasks, (size_t)to.n_tasks * sizeof *to.tasks);
    if (to.n_words > 0) memcpy(all + bodies_at, to.bodies, (size_t)to.n_words * WORD);
    memcpy(all, header, sizeof *header);
    *words = header->words;
out:
    free(to.bodies);
    free(to.tasks);
    return status;
}
