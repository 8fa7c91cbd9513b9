#include "gpu/driver/error_words.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/driver/upload.h"

rf_status rf__cuda_error_words_new(const rf__cuda_driver *driver, rf__cuda_error_words *words) {
    rf_status status = RF_OK;
    rf__cu_pointer claimed = 0, records = 0;
    const size_t bytes = RF__CUDA_ERROR_WORDS * sizeof *words->records;
    memset(words, 0, sizeof *words);
    words->owners = calloc(RF__CUDA_ERROR_WORDS, sizeof *words->owners);
    RF_FAIL_IF(words->owners == NULL, RF_ERR_MEMORY, "no memory for the errors of a GPU");
    RF__CUDA_TRY(driver->cuMemHostAlloc((void **)&words->records, bytes,
                                        RF__CU_MEMHOSTALLOC_PORTABLE | RF__CU_MEMHOSTALLOC_DEVICEMAP));
    memset(words->records, 0, bytes);
    RF__CUDA_TRY(driver->cuMemHostGetDevicePointer_v2(&records, words->records, 0));
    /* As many zeros as there are words: no table owns a word yet. */
    RF_TRY(rf__cuda_upload(driver, words->owners, RF__CUDA_ERROR_WORDS * sizeof *words->first.claimed,
                           &claimed));
    words->first = (rf_error_word){(rf_u32 *)(uintptr_t)claimed, (rf_error_record *)(uintptr_t)records};
out:
    if (status != RF_OK) {
        if (words->records != NULL) (void)driver->cuMemFreeHost(words->records);
        free(words->owners);
    }
    return status;
}

/* Spreads every bit over all (the finaliser of a 64-bit hash). */
static uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 32)) * 0x9e3779b97f4a7c15u;
    value = (value ^ (value >> 29)) * 0xbf58476d1ce4e5b9u;
    return value ^ (value >> 32);
}

