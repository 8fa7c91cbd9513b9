/* Cuts a call into spans, hands them to worker threads, checks the offsets of each span before it is
 * pooled. */
#include "families/fused_embedding_bag/cpu/pool.h"

#include <inttypes.h>

#include "core/huge_pages.h"
#include "core/isa.h"
#include "core/status.h"
#include "families/fused_embedding_bag/cpu/look_ahead.h"

enum {
    SPAN_LOOKUPS = 16384, /* approximate lookups of a span of a long feature */
    BLOCK_BYTES = 256, /* width of the adjacent columns that one worker writes, at least */
    BLOCKS_PER_WORKER = 64, /* at least, so that the threads end together */
    MIN_WORKER_BYTES = 65536, /* gathered bytes that are worth another thread */
    LEAD_BYTES = 32768, /* of prefetched, unused rows, by default; half and twice as much are equally fast */
    LEAST_DISTANCE = 64, /* lookups; the bounds of the default */
    MOST_DISTANCE = 256,
    MOST_SWEPT = 4608, /* lines, which stay in L2 until they are used */
    MAX_DISTANCE = 4096, /* beyond, rows have left L2 before they are used */
};

/* One thread's share: the block being pooled and, once the cursor has run over its end, the one after. */
typedef struct worker {
    rf__ahead ahead; /* first, because rf__ahead_next converts its address to the worker's */
    rf__pool_call *call;
    int64_t span, block_end; /* of the block being pooled */
    int64_t next, next_end; /* the block after; valid when has_next */
    bool has_next;
    int64_t ahead_span; /* the span that the cursor is in; its block is the next one when has_next */
    int64_t ahead_passed, pooled; /* lookups: up to the end of the cursor's span, and pooled so far */
} worker;

static int64_t at_least(int64_t value, int64_t least) { return value > least ? value : least; }

static int64_t at_most(int64_t value, int64_t most) { return value < most ? value : most; }

/* Large blocks first, so that a worker reads long runs of indices; small blocks last, so that all workers end
 * together. */
