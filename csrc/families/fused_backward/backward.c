/* A backward problem run on a GPU. */
#include <stdatomic.h>

#include "core/validate.h"
#include "families/fused_backward/lowering.h"

static atomic_int omitted; /* atomic; RF__BACKWARD_WITHOUT_... */

void rf__backward_omit(int32_t parts) { atomic_store(&omitted, parts); }

/* Rows of each matrix have the numbers firsts[i] to firsts[i + 1] among all rows with lookups. */
typedef struct row_counts {
    int64_t firsts[RF_BACKWARD_MOST_MATRICES + 1];
} row_counts;

/* Waits for the stream, and reads the numbers of rows. */
static rf_status counts_read(const rf__cuda_store *store, const rf__backward_problem *problem,
                             uint64_t counts, row_counts *to) {
    rf_status status = RF_OK;
    const rf__cuda_device *device = store->device;
    uint32_t host_counts[1 + RF_BACKWARD_MOST_MATRICES] = {0}; /* all, and those before each matrix */
    const int32_t n = problem->n_matrices;
    const size_t bytes = (n > 1 ? 1 + (size_t)n : 1) * sizeof host_counts[0];
    RF_CHECK(rf__cuda_enter(device));
    RF__CUDA_TRY(device->driver->cuMemcpyDtoHAsync_v2(host_counts, counts, bytes, store->stream));
    RF__CUDA_TRY(device->driver->cuStreamSynchronize(store->stream));
    for (int32_t i = 0; i < n; i++) to->firsts[i] = host_counts[1 + i];
    to->firsts[n] = host_counts[0];
out:
    return rf__cuda_leave_with(status);
}

/* An upper bound of the rows with lookups, for a device that does not count. */
static void counts_bound(const rf__backward_problem *problem, row_counts *to) {
    const int64_t lookups = problem->call.lookups;
    to->firsts[0] = 0;
    for (int32_t i = 0; i < problem->n_matrices; i++) {
        const int64_t rows = problem->matrices[i].rows;
        to->firsts[i + 1] = to->firsts[i] + (rows < lookups ? rows : lookups);
    }
}

/* Allocates the rows of each matrix, to which the matrix then points. */
static rf_status rows_allocate(rf__backward_problem *problem, const row_counts *counts) {
    for (int32_t i = 0; problem->row_sparse != NULL && i < problem->n_matrices; i++) {
        rf_backward_matrix *matrix = &problem->matrices[i];
        const int64_t first = counts->firsts[i];
        int64_t *rows = NULL;
        void *values = NULL;
        RF_CHECK(problem->row_sparse[i]->allocate(problem->row_sparse[i]->context,
                                                  counts->firsts[i + 1] - first, &rows, &values));
        matrix->weight =
            (uintptr_t)values - (uint64_t)rf__elements_bytes(problem->dtype, first * matrix->dim);
        matrix->row_sparse = (uintptr_t)rows - (uint64_t)first * sizeof *rows;
    }
    return RF_OK;
}

/* Runs the launches after the counting of rows, whose number is at `counts_at`: no counting if it is 0. */
static rf_status row_sparse_run(const rf__cuda_store *store, const rf__described *described,
                                rf__backward_problem *problem, const char *operator_name, uint64_t workspace,
                                int64_t counts_at) {
    rf_status status = RF_OK;
    const uint64_t uploads[RF__MOST_UPLOADS] = {described->upload};
    row_counts counts = {{0}};
    rf__launches launches;
    if (counts_at != 0 && store->device->driver == NULL)
        counts_bound(problem, &counts);
    else if (counts_at != 0)
        RF_CHECK(counts_read(store, problem, workspace + (uint64_t)counts_at, &counts));
    RF_CHECK(rows_allocate(problem, &counts));
    if (counts.firsts[problem->n_matrices] == 0) return RF_OK;
    rf__launches_init(&launches, operator_name);
    RF_TRY(rf__backward_row_sparse_lower(&store->device->gpu, described->data, problem, &launches));
    RF_TRY(rf__launches_run_in(store->device, &launches, uploads, workspace, store->stream));
out:
    rf__launches_free(&launches);
    return status;
}

/* Finds or creates the description; none without lookups. */
static rf_status describe(const rf__cuda_store *store, const rf__backward_problem *problem,
                          rf__described *described) {
    const rf_fused_backward_params *call = &problem->call;
    *described = (rf__described){0};
    if (call->bags == 0 || call->lookups == 0) return RF_OK;
    const rf__backward_key sizes = rf__backward_key_of(problem);
    const rf__description_key key = {
        .make = rf__backward_description_make,
        .parts = {{&sizes, sizeof sizes},
                  {call->features, (size_t)call->n_features * sizeof *call->features}}};
    return rf__description_acquire(store, &key, problem, described);
}

rf_status rf__backward_run(const char *operator_name, rf__backward_problem *problem,
                           const rf_cuda_allocator *allocator, const rf_cuda_stream *stream) {
    rf_status status = RF_OK;
    const rf__cuda_device *device = NULL;
    rf__described described = {0};
    rf__cuda_block workspace_block = {0};
    rf__cuda_store store;
    rf__launches launches;
    int64_t counts_at = 0;
    problem->omitted = atomic_load(&omitted);
    RF_CHECK(rf__cuda_device_get(stream->device, &device));
    RF_CHECK(rf__cuda_store_of(device, stream->stream, allocator, &store));
    RF__REFUSE_IF(store.resident && problem->row_sparse != NULL, RF_ERR_UNSUPPORTED, "%s",
                  "a sparse gradient's size is not known while a CUDA graph is captured. Use dense gradients "
                  "(sparse=False) or an optimizer of recfuse.optim.");
    rf__launches_init(&launches, operator_name);
    RF_TRY(describe(&store, problem, &described));
    RF_TRY(rf__backward_lower(&device->gpu, described.data, problem, &launches, &counts_at));
    RF_TRY(rf__cuda_room_new(&store, (size_t)launches.workspace_bytes, &workspace_block));
    const uint64_t uploads[RF__MOST_UPLOADS] = {described.upload};
    RF_TRY(rf__launches_run_in(device, &launches, uploads, workspace_block.memory, store.stream));
    RF_TRY(row_sparse_run(&store, &described, problem, operator_name, workspace_block.memory, counts_at));
out:
    rf__launches_free(&launches);
    rf__cuda_room_free(&store, &workspace_block);
    rf__description_release(&described);
    return status;
}
