#include "gpu/tune/schedule_text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int32_t *value_of(const rf__schedule_field *field, const void *schedule) {
    return (int32_t *)((char *)(uintptr_t)schedule + field->offset);
}

static rf_status value_check(const rf__schedule_field *field, long long value) {
    const bool allowed =
        value >= field->least && value <= field->most && (!field->power_of_two || (value & (value - 1)) == 0);
    RF_FAIL_IF(!allowed, RF_ERR_VALUE, "schedule: %s is %lld; expected %s%d to %d", field->name, value,
               field->power_of_two ? "a power of two, " : "", (int)field->least, (int)field->most);
    return RF_OK;
}

/* Adds a name to a list, "a, b or c", with `last` before the last name. */
static void list_add(char *list, size_t bytes, const char *name, int32_t i, int32_t count, const char *last) {
    const size_t used = strlen(list);
    snprintf(list + used, bytes - used, "%s%s", i == 0 ? "" : i < count - 1 ? ", " : last, name);
}

static rf_status word_read(const rf__schedule_field *field, const char *text, int length, int32_t *value) {
    char allowed[256] = "";
    for (int32_t i = field->least; i <= field->most; i++) {
        *value = i;
        if ((int)strlen(field->words[i]) == length && strncmp(text, field->words[i], (size_t)length) == 0)
            return RF_OK;
        list_add(allowed, sizeof allowed, field->words[i], i - field->least, field->most - field->least + 1,
                 " or ");
    }
    return rf__fail(RF_ERR_VALUE, "schedule: %s is \"%.*s\"; expected %s", field->name, length, text,
                    allowed);
}

static rf_status number_read(const rf__schedule_field *field, const char *text, int length, int32_t *value) {
    char *end = NULL;
    const long long number = strtoll(text, &end, 10);
    RF_FAIL_IF(end != text + length || length == 0, RF_ERR_VALUE,
               "schedule: %s is \"%.*s\"; expected a number", field->name, length, text);
    *value = (int32_t)number;
    return value_check(field, number);
}

/* Reads field=value, `length` bytes. */
static rf_status field_read(rf__schedule_fields fields, const char *text, int length, void *schedule) {
    const char *equals = memchr(text, '=', (size_t)length);
    const int name_length = equals != NULL ? (int)(equals - text) : length;
    const char *value = equals != NULL ? equals + 1 : text + length;
    const int value_length = length - (int)(value - text);
    char names[256] = "";
    for (int32_t i = 0; i < fields.count; i++) {
        const rf__schedule_field *field = &fields.fields[i];
        list_add(names, sizeof names, field->name, i, fields.count, " and ");
        if ((int)strlen(field->name) != name_length || strncmp(text, field->name, (size_t)name_length) != 0)
            continue;
        int32_t *to = value_of(field, schedule);
        RF_FAIL_IF(*to != 0, RF_ERR_VALUE, "schedule: %s is given twice", field->name);
        return (field->words != NULL ? word_read : number_read)(field, value, value_length, to);
    }
    return rf__fail(RF_ERR_VALUE,
                    "schedule: found \"%.*s\"; expected field=value with spaces between, with the fields %s",
                    length, text, names);
}

rf_status rf__schedule_parse(rf__schedule_fields fields, const char *text, void *schedule) {
    while (text != NULL && *text != '\0') {
        const int length = (int)strcspn(text, " ");
        if (length > 0) RF_CHECK(field_read(fields, text, length, schedule));
        text += length + (text[length] == ' ');
    }
    return RF_OK;
}

void rf__schedule_print(rf__schedule_fields fields, const void *schedule, char *text, size_t bytes) {
    text[0] = '\0';
    for (int32_t i = 0; i < fields.count; i++) {
        const rf__schedule_field *field = &fields.fields[i];
        const int32_t value = *value_of(field, schedule);
        const size_t used = strlen(text);
        const char *space = used > 0 ? " " : "";
        if (value == 0) continue;
        if (field->words == NULL)
            snprintf(text + used, bytes - used, "%s%s=%d", space, field->name, (int)value);
        else if (value >= field->least && value <= field->most)
            snprintf(text + used, bytes - used, "%s%s=%s", space, field->name, field->words[value]);
    }
}

rf_status rf__schedule_check(rf__schedule_fields fields, const void *schedule) {
    for (int32_t i = 0; i < fields.count; i++) {
        const int32_t value = *value_of(&fields.fields[i], schedule);
        if (value != 0) RF_CHECK(value_check(&fields.fields[i], value));
    }
    return RF_OK;
}
