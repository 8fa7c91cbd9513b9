/* Sizes of the general path, and the memory that it works in. */
#include "core/validate.h"
#include "families/fused_backward/device/optimizer_steps.h"
#include "families/fused_backward/general/general.h"

enum {
    ALIGNMENT = 256, /* of parts of the workspace */
    LEAST_CHUNK = 64, /* entries a block of rows.cu */
    ROWS_BLOCKS = 8, /* per SM, as a target */
    SORT_BLOCKS = 2, /* per SM, at once */
    WIDEST_VECTORS = 4, /* that a lane has at once */
    COLUMNS = 4 * RF_BACKWARD_LANES /* of one vector per lane of a warp */
};
static const int64_t MOST_ENTRIES = INT64_C(1) << 31; /* their places are numbers of 32 bits */

static int64_t workspace_add(rf__backward_layout *to, int64_t bytes) {
    const int64_t at = to->bytes;
    to->bytes += rf__round_up(bytes, ALIGNMENT);
    return at;
}

int64_t rf__backward_entry_bytes(const rf__backward_variant *variant) {
    return variant->wide_keys || variant->wide_values ? 16 : 8;
}

/* Returns the entries per block: `largest`, half of it, a quarter, ..., so that there are as many blocks as
 * wanted if possible. */
static int32_t chunk_of(int64_t lookups, int64_t least_chunks, int32_t largest, int32_t smallest) {
    int32_t chunk = largest;
    while (chunk > smallest && lookups / chunk < least_chunks) chunk /= 2;
    return chunk;
}

static int32_t ceil_div(int64_t count, int64_t by) { return (int32_t)((count + by - 1) / by); }

static rf_status check_limits(const char *operator_name, const rf_fused_backward_params *call) {
    const int64_t slots = call->n_features * call->bags;
    RF__REFUSE_IF(
        call->lookups > MOST_ENTRIES || slots > UINT32_MAX || call->n_features > RF_BACKWARD_MOST_FEATURES,
        RF_ERR_UNSUPPORTED,
        RF__I64 " lookups in " RF__I64 " bags of " RF__I64
                " features are given; expected at most 2^31, 2^32 and 2^24 on a GPU. Split the batch.",
        call->lookups, slots, call->n_features);
    return RF_OK;
}

static rf__backward_variant variant_of(const rf__gpu *gpu, const rf__backward_problem *problem,
                                       const rf__backward_features *described) {
    const rf_fused_backward_params *call = &problem->call;
    /* If all chunks run at once in any case, they are smaller: each takes less time. */
    const int64_t at_once = (int64_t)SORT_BLOCKS * gpu->sms * RF_BACKWARD_SORT_BLOCK;
    rf__backward_variant variant = {.index_type = (int32_t)call->index_type,
                                    .offset_type = (int32_t)call->offset_type,
                                    .wide_keys = described->rows >= INT32_MAX,
                                    .wide_values = call->bags * call->output_dim >= UINT32_MAX,
                                    .digit_bits = described->digit_bits,
                                    .items = call->lookups > at_once * RF_BACKWARD_FEW_ITEMS
                                                 ? RF_BACKWARD_MOST_ITEMS
                                                 : RF_BACKWARD_FEW_ITEMS,
                                    .entries = described->entries,
                                    .grad_dtype = (int32_t)call->grad_dtype,
                                    .weight_dtype = (int32_t)problem->dtype,
                                    .epilogue = problem->epilogue,
                                    .round = rf__backward_rounds(problem),
                                    .aligned = described->aligned,
                                    .vectors = 1};
    while (variant.vectors < WIDEST_VECTORS && COLUMNS * variant.vectors < described->dim)
        variant.vectors *= 2;
    return variant;
}

rf_status rf__backward_layout_of(const rf__gpu *gpu, const char *operator_name,
                                 const rf__backward_problem *problem, const rf__backward_features *described,
                                 int64_t begin, rf__backward_layout *to) {
    const rf_fused_backward_params *call = &problem->call;
    const int64_t word = (int64_t)sizeof(uint32_t);
    RF_CHECK(check_limits(operator_name, call));
    const rf__backward_variant variant = variant_of(gpu, problem, described);
    *to = (rf__backward_layout){.variant = variant,
                                .segments = &described->segments,
                                .lookups = call->lookups,
                                .slots = call->n_features * call->bags,
                                .invalid_key = described->rows,
                                .passes = described->passes,
                                .slices = ceil_div(described->dim, COLUMNS * variant.vectors),
                                .pitch = ceil_div(described->dim, 4) * 4,
                                .bytes = begin};
    RF__REFUSE_IF(rf_optimizer_row_states(problem->epilogue - 1) > 0 && to->slices > 1, RF_ERR_UNSUPPORTED,
                  "row-wise Adagrad in the backward pass has rows of %d columns; expected up to %d on a GPU. "
                  "Pass deferred=True.",
                  (int)described->dim, (int)(COLUMNS * WIDEST_VECTORS));
    const int64_t digits = INT64_C(1) << variant.digit_bits;
    to->chunks =
        ceil_div(to->lookups, (int64_t)RF_BACKWARD_SORT_BLOCK * variant.items) + to->segments->count - 1;
    to->rows_chunk =
        chunk_of(to->lookups, (int64_t)gpu->sms * ROWS_BLOCKS, RF_BACKWARD_MOST_ROWS_CHUNK, LEAST_CHUNK);
    to->rows_chunks = ceil_div(to->lookups, to->rows_chunk);
    for (int32_t i = 0; i < 2; i++)
        to->entries[i] = workspace_add(to, to->lookups * rf__backward_entry_bytes(&variant));
    if (variant.entries != RF_ENTRIES_DIRECT) {
        to->sources = workspace_add(to, to->lookups * (variant.wide_values ? 8 : 4));
        to->factors = workspace_add(to, to->lookups * (int64_t)sizeof(float));
    }
    to->count = workspace_add(to, sizeof(int64_t));
    if (described->any_mean) to->bag_factors = workspace_add(to, to->slots * (int64_t)sizeof(float));
    to->partials =
        workspace_add(to, rf__elements_bytes(RF_FLOAT32, (int64_t)to->rows_chunks * 2 * to->pitch));
    to->bases = workspace_add(to, ((int64_t)to->rows_chunks + 1 + problem->n_matrices) * word);
    to->sums = workspace_add(to, (2 * RF_BACKWARD_MOST_SEGMENTS + to->segments->count * digits) * word);
    to->places = workspace_add(to, digits * to->chunks * word);
    return RF_OK;
}
