/* From values of samples to rows of a table. */
#include "families/embedding_columns/cpu/columns.h"

static bool source_is_good(rf__columns_call *call, const rf__column *column, const rf__column_source *source,
                           int64_t first, int64_t last) {
    if (source->width > 0 || !call->params->check_bounds) return true;
    int64_t previous = 0;
    for (int64_t sample = first; sample <= last; sample++) {
        const int64_t start = rf__column_start(source, sample), at = source->slot * source->batch + sample;
        if (start >= previous && start <= source->input->lookups && (at > 0 || start == 0)) {
            previous = start;
            continue;
        }
        rf__columns_offend(call, &(rf__column_offence){.kind = RF__COLUMN_BAD_OFFSET,
                                                       .column = column->number,
                                                       .sample = sample < last ? sample : last - 1,
                                                       .position = at,
                                                       .value = start,
                                                       .limit = at > 0 ? previous : -1,
                                                       .input = source->input - call->params->inputs});
        return false;
    }
    return true;
}

bool rf__column_offsets_are_good(rf__columns_call *call, const rf__column *column, int64_t first,
                                 int64_t last) {
    return source_is_good(call, column, &column->left, first, last) &&
           (column->right.input == NULL || source_is_good(call, column, &column->right, first, last));
}

void rf__column_cursor_open(rf__columns_call *call, const rf__column *column, int64_t first, int64_t last,
                            rf__column_cursor *cursor) {
    cursor->call = call;
    cursor->column = column;
    cursor->end = rf__column_offsets_are_good(call, column, first, last) ? last : first;
    cursor->first = cursor->last = first;
    cursor->is_piece = cursor->has_more = false;
}

/* Appends the row of an index to the result, if it has one. `position`: of its pair of values in its bag. */
static void row_add(rf__column_cursor *cursor, int64_t index, float weight, int64_t sample,
                    int64_t position) {
    const rf_columns_column *column = cursor->column->column;
    if ((uint64_t)index >= (uint64_t)column->rows) {
        if (column->invalid == RF_COLUMN_INVALID_ERROR && cursor->call->params->check_bounds)
            rf__columns_offend(cursor->call, &(rf__column_offence){.kind = RF__COLUMN_BAD_INDEX,
                                                                   .column = cursor->column->number,
                                                                   .sample = sample,
                                                                   .position = position,
                                                                   .value = index,
                                                                   .limit = column->rows});
        if (column->invalid < 0) return;
        index = column->invalid;
    }
    cursor->rows[cursor->n_rows] = index;
    cursor->weights[cursor->n_rows++] = weight;
}

/* Appends the row of a bag without rows, if it has one. */
static void row_add_empty(rf__column_cursor *cursor) {
    if (cursor->column->column->empty < 0) return;
    cursor->rows[cursor->n_rows] = cursor->column->column->empty;
    cursor->weights[cursor->n_rows++] = 1.0f;
}

/* Integers [from, to) of a source. */
static void read_integers(const rf__column_cursor *cursor, const rf__column_source *source, int64_t from,
                          int64_t to, int64_t *integers) {
    rf__column_values values;
    for (int64_t at = from; at < to; at += RF__COLUMN_VALUES) {
        const int64_t count = to - at < RF__COLUMN_VALUES ? to - at : RF__COLUMN_VALUES;
        cursor->call->kernels->values(source, at, count, &values);
        memcpy(integers + (at - from), values.integers, (size_t)count * sizeof *integers);
    }
}

static int64_t bag_values(const rf__column_source *source, int64_t sample) {
    return rf__column_start(source, sample + 1) - rf__column_start(source, sample);
}

/* Returns the room for a bag: values of both sides, pairs, and a row if it is empty. */
static int64_t bag_rows(const rf__column *column, int64_t sample) {
    const int64_t left = bag_values(&column->left, sample);
    int64_t n_rows_needed = left > 1 ? left : 1;
    if (column->right.input != NULL) {
        const int64_t right = bag_values(&column->right, sample);
        int64_t pairs;
        if (__builtin_mul_overflow(left, right, &pairs)) pairs = INT64_MAX;
        n_rows_needed = right > n_rows_needed ? right : n_rows_needed;
        n_rows_needed = pairs > n_rows_needed ? pairs : n_rows_needed;
    }
    return n_rows_needed;
}

static int64_t cross_index(const rf__column_cursor *cursor, int64_t left, int64_t right) {
    const rf_columns_column *column = cursor->column->column;
    int64_t index;
    cursor->call->kernels->cross(&left, &right, 1, column->cross_seed, column->cross_buckets, &index);
    return index;
}

/* The fast path if each value is an index and no empty sample has a row: values become rows without
 * individual checks. Returns false if some need more. */
static bool bags_add_values(rf__column_cursor *cursor) {
    const rf__column *column = cursor->column;
    const rf__column_source *source = &column->left;
    if (column->right.input != NULL || column->column->empty >= 0) return false;
    const int64_t from = rf__column_start(source, cursor->first), to = rf__column_start(source, cursor->last);
    const uint64_t rows = (uint64_t)column->column->rows;
    bool bad = false;
    read_integers(cursor, source, from, to, cursor->rows);
    for (int64_t i = 0; i < to - from; i++) bad |= (uint64_t)cursor->rows[i] >= rows;
    if (bad) return false;
    if (column->column->weighted && source->input->weights != NULL) {
        memcpy(cursor->weights, source->input->weights + from, (size_t)(to - from) * sizeof *cursor->weights);
    } else {
        for (int64_t i = 0; i < to - from; i++) cursor->weights[i] = 1.0f;
    }
    for (int64_t sample = cursor->first; sample <= cursor->last; sample++)
        cursor->offsets[sample - cursor->first] = rf__column_start(source, sample) - from;
    cursor->n_rows = to - from;
    return true;
}

