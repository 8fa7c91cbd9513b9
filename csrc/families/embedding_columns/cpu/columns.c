/* rf_embedding_columns_cpu and rf_embedding_columns_start_cpu: the output is cut into tiles, runs of adjacent
 * columns of some samples. */
#include "core/threads/workers.h"
#include "families/embedding_columns/cpu/columns_pool.h"
#include "families/embedding_columns/cpu/rows.h"
#include "core/tasks.h"

#include <stdlib.h>

static const char operator_name[] = "embedding_columns";

enum {
    TILE_COLUMNS = RF__COLUMN_NEIGHBOURS,
    RUN_BYTES = 8192, /* that a sample of a tile reads and writes, approximately, with several columns */
    TILE_BYTES = 1 << 21, /* that a tile does */
    LEAST_SAMPLES = 32, /* per tile */
    TILES_PER_WORKER = 8, /* at least, if there are enough samples */
    STARTED_WORKER_BYTES = 1 << 18, /* that pay for waking a thread, if no caller waits */
};

typedef struct tiles {
    rf__columns_call *call;
    int32_t *starts; /* [n_runs + 1] of runs of columns */
    int64_t n_runs;
    int64_t samples; /* per tile */
    int64_t n_pieces; /* tiles of a run */
} tiles;

static void write_tile(void *context, int64_t number) {
    const tiles *tiles = context;
    const int64_t run = number / tiles->n_pieces, batch = tiles->call->params->batch;
    const int64_t first = number % tiles->n_pieces * tiles->samples;
    const int64_t last = batch - first < tiles->samples ? batch : first + tiles->samples;
    const rf_columns_column *columns = tiles->call->program.columns;
    for (int32_t c = tiles->starts[run], end; c < tiles->starts[run + 1]; c = end) {
        for (end = c; end < tiles->starts[run + 1] && rf__column_copies(tiles->call, &columns[end]); end++) {
        }
        if (end > c) {
            rf__columns_copy(tiles->call, c, end - c, first, last);
            continue;
        }
        const rf__column column = rf__column_of(tiles->call, end++);
        rf__column_write(tiles->call, &column, first, last);
    }
}

/* Runs of columns about as heavy as each other; *bytes: of all. */
static void cut_columns(tiles *tiles, int64_t *bytes) {
    const rf__columns_call *call = tiles->call;
    int64_t in_run = 0;
    *bytes = 0;
    for (int32_t c = 0; c < call->program.header->n_columns; c++) {
        const int64_t cost = rf__columns_cost(call, c);
        const bool is_full = tiles->n_runs > 0 && (c - tiles->starts[tiles->n_runs - 1] == TILE_COLUMNS ||
                                                   in_run + cost > RUN_BYTES);
        if (tiles->n_runs == 0 || is_full) {
            tiles->starts[tiles->n_runs++] = c;
            in_run = 0;
        }
        in_run += cost;
        *bytes += cost * call->params->batch;
    }
    tiles->starts[tiles->n_runs] = (int32_t)call->program.header->n_columns;
}

/* Cuts the output into tiles for at most *workers threads, and for at most as many as `worker_bytes` each
 * keep busy; no tiles if there is nothing to write. */
static rf_status tiles_cut(rf__columns_call *call, int64_t worker_bytes, tiles *tiles, int64_t *workers) {
    const int64_t n_columns = call->program.header->n_columns, batch = call->params->batch;
    int64_t bytes;
    *tiles = (struct tiles){.call = call};
    if (n_columns == 0 || batch == 0) return RF_OK;
    tiles->starts = malloc(((size_t)n_columns + 1) * sizeof *tiles->starts);
    RF__REFUSE_IF(tiles->starts == NULL, RF_ERR_MEMORY, "no memory for " RF__I64 " columns", n_columns);
    cut_columns(tiles, &bytes);
    *workers = rf__tasks_threads(*workers, bytes, worker_bytes);
    const int64_t by_bytes = bytes / TILE_BYTES / tiles->n_runs + 1;
    const int64_t by_workers = *workers > 1 ? TILES_PER_WORKER * *workers / tiles->n_runs + 1 : 1;
    const int64_t pieces = by_bytes > by_workers ? by_bytes : by_workers;
    tiles->samples = batch / pieces > LEAST_SAMPLES ? (batch + pieces - 1) / pieces : LEAST_SAMPLES;
    tiles->n_pieces = (batch + tiles->samples - 1) / tiles->samples;
    return RF_OK;
}

static rf_status run(rf__columns_call *call, const rf_executor *executor) {
    tiles tiles;
    int64_t workers = executor == NULL ? 1 : executor->threads;
    RF_CHECK(tiles_cut(call, RF__WORKER_BYTES, &tiles, &workers));
    const rf_status status =
        rf__tasks_run(operator_name, tiles.n_runs * tiles.n_pieces, workers, write_tile, &tiles, executor);
    free(tiles.starts);
    return status;
}

rf_status rf_embedding_columns_cpu(const rf_embedding_columns_params *params, const rf_executor *executor) {
    rf__columns_call call;
    RF_CHECK(rf__columns_begin(params, true, &call));
    return rf__columns_end(&call, run(&call, executor));
}

/* A call for which no thread waits. */
typedef struct started_call {
    rf_embedding_columns_params params;
    rf__columns_call call;
    tiles tiles;
    rf__job job;
    rf_embedding_columns_done callback;
    void *context;
} started_call;

static void write_started(void *context, int64_t tile) {
    write_tile(&((started_call *)context)->tiles, tile);
}

static void end_started(void *context) {
    started_call *of = context;
    const rf_embedding_columns_done callback = of->callback;
    void *callback_context = of->context;
    const rf_status status = rf__columns_end(&of->call, RF_OK);
    free(of->tiles.starts);
    free(of);
    callback(callback_context, status, status == RF_OK ? "" : rf_last_error());
}

/* Everything that may fail except for errors in the inputs. */
static rf_status prepare_started(started_call *of, int32_t threads) {
    int64_t workers = threads;
    RF_CHECK(tiles_cut(&of->call, STARTED_WORKER_BYTES, &of->tiles, &workers));
    const int64_t count = of->tiles.n_runs * of->tiles.n_pieces;
    of->job = (rf__job){.run = write_started,
                        .end = end_started,
                        .context = of,
                        .count = count,
                        .most_threads = (int32_t)(workers < count ? workers : count)};
    return count > 0 ? rf__workers_start(RF__LOOKUP_CREW, operator_name, threads) : RF_OK;
}

rf_status rf_embedding_columns_start_cpu(const rf_embedding_columns_params *params, int32_t threads,
                                         rf_embedding_columns_done callback, void *context) {
    RF__REFUSE_IF(threads < 1, RF_ERR_VALUE, "threads is %d; expected >= 1", (int)threads);
    started_call *of = malloc(sizeof *of);
    RF__REFUSE_IF(of == NULL, RF_ERR_MEMORY, "%s", "no memory for a call");
    of->params = *params;
    of->callback = callback;
    of->context = context;
    rf_status status = rf__columns_begin(&of->params, true, &of->call);
    if (status != RF_OK) {
        free(of);
        return status;
    }
    status = prepare_started(of, threads);
    if (status != RF_OK) {
        (void)rf__columns_end(&of->call, status);
        free(of->tiles.starts);
        free(of);
    } else if (of->job.count == 0) {
        end_started(of);
    } else {
        rf__workers_take(RF__LOOKUP_CREW, &of->job);
    }
    return status;
}
