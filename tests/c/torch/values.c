/* Operators for tests/c/test_torch_values.py: all kinds of inputs and outputs of an operator, through
 * csrc/torch. */
#include <stdio.h>

#include "torch/call.h"

bool rf__call_is_explained(const rf__call *call) {
    (void)call;
    return false;
}

static rf_status describe(rf__call *call) {
    enum { X, SCALE, FLAG, N, LIST, MAYBE_SCALE, MAYBE_FLAG, MAYBE_TEXT, MODE };
    static const char *const modes[] = {"none", "gelu", "relu", NULL};
    const rf__value *values = call->values;
    const char *text = "None";
    char line[256];
    rf__tensor x;
    size_t elements = 0;
    int mode = 0;
    RF_CHECK(rf__call_device(call, X));
    RF_CHECK(rf__call_tensor(call, X, RF__ANY_DIM, &x));
    RF_CHECK(rf__call_choice(call, MODE, modes, &mode));
    if (values[MAYBE_TEXT].is_present) RF_CHECK(rf__call_text(call, MAYBE_TEXT, &text));
    RF__TORCH_CHECK(torch_list_size(values[LIST].list, &elements));
    snprintf(line, sizeof line, "%d %g %d %lld [%zu] %g %s %s %d", (int)x.dim, values[SCALE].number,
             values[FLAG].boolean, (long long)values[N].integer, elements,
             values[MAYBE_SCALE].is_present ? values[MAYBE_SCALE].number : -1.0,
             !values[MAYBE_FLAG].is_present ? "None"
             : values[MAYBE_FLAG].boolean   ? "True"
                                            : "False",
             text, mode);
    return rf__call_output_text(call, 0, line);
}

/* A contiguous copy, its numbers as scalars, and an optional third output; fails after them on request. */
static rf_status copies(rf__call *call) {
    enum { X, THIRD, FAIL };
    rf__tensor x;
    void *data[3];
    RF_CHECK(rf__call_device(call, X));
    RF_CHECK(rf__call_tensor(call, X, RF__ANY_DIM, &x));
    RF_CHECK(rf__call_contiguous(call, &x, aoti_torch_dtype_float32()));
    const float *from = x.data;
    int64_t elements = 1;
    for (int64_t d = 0; d < x.dim; d++) elements *= x.sizes[d];
    RF_CHECK(rf__call_output(call, 0, x.dim, x.sizes, aoti_torch_dtype_float32(), &data[0]));
    RF_CHECK(rf__call_output(call, 1, 1, &elements, aoti_torch_dtype_float32(), &data[1]));
    if (call->values[THIRD].boolean)
        RF_CHECK(rf__call_output(call, 2, 0, NULL, aoti_torch_dtype_float32(), &data[2]));
    for (int64_t i = 0; i < elements; i++) ((float *)data[0])[i] = ((float *)data[1])[i] = from[i];
    if (call->values[THIRD].boolean) *(float *)data[2] = (float)elements;
    if (call->values[FAIL].boolean) return rf__tensor_refuse(&x, RF_ERR_VALUE, "%s", "another one");
    return RF_OK;
}

static rf_status missing(rf__call *call) {
    (void)call;
    return RF_OK;
}

static const rf__operator operators_of[] = {
    {"(Tensor x, float scale, bool flag=True, SymInt count=3, *, Tensor[] list, float? maybe_scale=None, "
     "bool? maybe_flag=None, str? maybe_text=\"a, b)\", str mode=\"none\") -> str",
     RF__CPU, describe},
    {"(Tensor x, bool third, bool fail=False) -> (Tensor, Tensor, Tensor?)", RF__CPU, copies},
    {"(Tensor x) -> Tensor", RF__CPU, missing},
    {"(Tensor x, complex c) -> Tensor", 0, missing},
};

static rf__registered operators[4]; /* filled once, while the library is loaded */

#define BOXED(number)                                                                \
    static void boxed_##number(StableIValue *stack, uint64_t n_in, uint64_t n_out) { \
        (void)n_in, (void)n_out;                                                     \
        rf__call_run(&operators[number], stack);                                     \
    }
BOXED(0)
BOXED(1)
BOXED(2)
BOXED(3)

__attribute__((constructor)) static void register_operators(void) {
    static const char *const names[] = {"describe", "copies", "missing", "unsupported"};
    static const rf__boxed boxed[] = {boxed_0, boxed_1, boxed_2, boxed_3};
    for (int i = 0; i < 4; i++)
        operators[i] = (rf__registered){names[i], &operators_of[i], boxed[i], {0}, NULL};
    rf__operators_register("recfuse_values", operators, 4);
}