static void take_block(rf__pool_call *call, int64_t *first, int64_t *end) {
    int64_t spans = call->n_features * call->spans_per_feature, size;
    int64_t from = __atomic_load_n(&call->next_span, __ATOMIC_RELAXED);
    do {
        size = at_most(at_least((spans - from) / (2 * call->workers), call->block_spans), spans - from);
    } while (!__atomic_compare_exchange_n(&call->next_span, &from, from + size, true, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    *first = from;
    *end = from + size;
}

static rf__table table_of(const rf__pool_call *call, int64_t at) {
    const rf_feature *feature = &call->features[at];
    rf__table table = {
        .weight = rf__feature_weight(call->buffers, feature),
        .parameters = rf__feature_parameters(call->buffers, feature),
        .row = rf__feature_row(call->buffers, feature),
        .limit = call->check_bounds ? (uint64_t)feature->rows : UINT64_MAX,
        .pooling = (rf_pooling)feature->pooling,
        .padding_idx = feature->padding_idx,
        .feature = at,
        .output = (char *)call->output + rf__row_offset(&call->output_row, 0, feature->output_column),
    };
    if (call->pitch != 0) table.row.pitch = call->pitch;
    return table;
}

static int64_t span_bags(const rf__pool_call *call, int64_t span, int64_t *first, int64_t *last) {
    *first = span % call->spans_per_feature * call->span_bags;
    *last = call->bags - *first < call->span_bags ? call->bags : *first + call->span_bags;
    return span / call->spans_per_feature;
}

/* True if the parameters of a table lie before its codes, in the same rows. */
static bool are_joined(const rf__table *table) {
    const int64_t before = (int64_t)((uintptr_t)table->weight - (uintptr_t)table->parameters);
    return table->parameters != NULL && table->row.parameters_pitch == table->row.pitch && before >= 0 &&
           before + table->row.bytes <= table->row.pitch;
}

/* Lines to prefetch with `bags` bags, if that pays for `lookups` lookups; or none. */
static rf__sweep sweep_of(const char *first, int64_t bytes, int64_t bags, int64_t lookups) {
    const int64_t lines = bytes / 64 + 1;
    if (first == NULL || lines > lookups || lines > MOST_SWEPT) return (rf__sweep){0};
    return (rf__sweep){(uintptr_t)first, lines, lines / bags + 1};
}

/* The sweeps of a table's rows and of its parameters. */
static void sweeps_of(const rf__pool_call *call, const rf__table *table, int64_t lookups,
                      rf__sweep sweeps[2]) {
    const int64_t rows = call->features[table->feature].rows;
    const bool joined = are_joined(table);
    sweeps[0] = sweep_of(joined ? table->parameters : table->weight, rows * table->row.pitch, call->span_bags,
                         lookups);
    sweeps[1] = sweep_of(joined ? NULL : table->parameters, rows * table->row.parameters_pitch,
                         call->span_bags, lookups);
}

/* Moves the cursor to lookups [begin, end) of a table. `swept`: as far as it pays, with the span before. */
static void look_at(rf__ahead *ahead, const rf__pool_call *call, const rf__table *table, int64_t begin,
                    int64_t end, bool swept) {
    const rf__row_format *row = &table->row;
    const bool joined = are_joined(table);
    const char *first = joined ? table->parameters : table->weight;
    const int64_t bytes = row->bytes + (table->weight - first);
    const bool whole = (uintptr_t)first % 64 == 0 && row->pitch % 64 == 0;
    const bool inside = bytes > 0 && bytes <= row->pitch && row->pitch <= 64 && 64 % row->pitch == 0 &&
                        (uintptr_t)first % (uintptr_t)row->pitch == 0;
    rf__sweep sweeps[2] = {{0}};
    if (swept) sweeps_of(call, table, end - begin, sweeps);
    ahead->weight = first;
    ahead->pitch = row->pitch;
    ahead->row_bytes = bytes;
    ahead->lines = whole ? (bytes + 63) / 64 : inside ? 1 : 0;
    ahead->position = begin;
    ahead->end = end;
    ahead->swept = sweeps[0].lines > 0;
    ahead->parameters = joined || sweeps[1].lines > 0 ? NULL : table->parameters;
    ahead->parameters_pitch = row->parameters_pitch;
}

/* True if the kernel of the span before the cursor's sweeps. */
static bool is_swept(const worker *self) {
    const int64_t span = self->ahead_span;
    if (span <= (self->has_next ? self->next : self->span)) return false;
    int64_t first, last;
    const rf__table before = table_of(self->call, span_bags(self->call, span - 1, &first, &last));
    return before.parameters != NULL;
}

bool rf__ahead_next(rf__ahead *ahead) {
    worker *self = (worker *)ahead;
    const rf__pool_call *call = self->call;
    for (;;) {
        if (self->ahead_span + 1 < (self->has_next ? self->next_end : self->block_end)) {
            self->ahead_span++;
        } else if (!self->has_next) {
            take_block(self->call, &self->next, &self->next_end);
            self->has_next = true;
            self->ahead_span = self->next - 1;
            continue;
        } else {
            return false; /* a block is far enough */
        }
        int64_t first, last;
        rf__table table = table_of(call, span_bags(call, self->ahead_span, &first, &last));
        int64_t begin = rf__bag_start(call, table.feature, first),
                end = rf__bag_start(call, table.feature, last);
        if (begin < 0 || end > call->lookups || begin >= end)
            continue; /* empty, or bad: checked when pooled */
        self->ahead_passed += end - begin;
        look_at(ahead, call, &table, begin, end, is_swept(self));
        return true;
    }
}

void rf__look_far(rf__ahead *ahead, int64_t lookups) {
    const rf__pool_call *call = ((worker *)ahead)->call;
    while (lookups > 0) {
        if (ahead->position >= ahead->end && !rf__ahead_next(ahead)) return;
        const uintptr_t row = (uintptr_t)rf__load_int(call->indices, call->index_type, ahead->position++);
        rf__ask_for((const char *)((uintptr_t)ahead->weight + row * (uintptr_t)ahead->pitch),
                    ahead->row_bytes);
        if (ahead->parameters != NULL)
            rf__ask_for_line((uintptr_t)ahead->parameters + row * (uintptr_t)ahead->parameters_pitch);
        lookups--;
    }
}

/* Moves the cursor to its distance: at the start, and after short blocks. */
static void catch_up(worker *self, int64_t distance) {
    const int64_t passed = self->ahead_passed - (self->ahead.end - self->ahead.position);
    rf__look_far(&self->ahead, distance + self->pooled - passed);
}

/* Lets the kernel of `span` sweep the table of the next. */
static void sweep_next(worker *self, int64_t span) {
    const rf__pool_call *call = self->call;
    rf__sweep *sweeps = self->ahead.sweeps;
    sweeps[0].lines = sweeps[1].lines = 0;
    if (span + 1 >= self->block_end || call->prefetch_distance == 0) return;
    int64_t first, last;
    const rf__table table = table_of(call, span_bags(call, span + 1, &first, &last));
    const int64_t lookups =
        rf__bag_start(call, table.feature, last) - rf__bag_start(call, table.feature, first);
    if (table.parameters != NULL) sweeps_of(call, &table, lookups, sweeps);
}

static void offend(rf__pool_call *call, int64_t span, const rf__offence *offence) {
    pthread_mutex_lock(&call->lock);
    if (span < call->offending_span) {
        call->offence = *offence;
        __atomic_store_n(&call->offending_span, span, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&call->lock);
}

/* True when the offsets of the span rise within [0, lookups]. */
static bool offsets_are_good(rf__pool_call *call, int64_t span, int64_t feature, int64_t first,
                             int64_t last) {
    int64_t before = 0;
    for (int64_t bag = first; bag <= last; bag++) {
        int64_t start = rf__bag_start(call, feature, bag), at = feature * call->bags + bag;
        if (start < before || start > call->lookups || (at == 0 && start != 0)) {
            const int64_t ends = bag > 0 ? bag - 1 : 0; /* the bag that ends there, as in kernels of GPUs */
            offend(call, span, &(rf__offence){RF__BAD_OFFSET, feature, ends, at, start, before});
            return false;
        }
        before = start;
    }
    return true;
}

/* Records the first index of bags [first, last) that is not below the table's limit, if any. */
static void find_bad_index(rf__pool_call *call, int64_t span, const rf__table *table, int64_t first,
                           int64_t last) {
    for (int64_t bag = first; bag < last; bag++) {
        int64_t end = rf__bag_start(call, table->feature, bag + 1);
        for (int64_t at = rf__bag_start(call, table->feature, bag); at < end; at++) {
            int64_t value = rf__load_int(call->indices, call->index_type, at);
            if ((uint64_t)value < table->limit) continue;
            offend(call, span,
                   &(rf__offence){RF__BAD_INDEX, table->feature, bag, at, value, (int64_t)table->limit});
            return;
        }
    }
}

static void pool_span(worker *self, int64_t span) {
    rf__pool_call *call = self->call;
    int64_t first, last;
    rf__table table = table_of(call, span_bags(call, span, &first, &last));
    if (call->check_bounds && !offsets_are_good(call, span, table.feature, first, last)) return;
    int op = RF__SUM;
    if (table.pooling == RF_MAX) {
        op = RF__MAX;
    } else if (call->sample_weights != NULL || table.padding_idx >= 0) {
        op = RF__WEIGHTED;
    }
    const int64_t lookups =
        rf__bag_start(call, table.feature, last) - rf__bag_start(call, table.feature, first);
    sweep_next(self, span);
    rf__pool_kernel pool = call->kernels->pool[table.row.dtype][call->index_type][op];
    if (table.row.dim == 0 || !pool(call, &table, first, last, &self->ahead)) {
        find_bad_index(call, span, &table, first, last);
    }
    self->pooled += lookups;
}

/* One worker; how the executor numbers them does not matter. */
static void work(int64_t from, int64_t to, void *context) {
    (void)from;
    (void)to;
    rf__pool_call *call = context;
    worker self = {.call = call};
    take_block(call, &self.span, &self.block_end);
    self.ahead_span = self.span - 1;
    while (self.span < self.block_end) {
        for (; self.span < self.block_end; self.span++) {
            /* Spans before the offending one are pooled, so that the first offence is the one reported. */
            if (self.span > __atomic_load_n(&call->offending_span, __ATOMIC_RELAXED)) return;
            if (call->prefetch_distance > 0) catch_up(&self, call->prefetch_distance);
            pool_span(&self, self.span);
        }
        if (!self.has_next) {
            take_block(call, &self.next, &self.next_end);
            self.ahead_span = self.next - 1;
        }
        self.span = self.next;
        self.block_end = self.next_end;
        self.has_next = false;
    }
}

static rf_status report(const rf__pool_call *call) {
    const rf__offence *bad = &call->offence;
    RF_FAIL_IF(bad->kind == RF__BAD_INDEX && bad->limit == 0, RF_ERR_INDEX,
               "recfuse.%s: indices[%" PRId64 "] is %" PRId64 ", for feature %" PRId64 ", bag %" PRId64
               ", but its table has no rows, so no index is valid",
               call->operator_name, bad->position, bad->value, bad->feature, bad->bag);
    RF_FAIL_IF(bad->kind == RF__BAD_INDEX, RF_ERR_INDEX,
               "recfuse.%s: indices[%" PRId64 "] is %" PRId64 ", for feature %" PRId64 ", bag %" PRId64
               "; expected 0 to %" PRId64 ", less than the %" PRId64 " rows of its table",
               call->operator_name, bad->position, bad->value, bad->feature, bad->bag, bad->limit - 1,
               bad->limit);
    RF_FAIL_IF(bad->position == 0, RF_ERR_OFFSET,
               "recfuse.%s: offsets[0] is %" PRId64 "; expected 0, where the first bag begins",
               call->operator_name, bad->value);
    return rf__fail(
        RF_ERR_OFFSET,
        "recfuse.%s: offsets[%" PRId64 "] is %" PRId64 ", for feature %" PRId64 ", bag %" PRId64
        "; expected %" PRId64 " (where the bag before begins, since offsets never decrease) to %" PRId64
        " (the number of indices)",
        call->operator_name, bad->position, bad->value, bad->feature, bad->bag, bad->limit, call->lookups);
}

rf_status rf__pool_run(rf__pool_call *call, const rf_executor *executor) {
    if (call->n_features == 0 || call->bags == 0) return RF_OK;
    rf__huge_pages_ask(call->output, call->bags * call->output_row.pitch); /* a large one is new memory */

    int64_t feature_bytes = call->output_row.bytes / call->n_features;
    int64_t distance = call->prefetch_distance;
    if (distance < 0)
        distance = at_least(at_most(LEAD_BYTES / at_least(feature_bytes, 1), MOST_DISTANCE), LEAST_DISTANCE);
    call->prefetch_distance = (int32_t)at_most(distance, MAX_DISTANCE);
    int64_t workers = executor == NULL ? 1 : executor->threads;
    int64_t useful = (call->lookups + call->n_features * call->bags) /
                     at_least(MIN_WORKER_BYTES / at_least(feature_bytes, 1), 1);
    workers = at_least(at_most(workers, useful), 1);

    int64_t pieces = at_least(call->lookups / call->n_features / SPAN_LOOKUPS, 1);
    if (call->n_features < workers * BLOCKS_PER_WORKER) { /* few features: cut each */
        pieces = at_least(pieces, workers > 1 ? workers * BLOCKS_PER_WORKER / call->n_features : 1);
    }
    call->span_bags = at_least((call->bags + pieces - 1) / pieces, 1);
    call->spans_per_feature = (call->bags + call->span_bags - 1) / call->span_bags;
    int64_t spans = call->n_features * call->spans_per_feature;
    call->workers = workers;
    call->block_spans = workers == 1 ? spans : 1;
    if (call->spans_per_feature == 1 && workers > 1) {
        int64_t wide = BLOCK_BYTES / at_least(feature_bytes, 1), even = spans / (workers * BLOCKS_PER_WORKER);
        call->block_spans = at_least(at_most(wide, even), 1);
    }
    call->next_span = 0;
    call->kernels = rf__isa_in_use()->kernels;
    call->offending_span = INT64_MAX;
    RF_FAIL_IF(pthread_mutex_init(&call->lock, NULL) != 0, RF_ERR_MEMORY,
               "recfuse.%s: no mutex could be made", call->operator_name);
    rf_status status = RF_OK;
    if (workers == 1) {
        work(0, 1, call);
    } else if (executor->parallel_for(0, workers, 1, work, call) != 0) {
        status = rf__fail(RF_ERR_INTERNAL, "recfuse.%s: the thread pool failed", call->operator_name);
    }
    pthread_mutex_destroy(&call->lock);
    if (status == RF_OK && call->offending_span != INT64_MAX) status = report(call);
    return status;
}
