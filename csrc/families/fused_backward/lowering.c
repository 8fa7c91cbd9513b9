/* Descriptions of backward problems, and their launches: small tables by the small path, others by the
 * general path. */
#include "families/fused_backward/lowering.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/validate.h"

enum {
    ALIGNMENT = 256, /* of parts of the workspace; the small path's begins there */
    MOST_ALIGNMENT = 16,
    ENOUGH_FEATURES = 64, /* this many fill a GPU with a block each */
    MOST_LOOKUPS = 65536, /* of a feature, approximately: too many for a block */
    SMALL_LOOKUPS = 4096 /* so few that the launches of the general path cost more than one block's work */
};

static int32_t alignment_of(uint64_t address) { return rf__alignment_of(address, MOST_ALIGNMENT); }

rf__backward_key rf__backward_key_of(const rf__backward_problem *problem) {
    const rf_fused_backward_params *call = &problem->call;
    rf__backward_key key = {.n_features = call->n_features,
                            .bags = call->bags,
                            .lookups = rf__description_round(call->lookups),
                            .output_dim = call->output_dim,
                            .n_matrices = problem->n_matrices,
                            .dtype = (int32_t)problem->dtype,
                            .grad_dtype = (int32_t)call->grad_dtype,
                            .grad_alignment = alignment_of((uintptr_t)call->grad),
                            .epilogue = problem->epilogue,
                            .row_sparse = problem->row_sparse != NULL,
                            .weighted = call->sample_weights != NULL,
                            .omitted = problem->omitted};
    for (int32_t i = 0; i < problem->n_matrices; i++) {
        const rf_backward_matrix *matrix = &problem->matrices[i];
        key.matrices[i].buffer = problem->buffers[i];
        key.matrices[i].rows = matrix->rows;
        key.matrices[i].dim = matrix->dim;
        key.matrices[i].weight_alignment = alignment_of(matrix->weight);
        key.matrices[i].state_alignment = alignment_of(matrix->states[0] | matrix->states[1]);
    }
    return key;
}

/* Returns true if the small path pays: a feature is the work of one block there, and two paths have more
 * launches than one. */
static bool small_pays(const rf__backward_problem *problem, const rf__backward_features *described) {
    if (described->count == 0 || problem->row_sparse != NULL || described->rows >= INT32_MAX) return false;
    if ((problem->omitted & RF__BACKWARD_WITHOUT_SMALL) != 0) return false;
    const int64_t lookups = problem->call.lookups / described->count;
    if (lookups > MOST_LOOKUPS) return false;
    if (described->count >= ENOUGH_FEATURES) return true;
    bool all_small = lookups <= SMALL_LOOKUPS;
    for (int64_t f = 0; f < problem->call.n_features; f++)
        all_small &= described->features[f].pooling < 0 || described->features[f].rows <= RF_SMALL_MOST_ROWS;
    return all_small;
}

/* Moves those features in `general` for which the small path is meant to the plan. */
static rf_status paths_choose(const rf__gpu *gpu, const rf__backward_problem *problem,
                              rf__backward_features *general, rf__backward_small_plan *small) {
    const rf__backward_traffic total = general->traffic;
    if (!small_pays(problem, general)) return RF_OK;
    RF_CHECK(rf__backward_small_take(gpu, problem, general->features, small));
    rf__backward_summarise(problem, general);
    small->traffic = rf__backward_traffic_less(total, general->traffic);
    return RF_OK;
}