static void bags_add(rf__column_cursor *cursor) {
    if (bags_add_values(cursor)) return;
    const rf__column *column = cursor->column;
    const rf__column_source *left = &column->left, *right = column->right.input ? &column->right : NULL;
    const float *weights = column->column->weighted ? left->input->weights : NULL;
    const int64_t left_from = rf__column_start(left, cursor->first);
    const int64_t right_from = right ? rf__column_start(right, cursor->first) : 0;
    read_integers(cursor, left, left_from, rf__column_start(left, cursor->last), cursor->left);
    if (right) read_integers(cursor, right, right_from, rf__column_start(right, cursor->last), cursor->right);
    for (int64_t sample = cursor->first; sample < cursor->last; sample++) {
        const int64_t from = rf__column_start(left, sample), to = rf__column_start(left, sample + 1);
        const int64_t right_begin = right ? rf__column_start(right, sample) - right_from : 0;
        const int64_t right_values = right ? bag_values(right, sample) : 1;
        const int64_t previous = cursor->n_rows;
        cursor->offsets[sample - cursor->first] = previous;
        for (int64_t at = from; at < to; at++) {
            const int64_t value = cursor->left[at - left_from];
            for (int64_t right_value = 0; right_value < right_values; right_value++) {
                const int64_t index =
                    right ? cross_index(cursor, value, cursor->right[right_begin + right_value]) : value;
                row_add(cursor, index, weights ? weights[at] : 1.0f, sample,
                        (at - from) * right_values + right_value);
            }
        }
        if (cursor->n_rows == previous) row_add_empty(cursor);
    }
    cursor->offsets[cursor->last - cursor->first] = cursor->n_rows;
}

/* Appends pairs of one bag from cursor->left_at and right_at on, as many as there is room for. */
static void piece_add(rf__column_cursor *cursor) {
    const rf__column *column = cursor->column;
    const rf__column_source *left = &column->left, *right = column->right.input ? &column->right : NULL;
    const float *weights = column->column->weighted ? left->input->weights : NULL;
    const int64_t sample = cursor->first;
    const int64_t to = rf__column_start(left, sample + 1);
    const int64_t right_begin = right ? rf__column_start(right, sample) : 0;
    const int64_t right_end = right ? rf__column_start(right, sample + 1) : 1;
    rf__column_values values, right_values;
    while (cursor->left_at < to && right_begin < right_end &&
           cursor->n_rows + RF__COLUMN_VALUES <= RF__COLUMN_ROWS) {
        if (right == NULL) {
            const int64_t remaining = to - cursor->left_at;
            const int64_t count = remaining < RF__COLUMN_VALUES ? remaining : RF__COLUMN_VALUES;
            cursor->call->kernels->values(left, cursor->left_at, count, &values);
            for (int64_t i = 0; i < count; i++)
                row_add(cursor, values.integers[i], weights ? weights[cursor->left_at + i] : 1.0f, sample,
                        cursor->position + i);
            cursor->left_at += count;
            cursor->position += count;
            continue;
        }
        const int64_t remaining = right_end - cursor->right_at;
        const int64_t count = remaining < RF__COLUMN_VALUES ? remaining : RF__COLUMN_VALUES;
        cursor->call->kernels->values(left, cursor->left_at, 1, &values);
        cursor->call->kernels->values(right, cursor->right_at, count, &right_values);
        for (int64_t i = 0; i < count; i++)
            row_add(cursor, cross_index(cursor, values.integers[0], right_values.integers[i]), 1.0f, sample,
                    cursor->position + i);
        cursor->position += count;
        cursor->right_at += count;
        if (cursor->right_at == right_end) {
            cursor->right_at = right_begin;
            cursor->left_at++;
        }
    }
    cursor->has_more = cursor->left_at < to && right_begin < right_end;
    cursor->n_returned += cursor->n_rows;
    if (!cursor->has_more && cursor->n_returned == 0) {
        row_add_empty(cursor);
        cursor->n_returned = cursor->n_rows;
    }
    cursor->offsets[0] = 0;
    cursor->offsets[1] = cursor->n_rows;
}

bool rf__column_cursor_next(rf__column_cursor *cursor) {
    const rf__column *column = cursor->column;
    cursor->n_rows = 0;
    if (cursor->has_more) {
        piece_add(cursor);
        return true;
    }
    cursor->first = cursor->last;
    if (cursor->first >= cursor->end) return false;
    int64_t capacity = RF__COLUMN_ROWS, last = cursor->first;
    while (last < cursor->end && last - cursor->first < RF__COLUMN_BAGS) {
        const int64_t needed_rows = bag_rows(column, last);
        if (needed_rows > capacity) break;
        capacity -= needed_rows;
        last++;
    }
    cursor->is_piece = last == cursor->first;
    cursor->last = cursor->is_piece ? last + 1 : last;
    if (!cursor->is_piece) {
        bags_add(cursor);
        return true;
    }
    cursor->left_at = rf__column_start(&column->left, cursor->first);
    cursor->right_at = column->right.input ? rf__column_start(&column->right, cursor->first) : 0;
    cursor->position = cursor->n_returned = 0;
    piece_add(cursor);
    return true;
}
