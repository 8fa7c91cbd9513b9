/* What the files of ikbo_linear and ikbo_linear_chain share: a layer of two levels, and of up to four. */
#ifndef RECFUSE_TORCH_IKBO_LINEAR_H
#define RECFUSE_TORCH_IKBO_LINEAR_H

#include "torch/arguments.h"

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

/* Runs a path that multiplies and adds level by level, into `output` [count, m, n] or [count, m] at `data`. */
rf_status rf__ikbo_levels_run(rf__call *call, const rf__ikbo_layer *layer, AtenTensorHandle output,
                              void *data);

#endif