/* Returns the number of a table's word, and claims it for a new table. */
static uint32_t word_number(const rf__cuda_error_words *words, uint64_t table) {
    enum { PROBES = 64 };
    const uint32_t first = (uint32_t)(table % RF__CUDA_ERROR_WORDS);
    for (uint32_t i = 0; i < PROBES; i++) {
        const uint32_t at = (first + i) % RF__CUDA_ERROR_WORDS;
        uint64_t owner = __atomic_load_n(&words->owners[at], __ATOMIC_RELAXED);
        if (owner == 0 && __atomic_compare_exchange_n(&words->owners[at], &owner, table, false,
                                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            owner = table;
        if (owner == table) return at;
    }
    return first;
}

rf__cuda_error_word rf__cuda_error_word_of(const rf__cuda_error_words *words, const void *weight,
                                           uint64_t shape) {
    const uint64_t table = mix((uintptr_t)weight ^ mix(shape + 1));
    const uint32_t at = word_number(words, table != 0 ? table : 1);
    return (rf__cuda_error_word){{words->first.claimed + at, words->first.record + at}, &words->records[at]};
}

static rf_status raise_record(const rf_error_record *record) {
    static const char *const operators[] = {
#define RF__CHECKED_OPERATOR(name) #name,
#include "families.h"
    };
    static const struct {
        const char *name, *counted, *none;
        rf_rule rule;
        rf_owner owner;
    } arguments[] = {
#define RF__CHECKED_ARGUMENT(name, text, rule, owner, counted, none) \
    [RF_ARGUMENT_##name] = {text, counted, none, RF_RULE_##rule, RF_OWNER_##owner},
        RF_ARGUMENT_LIST(RF__CHECKED_ARGUMENT)
#include "families.h"
    };
    static const char when[] =
        "(found on the GPU by an earlier call with these tables, whose output is wrong)";
    const bool readable = record->operator_number < sizeof operators / sizeof operators[0] &&
                          record->argument < sizeof arguments / sizeof arguments[0] &&
                          arguments[record->argument].name != NULL;
    RF_FAIL_IF(!readable, RF_ERR_INTERNAL,
               "a GPU kernel reported an unknown error of argument %u of operator %u",
               (unsigned)record->argument, (unsigned)record->operator_number);
    const char *name = arguments[record->argument].name, *counted = arguments[record->argument].counted;
    char bag[80] = "", list[16] = "", position_text[24] = "", value_text[256];
    const rf_owner owner = arguments[record->argument].owner;
    if (owner == RF_OWNER_COLUMN) {
        snprintf(bag, sizeof bag, ", of column %" PRId32 " and sample %" PRId64, record->feature,
                 record->bag);
    } else if (record->bag >= 0 && record->feature >= 0) {
        snprintf(bag, sizeof bag, ", for feature %" PRId32 ", bag %" PRId64, record->feature, record->bag);
    } else if (record->bag >= 0) {
        snprintf(bag, sizeof bag, ", for bag %" PRId64, record->bag);
    } else if (owner == RF_OWNER_LIST) {
        snprintf(list, sizeof list, "[%" PRId32 "]", record->feature);
    }
    if (record->position >= 0)
        snprintf(position_text, sizeof position_text, "[%" PRId64 "]", record->position);
    snprintf(value_text, sizeof value_text, "recfuse.%s: %s%s%s is %" PRId64,
             operators[record->operator_number], name, list, position_text, record->value);
    if (arguments[record->argument].rule == RF_RULE_INDEX) {
        RF_FAIL_IF(record->limit <= 0, RF_ERR_INDEX, "%s%s, but %s, so no index is valid %s", value_text, bag,
                   arguments[record->argument].none, when);
        return rf__fail(RF_ERR_INDEX, "%s%s; expected 0 to %" PRId64 ", less than the %" PRId64 " %s %s",
                        value_text, bag, record->limit - 1, record->limit, counted, when);
    }
    if (arguments[record->argument].rule == RF_RULE_RANGE)
        return rf__fail(RF_ERR_VALUE, "%s; expected %" PRId64 " to %" PRId64 ", %s %s", value_text,
                        record->limit, record->lookups, counted, when);
    RF_FAIL_IF(record->position == 0, RF_ERR_OFFSET, "%s; expected 0, where the first bag begins %s",
               value_text, when);
    return rf__fail(RF_ERR_OFFSET,
                    "%s%s; expected %" PRId64
                    " (where the bag before begins, since %s never decrease) to %" PRId64
                    " (the number of indices) %s",
                    value_text, bag, record->limit, name, record->lookups, when);
}

static bool is_ready(const rf_error_record *record) {
    return __atomic_load_n(&record->ready, __ATOMIC_ACQUIRE) == RF_ERROR_READY;
}

/* The lock for taking a record or a note, so that one thread raises it; no wait happens under it. A child
 * process, which has no CUDA, never gets here. */
static pthread_mutex_t taking = PTHREAD_MUTEX_INITIALIZER;
static rf__cuda_note *notes; /* under the lock; of all devices, at most one per word */
static int32_t n_notes; /* atomic; written under the lock */

void rf__cuda_note_leave(rf__cuda_error_word word, rf__cuda_note *note) {
    note->of = word.record;
    pthread_mutex_lock(&taking);
    rf__cuda_note **at = &notes;
    while (*at != NULL && (*at)->of != note->of) at = &(*at)->next;
    rf__cuda_note *unused = note;
    if (*at == NULL) {
        note->next = NULL;
        *at = note;
        unused = NULL;
        __atomic_store_n(&n_notes, n_notes + 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&taking);
    free(unused);
}

static bool is_note_of(const rf__cuda_note *note, const rf_error_record *records, int32_t count) {
    return note->of >= records && note->of < records + count;
}

/* Returns the first note of one of these records [count], or NULL; the caller frees it. *more: there are
 * others. */
static rf__cuda_note *note_take(const rf_error_record *records, int32_t count, int32_t *more) {
    rf__cuda_note *is_new = NULL;
    *more = 0;
    if (__atomic_load_n(&n_notes, __ATOMIC_ACQUIRE) == 0) return NULL;
    pthread_mutex_lock(&taking);
    for (rf__cuda_note **at = &notes; *at != NULL;) {
        rf__cuda_note *note = *at;
        const bool is_of = is_note_of(note, records, count);
        if (is_of && is_new == NULL) {
            is_new = note;
            *at = note->next;
            __atomic_store_n(&n_notes, n_notes - 1, __ATOMIC_RELEASE);
            continue;
        }
        *more += is_of;
        at = &note->next;
    }
    pthread_mutex_unlock(&taking);
    return is_new;
}

static rf_status note_raise(rf__cuda_note *note) {
    if (note == NULL) return RF_OK;
    const rf_status status = rf__fail(note->status, "%s", note->text);
    free(note);
    return status;
}

/* Copies a record and frees its word; false if another thread was first. */
static bool record_take(rf_error_record *record, rf_error_record *copy) {
    pthread_mutex_lock(&taking);
    const bool is_new = is_ready(record);
    if (is_new) {
        *copy = *record;
        /* In this order: the record is empty before a kernel may write the next one. */
        __atomic_store_n(&record->ready, RF_ERROR_NONE, __ATOMIC_RELEASE);
        __atomic_store_n(&record->raised, copy->raised + 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&taking);
    return is_new;
}

bool rf__cuda_error_is_left(rf__cuda_error_word word) {
    return is_ready(word.record) || __atomic_load_n(&n_notes, __ATOMIC_ACQUIRE) != 0;
}

rf_status rf__cuda_error_raise(rf__cuda_error_word word) {
    rf_error_record record;
    int32_t more;
    return record_take(word.record, &record) ? raise_record(&record)
                                             : note_raise(note_take(word.record, 1, &more));
}

/* Counts the notes of a device. */
static int32_t notes_count(const rf_error_record *records) {
    int32_t count = 0;
    pthread_mutex_lock(&taking);
    for (const rf__cuda_note *note = notes; note != NULL; note = note->next)
        count += is_note_of(note, records, RF__CUDA_ERROR_WORDS);
    pthread_mutex_unlock(&taking);
    return count;
}

rf_status rf__cuda_errors_raise(const rf__cuda_error_words *words) {
    rf_error_record record, *first = NULL;
    int32_t more = 0;
    for (int32_t i = 0; i < RF__CUDA_ERROR_WORDS; i++) {
        rf_error_record *candidate = &words->records[i];
        if (!is_ready(candidate)) continue;
        more += first != NULL;
        if (first == NULL) first = candidate;
    }
    rf_status status;
    if (first != NULL && record_take(first, &record)) {
        status = raise_record(&record);
        more += notes_count(words->records);
    } else {
        status = note_raise(note_take(words->records, RF__CUDA_ERROR_WORDS, &more));
    }
    if (status == RF_OK || more == 0) return status;
    return rf__fail(status, "%s. Check again, since calls with other tables left %d more errors.",
                    rf_last_error(), (int)more);
}
