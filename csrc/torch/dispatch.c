#include "torch/dispatch.h"

#include <string.h>

rf__dispatch rf__dispatch_of(const char *name, const char *overload) {
    return (rf__dispatch){.name = name, .overload = overload};
}

static void pass(rf__dispatch *dispatch, rf__type type, rf__value value) {
    dispatch->types[dispatch->n_arguments] = type;
    dispatch->values[dispatch->n_arguments++] = value;
}

void rf__pass_tensor(rf__dispatch *dispatch, AtenTensorHandle tensor) {
    pass(dispatch, (rf__type){.kind = RF__TENSOR}, (rf__value){.is_present = true, .tensor = tensor});
}

void rf__pass_integer(rf__dispatch *dispatch, int64_t integer) {
    pass(dispatch, (rf__type){.kind = RF__INTEGER}, (rf__value){.is_present = true, .integer = integer});
}

void rf__pass_number(rf__dispatch *dispatch, double number) {
    pass(dispatch, (rf__type){.kind = RF__FLOAT}, (rf__value){.is_present = true, .number = number});
}

void rf__pass_boolean(rf__dispatch *dispatch, bool boolean) {
    pass(dispatch, (rf__type){.kind = RF__BOOLEAN}, (rf__value){.is_present = true, .bits = boolean});
}

void rf__pass_optional_tensor(rf__dispatch *dispatch, AtenTensorHandle tensor) {
    pass(dispatch, (rf__type){.kind = RF__TENSOR, .optional = true},
         (rf__value){.is_present = tensor != NULL, .tensor = tensor});
}

void rf__pass_optional_number(rf__dispatch *dispatch, double number) {
    pass(dispatch, (rf__type){.kind = RF__FLOAT, .optional = true},
         (rf__value){.is_present = true, .number = number});
}

void rf__pass_optional_boolean(rf__dispatch *dispatch, bool boolean) {
    pass(dispatch, (rf__type){.kind = RF__BOOLEAN, .optional = true},
         (rf__value){.is_present = true, .bits = boolean});
}

void rf__pass_null(rf__dispatch *dispatch) {
    pass(dispatch, (rf__type){.kind = RF__INTEGER, .optional = true}, (rf__value){.is_present = false});
}

rf_status rf__pass_integers(rf__dispatch *dispatch, const int64_t *integers, int64_t count) {
    rf__value list = {.is_present = true};
    RF__TORCH_CHECK(torch_new_list_reserve_size((size_t)count, &list.list));
    pass(dispatch, (rf__type){.kind = RF__INTEGER, .list = true}, list);
    for (int64_t i = 0; i < count; i++) {
        const rf__value item = {.integer = integers[i]};
        RF__TORCH_CHECK(torch_list_push_back(list.list, item.bits));
    }
    return RF_OK;
}

rf_status rf__dispatch_run(rf__dispatch *dispatch, int32_t n_results) {
    StableIValue stack[RF__DISPATCH_STACK] = {0}; /* zeros are None */
    for (int32_t i = 0; i < dispatch->n_arguments; i++) {
        const rf_status status = rf__value_release(dispatch->types[i], &dispatch->values[i], &stack[i]);
        if (status != RF_OK) { /* takes arguments back from the stack */
            for (int32_t j = 0; j < i; j++)
                dispatch->values[j] = rf__value_take(dispatch->types[j], stack[j]);
            return status;
        }
    }
    dispatch->n_arguments = 0; /* the stack owns them now, in all cases */
    RF_CHECK(rf__torch_status(
        torch_call_dispatcher(dispatch->name, dispatch->overload, stack, RF__TORCH_BUILD_VERSION),
        dispatch->name));
    for (int32_t i = 0; i < n_results; i++) dispatch->results[i] = (AtenTensorHandle)(uintptr_t)stack[i];
    dispatch->n_results = n_results;
    return RF_OK;
}

void rf__dispatch_free(rf__dispatch *dispatch) {
    for (int32_t i = 0; i < dispatch->n_arguments; i++)
        rf__value_free(dispatch->types[i], &dispatch->values[i]);
    for (int32_t i = 0; i < dispatch->n_results; i++) rf__tensor_free(dispatch->results[i]);
    dispatch->n_arguments = dispatch->n_results = 0;
}

rf_status rf__matmul_into(AtenTensorHandle left, AtenTensorHandle right, AtenTensorHandle out, bool items) {
    const char *name = items ? "aten::bmm" : "aten::mm";
    StableIValue stack[3] = {(StableIValue)(uintptr_t)left, (StableIValue)(uintptr_t)right,
                             (StableIValue)(uintptr_t)out};
    RF_CHECK(rf__torch_status(torch_call_dispatcher(name, "out", stack, RF__TORCH_BUILD_VERSION), name));
    rf__tensor_free((AtenTensorHandle)(uintptr_t)stack[0]);
    return RF_OK;
}

rf_status rf__tensor_view(AtenTensorHandle of, int64_t dim, const int64_t *sizes, const int64_t *strides,
                          int64_t offset, AtenTensorHandle *view) {
    RF__TORCH_CHECK(aoti_torch__reinterpret_tensor(of, dim, sizes, strides, offset, view));
    return RF_OK;
}
