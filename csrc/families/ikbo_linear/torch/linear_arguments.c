/* Arguments of ikbo_linear and ikbo_linear_chain. */
#include <stddef.h>

#include "families/ikbo_linear/torch/ikbo_linear_torch.h"

enum { MOST = RF_IKBO_MOST_LEVELS };

/* Names of tensors in messages: [chain] */
typedef struct level_names {
    const char *weight, *input, *map;
} level_names;

static const level_names pair_names[MOST] = {{"w_user", "x_user", NULL},
                                             {"w_cand", "x_cand", "cand_to_user"}};
static const level_names chain_names[MOST] = {{"weights[0]", "inputs[0]", NULL},
                                              {"weights[1]", "inputs[1]", "maps[0]"},
                                              {"weights[2]", "inputs[2]", "maps[1]"},
                                              {"weights[3]", "inputs[3]", "maps[2]"}};

/* Tensors of a call, borrowed. */
typedef struct level_handles {
    AtenTensorHandle weight, input, map;
} level_handles;

/* The tensors of a list, each into a field of a level from `first` on. */
static rf_status list_read(const rf__call *call, int argument, int64_t expected, level_handles *first,
                           size_t field) {
    const StableListHandle list = call->values[argument].list;
    size_t count = 0;
    RF__TORCH_CHECK(torch_list_size(list, &count));
    RF_FAIL_IF((int64_t)count != expected, RF_ERR_VALUE,
               "%s has %zu tensors; expected %lld, a tensor for each level%s",
               call->registered->signature.names[argument], count, (long long)expected,
               field == offsetof(level_handles, map) ? " but the first" : "");
    for (size_t i = 0; i < count; i++) {
        rf__value item = {0};
        RF__TORCH_CHECK(torch_list_get_item(list, i, &item.bits));
        *(AtenTensorHandle *)((char *)(first + i) + field) = item.tensor;
    }
    return RF_OK;
}

static rf_status handles_read(const rf__call *call, bool chain, level_handles *handles, int32_t *n_levels) {
    enum { WEIGHTS, INPUTS, MAPS, W_USER = 0, W_CAND, X_USER, X_CAND, CAND_TO_USER };
    const rf__value *values = call->values;
    size_t count = 2;
    if (!chain) {
        *n_levels = 2;
        handles[0] = (level_handles){values[W_USER].tensor, values[X_USER].tensor, NULL};
        handles[1] =
            (level_handles){values[W_CAND].tensor, values[X_CAND].tensor, values[CAND_TO_USER].tensor};
        return RF_OK;
    }
    RF__TORCH_CHECK(torch_list_size(values[WEIGHTS].list, &count));
    RF_FAIL_IF(count < 2 || count > MOST, RF_ERR_VALUE,
               "weights has %zu tensors; expected 2 to %d, a tensor for each level, the broadest first",
               count, (int)MOST);
    *n_levels = (int32_t)count;
    RF_CHECK(list_read(call, WEIGHTS, *n_levels, handles, offsetof(level_handles, weight)));
    RF_CHECK(list_read(call, INPUTS, *n_levels, handles, offsetof(level_handles, input)));
    return list_read(call, MAPS, *n_levels - 1, handles + 1, offsetof(level_handles, map));
}

