/* Arguments that several operators share; an error names the allowed values. */
#ifndef RECFUSE_TORCH_ARGUMENTS_H
#define RECFUSE_TORCH_ARGUMENTS_H

#include "torch/call.h"

rf_status rf__call_bounds_check(rf__call *call, int argument, bool *check);
/* Returns the type of a tensor: the first may have any of the four types of floats; others must have the
 * same, of which `like` speaks: "q is". */
rf_status rf__dtype_read(const rf__tensor *tensor, bool first, const char *like, rf_dtype *dtype);
rf_status rf__call_prefetch_distance(rf__call *call, int argument, int32_t *distance);
/* per_sample_weights [lookups] as contiguous float32; NULL if absent. */
rf_status rf__call_sample_weights(rf__call *call, int argument, int64_t lookups, const float **weights);

/* Of fused calls. features: int64 [features, 7], on the CPU for any device, because the host plans by
 * them. */
rf_status rf__fused_features_read(rf__call *call, int argument, const rf_feature **features,
                                  int64_t *n_features);
/* Reads weights, and the type of the output: theirs if they agree, else float32. They are the call's scratch,
 * followed by *columns for rf__check_fused_rows. */
rf_status rf__fused_weights_read(rf__call *call, int argument, const int64_t **columns,
                                 rf_fused_embedding_bag_params *params);
/* Reads indices and offsets of a call whose features are read. `bags` per feature, if known (else -1): then
 * offsets of one feature on the CPU may lack the last one, which is the number of indices. */
rf_status rf__fused_lookups_read(rf__call *call, int indices, int offsets, int64_t bags,
                                 rf_fused_embedding_bag_params *params);
/* Replaces offsets [bags] on the CPU by a copy of int64 [bags + 1], which ends with the number of lookups and lasts as long as
 * the call. Offsets of a call that is explained stay. */
rf_status rf__call_offsets_complete(rf__call *call, int64_t bags, int64_t lookups, const void **offsets,
                                    rf_int_type *type);
/* grad: [bags, columns] of any float type, contiguous. */
rf_status rf__fused_grad_read(rf__call *call, int argument, int64_t bags, rf__tensor *grad, rf_dtype *dtype);
/* int64 of the shape of grad, contiguous; NULL if absent. */
rf_status rf__call_winners(rf__call *call, int argument, const rf__tensor *grad, const int64_t **winners);
/* The tensors that list a sparse gradient, which are to be freed: rows [count], or of 2 dimensions [1, count]. */
typedef struct rf__gradient_list {
    rf__call *call;
    const rf_fused_backward_params *params;
    int64_t row_dims; /* 1 or 2 */
    AtenTensorHandle rows, values;
} rf__gradient_list;
/* Makes them, as rf_sparse_output has it: the context is an rf__gradient_list. */
rf_status rf__gradient_list_new(void *context, int64_t count, int64_t **rows, void **values);
void rf__gradient_list_free(const rf__gradient_list *list);

/* Of ikbo_linear with two levels, and of ikbo_linear_chain with up to four. */

/* The paths of a call: name, text. The last selects the best of the others. */
#define RF__IKBO_PATH_LIST(X)                \
    X(RF__IKBO_DECOMPOSED, "decomposed")     \
    X(RF__IKBO_ALIGNED, "aligned")           \
    X(RF__IKBO_BROADCAST, "broadcast")       \
    X(RF__IKBO_FUSED, "fused")               \
    X(RF__IKBO_CONCATENATED, "concatenated") \
    X(RF__IKBO_SMALL, "small")               \
    X(RF__IKBO_AUTO, "auto")

typedef enum rf__ikbo_path {
#define RF__IKBO_PATH_ENUM(name, text) name,
    RF__IKBO_PATH_LIST(RF__IKBO_PATH_ENUM)
#undef RF__IKBO_PATH_ENUM
} rf__ikbo_path;

/* One call, looked at and checked except for the contents of its maps. */
typedef struct rf__ikbo_layer {
    int32_t n_levels;
    bool chain;
    rf__tensor weights[RF_IKBO_MOST_LEVELS]; /* [m, k], any strides */
    rf__tensor inputs[RF_IKBO_MOST_LEVELS]; /* [count, k, n] or all [count, k], any strides */
    const void *maps[RF_IKBO_MOST_LEVELS]; /* of level l to level l - 1; contiguous; level 0 has no map */
    rf_int_type map_types[RF_IKBO_MOST_LEVELS];
    rf_dtype dtype; /* of all except the maps */
    int64_t m, n; /* n: 1 for inputs of two dimensions */
    bool matrices; /* inputs have three dimensions */
    const void *bias; /* [m], contiguous, or NULL */
    rf_activation activation;
    rf__ikbo_path path;
    bool check_bounds;
} rf__ikbo_layer;

#define RF__IKBO_OPTIONS                                                     \
    "Tensor? bias=None, *, str activation=\"none\", str path=\"auto\", str " \
    "bounds_check=\"on\")"
#define RF__IKBO_ARGUMENTS \
    "(Tensor w_user, Tensor w_cand, Tensor x_user, Tensor x_cand, Tensor cand_to_user, " RF__IKBO_OPTIONS
#define RF__IKBO_CHAIN_ARGUMENTS "(Tensor[] weights, Tensor[] inputs, Tensor[] maps, " RF__IKBO_OPTIONS

/* Reads the arguments of RF__IKBO_ARGUMENTS or, with `chain`, of RF__IKBO_CHAIN_ARGUMENTS. */
rf_status rf__ikbo_layer_read(rf__call *call, bool chain, rf__ikbo_layer *layer);

/* The first returns NULL, or the reason why a call cannot take the concatenated form; the second, whether
 * "auto" selects it; the third runs it. */
const char *rf__ikbo_concatenated_refusal(const rf__call *call, const rf__ikbo_layer *layer);
rf_status rf__ikbo_concatenated_is_best(const rf__call *call, const rf__ikbo_layer *layer, bool *best);
rf_status rf__ikbo_concatenated_run(rf__call *call, const rf__ikbo_layer *layer, AtenTensorHandle output,
                                    void *data);

#endif
