#include "families/embedding_columns/tensors/columns_pack.h"

#include <stdlib.h>
#include <string.h>

#include "core/validate.h"

enum { ALIGNMENT = 64 }; /* bytes of each part */

static int64_t type_bytes(rf_column_type type) { return type == RF_COLUMN_INT64 ? 8 : 4; }

static int64_t offset_of(const rf_column_input *input, int64_t at) {
    return input->offset_type == RF_INT64 ? ((const int64_t *)input->offsets)[at]
                                          : ((const int32_t *)input->offsets)[at];
}

/* Returns the bags of a jagged input; 0 without samples, for any `features`. */
static int64_t bags_of(const rf__columns_inputs *inputs, const rf_column_input *input) {
    return inputs->batch > 0 ? input->features * inputs->batch : 0;
}

/* Returns the number of values up to the last offset; all values if that offset is out of range. */
static int64_t used_values(const rf__columns_inputs *inputs, const rf_column_input *input) {
    const int64_t end = offset_of(input, bags_of(inputs, input));
    return end >= 0 && end < input->lookups ? end : input->lookups;
}

static rf_status group_add(const rf__columns_packing *packing, int64_t number) {
    const rf_column_input *input = &packing->inputs->rows[number];
    const int32_t at = packing->group_of[number];
    const bool is_jagged = input->width == 0;
    RF_FAIL_IF(at < 0 || at >= packing->n_groups, RF_ERR_VALUE, "input %lld has group %d, of %d groups",
               (long long)number, (int)at, (int)packing->n_groups);
    rf__columns_group *group = &packing->groups[at];
    const int64_t bags = is_jagged ? bags_of(packing->inputs, input) : 0;
    if (group->inputs++ == 0)
        *group = (rf__columns_group){.type = input->type, .is_jagged = is_jagged, .inputs = 1, .bags = bags};
    RF_FAIL_IF(group->type != input->type || group->is_jagged != is_jagged || group->bags != bags,
               RF_ERR_VALUE, "inputs of group %d differ; expected one form", (int)at);
    group->values += is_jagged ? used_values(packing->inputs, input) : input->width;
    group->has_weights |= input->weights != NULL;
    group->is_wide |= is_jagged && input->offset_type == RF_INT64;
    return RF_OK;
}

static void part_add(rf__columns_packing *packing, rf__columns_group *group, rf__columns_list list,
                     rf_column_type type, int64_t rows, int64_t columns) {
    const int64_t elements = columns < 0 ? rows : rows * columns;
    packing->parts[packing->n_parts++] = (rf__columns_part){
        .list = list, .type = type, .rows = rows, .columns = columns, .at = packing->bytes};
    group->at[list] = packing->bytes;
    packing->bytes += rf__round_up(elements * type_bytes(type), ALIGNMENT);
}

/* Adds the part of a group in one of the lists, if it has one. */
static void group_lay_out(rf__columns_packing *packing, rf__columns_group *group, rf__columns_list list,
                          bool any_weights) {
    const rf_column_type offsets = group->is_wide ? RF_COLUMN_INT64 : RF_COLUMN_INT32;
    const int64_t weights = group->has_weights ? group->values : 0;
    if (!group->is_jagged) {
        if (list == RF__COLUMNS_DENSE)
            part_add(packing, group, list, group->type, group->values, packing->inputs->batch);
    } else if (list == RF__COLUMNS_VALUES) {
        part_add(packing, group, list, group->type, group->values, -1);
    } else if (list == RF__COLUMNS_OFFSETS) {
        part_add(packing, group, list, offsets, group->inputs * group->bags + 1, -1);
    } else if (list == RF__COLUMNS_WEIGHTS && any_weights) {
        part_add(packing, group, list, RF_COLUMN_FLOAT32, weights, -1);
    }
}