/* The upload: features of the general path, then lists and tasks. */
static rf_status description_new(const rf__backward_problem *problem, const rf__backward_features *general,
                                 const rf__backward_small_plan *small, rf__description *to) {
    const size_t features =
        general->count > 0 ? (size_t)problem->call.n_features * sizeof *general->features : 0;
    const size_t bytes = features + (small->n_features > 0 ? (size_t)small->description_bytes : 0);
    rf__backward_description *description = malloc(sizeof *description);
    unsigned char *upload = malloc(bytes + 1);
    if (description == NULL || upload == NULL) {
        free(description);
        free(upload);
        return rf__fail(RF_ERR_MEMORY, "no memory for a call of %" PRId64 " features",
                        problem->call.n_features);
    }
    *description =
        (rf__backward_description){.general = *general, .small = *small, .small_at = (int64_t)features};
    description->general.features = NULL;
    description->small.description = NULL;
    if (features > 0) memcpy(upload, general->features, features);
    if (bytes > features) memcpy(upload + features, small->description, bytes - features);
    *to = (rf__description){.data = description,
                            .free_data = free,
                            .upload = upload,
                            .upload_bytes = (int64_t)bytes,
                            .frees_upload = true};
    return RF_OK;
}

rf_status rf__backward_description_make(const rf__gpu *gpu, const void *problem, rf__description *to) {
    rf_status status = RF_OK;
    rf__backward_problem typical = *(const rf__backward_problem *)problem;
    rf__backward_features general;
    rf__backward_small_plan small = {0};
    typical.call.lookups = rf__description_round(typical.call.lookups);
    RF_TRY(rf__backward_describe(&typical, &general));
    RF_TRY(paths_choose(gpu, &typical, &general, &small));
    RF_TRY(description_new(&typical, &general, &small, to));
out:
    rf__backward_small_free(&small);
    free(general.features);
    return status;
}

/* Computes the layout of the general path, after the workspace of the small path. */
static rf_status layout_of(const rf__gpu *gpu, const rf__backward_description *description,
                           const rf__backward_problem *problem, const char *operator_name,
                           rf__backward_layout *layout) {
    const int64_t small = rf__backward_small_workspace(&description->small, problem->call.lookups);
    *layout = (rf__backward_layout){.bytes = ALIGNMENT + rf__round_up(small, ALIGNMENT)};
    if (description->general.count == 0) return RF_OK;
    return rf__backward_layout_of(gpu, operator_name, problem, &description->general, layout->bytes, layout);
}

static bool has_work(const rf__backward_description *description) {
    return description != NULL && (description->general.count > 0 || description->small.n_features > 0);
}

rf_status rf__backward_lower(const rf__gpu *gpu, const rf__backward_description *description,
                             const rf__backward_problem *problem, rf__launches *launches,
                             int64_t *counts_at) {
    rf__backward_layout layout;
    const bool zeros = problem->epilogue == RF_EPILOGUE_GRADIENT && problem->row_sparse == NULL;
    *counts_at = 0;
    for (int32_t i = 0; zeros && i < problem->n_matrices; i++) {
        const rf_backward_matrix *matrix = &problem->matrices[i];
        RF_CHECK(rf__launches_fill(launches, matrix->weight, false,
                                   rf__elements_bytes(problem->dtype, matrix->rows * matrix->dim)));
    }
    if (!has_work(description)) return RF_OK;
    RF_CHECK(layout_of(gpu, description, problem, launches->name, &layout));
    launches->workspace_bytes = layout.bytes;
    RF_CHECK(
        rf__backward_small_lower(problem, &description->small, description->small_at, ALIGNMENT, launches));
    if (description->general.count == 0) return RF_OK;
    RF_CHECK(rf__backward_entries_lower(problem, &layout, launches));
    if (problem->row_sparse == NULL)
        return rf__backward_pool_lower(problem, &description->general, &layout, launches);
    *counts_at = rf__backward_counts_at(&layout);
    return rf__backward_counts_lower(problem, &layout, launches);
}

rf_status rf__backward_row_sparse_lower(const rf__gpu *gpu, const rf__backward_description *description,
                                        const rf__backward_problem *problem, rf__launches *launches) {
    rf__backward_layout layout;
    RF_CHECK(layout_of(gpu, description, problem, launches->name, &layout));
    launches->workspace_bytes = layout.bytes;
    return rf__backward_pool_lower(problem, &description->general, &layout, launches);
}