static rf_status level_read(rf__call *call, const level_names *names, const level_handles *handles, int32_t l,
                            rf__ikbo_layer *layer) {
    rf__tensor *weight = &layer->weights[l], *input = &layer->inputs[l];
    int64_t mapped = 0;
    RF_CHECK(rf__tensor_read(names->weight, handles->weight, 2, call->device, weight));
    RF_CHECK(rf__dtype_read(weight, l == 0, "the first weight is", &layer->dtype));
    if (l == 0) layer->m = weight->sizes[0];
    RF_FAIL_IF(weight->sizes[0] != layer->m, RF_ERR_VALUE,
               "%s has %lld rows; expected %lld as the first weight has", names->weight,
               (long long)weight->sizes[0], (long long)layer->m);
    RF_CHECK(rf__tensor_read(names->input, handles->input, RF__ANY_DIM, call->device, input));
    RF_CHECK(rf__dtype_read(input, false, "the first weight is", &layer->dtype));
    if (l == 0) layer->matrices = input->dim == 3;
    if (input->dim != 2 + layer->matrices)
        return rf__tensor_refuse(input, RF_ERR_VALUE, "%s",
                                 l > 0             ? "of as many dimensions as the first input"
                                 : layer->matrices ? "[items, k, n]"
                                                   : "[items, k] or [items, k, n]");
    if (l == 0) layer->n = layer->matrices ? input->sizes[2] : 1;
    const long long k = weight->sizes[1], n = layer->n;
    if (layer->matrices && (input->sizes[1] != k || input->sizes[2] != n))
        return rf__tensor_refuse(
            input, RF_ERR_VALUE,
            "[items, %lld, %lld], since %s has so many columns, and all inputs have one n", k, n,
            names->weight);
    if (input->sizes[1] != k)
        return rf__tensor_refuse(input, RF_ERR_VALUE, "[items, %lld], since %s has so many columns", k,
                                 names->weight);
    if (l == 0) return RF_OK;
    RF_CHECK(
        rf__call_integers_of(call, names->map, handles->map, &layer->maps[l], &mapped, &layer->map_types[l]));
    RF_FAIL_IF(mapped != input->sizes[0], RF_ERR_VALUE,
               "%s has %lld elements; expected an element for each of the %lld items of %s", names->map,
               (long long)mapped, (long long)input->sizes[0], names->input);
    return RF_OK;
}

static rf_status bias_read(rf__call *call, int argument, rf__ikbo_layer *layer) {
    rf__tensor bias;
    if (!call->values[argument].is_present) return RF_OK;
    RF_CHECK(rf__call_tensor(call, argument, 1, &bias));
    RF_CHECK(rf__dtype_read(&bias, false, "the first weight is", &layer->dtype));
    RF_FAIL_IF(bias.sizes[0] != layer->m, RF_ERR_VALUE,
               "bias has %lld elements; expected the %lld rows of the weights", (long long)bias.sizes[0],
               (long long)layer->m);
    RF_CHECK(rf__call_contiguous(call, &bias, bias.dtype));
    layer->bias = bias.data;
    return RF_OK;
}

rf_status rf__ikbo_layer_read(rf__call *call, bool chain, rf__ikbo_layer *layer) {
    enum { BIAS, ACTIVATION, PATH, BOUNDS_CHECK };
#define TEXT(name, text) [name] = text,
    static const char *const activations[] = {RF_ACTIVATION_LIST(TEXT) NULL};
    static const char *const paths[] = {RF__IKBO_PATH_LIST(TEXT) NULL};
#undef TEXT
    const level_names *names = chain ? chain_names : pair_names;
    const int options = chain ? 3 : 5;
    level_handles handles[MOST] = {{NULL, NULL, NULL}};
    int chosen = 0;
    *layer = (rf__ikbo_layer){.chain = chain};
    RF_CHECK(handles_read(call, chain, handles, &layer->n_levels));
    RF_CHECK(rf__tensor_device(handles[0].weight, &call->device));
    for (int32_t l = 0; l < layer->n_levels; l++)
        RF_CHECK(level_read(call, &names[l], &handles[l], l, layer));
    RF_CHECK(bias_read(call, options + BIAS, layer));
    RF_CHECK(rf__call_choice(call, options + ACTIVATION, activations, &chosen));
    layer->activation = (rf_activation)chosen;
    RF_CHECK(rf__call_choice(call, options + PATH, paths, &chosen));
    layer->path = (rf__ikbo_path)chosen;
    return rf__call_bounds_check(call, options + BOUNDS_CHECK, &layer->check_bounds);
}