rf_status rf__columns_pack_plan(rf__columns_packing *packing) {
    const size_t n = (size_t)packing->n_groups;
    bool any_weights = false;
    RF_FAIL_IF(packing->inputs->on_gpu, RF_ERR_VALUE, "inputs are on a GPU; expected inputs on the CPU");
    packing->groups = calloc(n + 1, sizeof *packing->groups);
    packing->parts = calloc(RF__COLUMNS_LISTS * n + 1, sizeof *packing->parts);
    RF_FAIL_IF(packing->groups == NULL || packing->parts == NULL, RF_ERR_MEMORY, "no memory for %zu groups",
               n);
    for (int64_t i = 0; i < packing->inputs->count; i++) RF_CHECK(group_add(packing, i));
    for (size_t g = 0; g < n; g++) {
        rf__columns_group *group = &packing->groups[g];
        any_weights |= group->has_weights;
        group->is_wide |= group->inputs > 1 && group->values > INT32_MAX;
    }
    for (rf__columns_list list = RF__COLUMNS_DENSE; list < RF__COLUMNS_LISTS; list++)
        for (size_t g = 0; g < n; g++) group_lay_out(packing, &packing->groups[g], list, any_weights);
    return RF_OK;
}

/* Copies each value of all samples, one value after another. */
static void dense_copy(const rf_column_input *input, int64_t batch, char *to) {
    const int64_t size = type_bytes(input->type);
    for (int64_t v = 0; v < input->width; v++, to += batch * size) {
        const char *from = (const char *)input->values + v * input->value_stride * size;
        if (input->sample_stride == 1) {
            if (batch > 0) memcpy(to, from, (size_t)(batch * size));
            continue;
        }
        for (int64_t s = 0; s < batch; s++)
            memcpy(to + s * size, from + s * input->sample_stride * size, (size_t)size);
    }
}

static void offset_put(char *offsets, bool is_wide, int64_t at, int64_t value) {
    if (is_wide)
        ((int64_t *)offsets)[at] = value;
    else
        ((int32_t *)offsets)[at] = (int32_t)value;
}

/* Offsets are any numbers of a caller's: a sum that does not fit is wrong as well. */
static int64_t wrapping_sum(int64_t available, int64_t right) {
    return (int64_t)((uint64_t)available + (uint64_t)right);
}

/* Copies the offsets of the `number`-th input of a group, whose values begin at `base`. */
static void offsets_copy(const rf__columns_group *group, const rf_column_input *input, int64_t number,
                         int64_t base, char *to) {
    const bool is_only = group->inputs == 1;
    const int64_t end = offset_of(input, group->bags);
    const bool right = offset_of(input, 0) == 0 && end >= 0 && end <= input->lookups;
    const int64_t start = is_only ? 0 : right ? base : -group->values - 1;
    if (number == 0) offset_put(to, group->is_wide, 0, is_only ? offset_of(input, 0) : 0);
    for (int64_t b = 1; b <= group->bags; b++)
        offset_put(to, group->is_wide, number * group->bags + b, wrapping_sum(offset_of(input, b), start));
}

void rf__columns_pack(const rf__columns_packing *packing, char *memory) {
    for (int32_t g = 0; g < packing->n_groups; g++) {
        const rf__columns_group *group = &packing->groups[g];
        const int64_t size = type_bytes(group->type);
        int64_t base = 0, number = 0; /* values and inputs that are copied */
        for (int64_t i = 0; i < packing->inputs->count; i++) {
            const rf_column_input *input = &packing->inputs->rows[i];
            if (packing->group_of[i] != g) continue;
            if (!group->is_jagged) {
                dense_copy(input, packing->inputs->batch,
                           memory + group->at[RF__COLUMNS_DENSE] + base * packing->inputs->batch * size);
                base += input->width;
                continue;
            }
            const int64_t available = group->values - base; /* offsets may have changed since the plan */
            const int64_t required = used_values(packing->inputs, input),
                          used = required < available ? required : available;
            if (used > 0)
                memcpy(memory + group->at[RF__COLUMNS_VALUES] + base * size, input->values,
                       (size_t)(used * size));
            if (used > 0 && input->weights != NULL)
                memcpy(memory + group->at[RF__COLUMNS_WEIGHTS] + base * (int64_t)sizeof(float),
                       input->weights, (size_t)used * sizeof(float));
            offsets_copy(group, input, number++, base, memory + group->at[RF__COLUMNS_OFFSETS]);
            base += used;
        }
    }
}
