/* Stack values and tensors of libtorch <-> C. */
#include "torch/values.h"

#include <string.h>

static StableIValue unbox(StableIValue *box) {
    StableIValue value = 0;
    if (box != NULL) {
        value = *box;
        if (torch_delete_stable_ivalue != NULL) {
            torch_delete_stable_ivalue(box);
        } else {
            rf__cxx_delete(box);
        }
    }
    return value;
}

void rf__arguments_take(const char *kinds, const StableIValue *stack, rf__value *values) {
    for (int i = 0; kinds[i] != '\0'; i++) {
        switch (kinds[i]) {
        case 't':
            values[i].tensor = (AtenTensorHandle)(uintptr_t)stack[i];
            break;
        case 'o':
            values[i].tensor = (AtenTensorHandle)(uintptr_t)unbox((StableIValue *)(uintptr_t)stack[i]);
            break;
        case 'l':
            values[i].list = (StableListHandle)(uintptr_t)stack[i];
            break;
        case 's':
            values[i].string = (StringHandle)(uintptr_t)stack[i];
            break;
        case 'b':
            values[i].boolean = (stack[i] & 0xff) != 0;
            break;
        default:
            values[i].integer = (int64_t)stack[i];
            break;
        }
    }
}

/* torch_delete_list frees the list alone: its tensors are handed out one by one. */
static void tensor_list_free(StableListHandle list) {
    size_t size = 0;
    torch_list_size(list, &size);
    for (size_t i = 0; i < size; i++) {
        StableIValue item = 0;
        torch_list_get_item(list, i, &item);
        rf__tensor_free((AtenTensorHandle)(uintptr_t)item);
    }
    torch_delete_list(list);
}

void rf__arguments_free(const char *kinds, rf__value *values) {
    for (int i = 0; kinds[i] != '\0'; i++) {
        switch (kinds[i]) {
        case 't':
        case 'o':
            rf__tensor_free(values[i].tensor);
            break;
        case 'l':
            tensor_list_free(values[i].list);
            break;
        case 's':
            torch_delete_string(values[i].string);
            break;
        default:
            break;
        }
    }
}

/* What libtorch's text says. Older ones have none: what makes tensors then fails for want of memory. */
static rf_status kind_of_failure(const char *call, const char *why) {
    static const char *const memory[] = {"out of memory", "not enough memory", "can't allocate memory"};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++)
        if (strstr(why, memory[i]) != NULL)
            return strstr(why, "CUDA") != NULL ? RF_ERR_OUT_OF_MEMORY : RF_ERR_MEMORY;
    if (strstr(why, "CUDA error") != NULL) return RF_ERR_CUDA;
    return strstr(call, "aoti_torch_empty_strided") != NULL ? RF_ERR_MEMORY : RF_ERR_INTERNAL;
}

rf_status rf__torch_status(int32_t code, const char *call) {
    if (code == 0) return RF_OK;
    const char *why = "";
    if (torch_exception_get_what_without_backtrace != NULL) {
        why = torch_exception_get_what_without_backtrace();
    }
    return rf__fail(kind_of_failure(call, why), "libtorch's %.*s failed: %s", (int)strcspn(call, "("), call,
                    why);
}

rf_status rf__string_read(const char *argument, StringHandle string, const char **text) {
    rf_status status = RF_OK;
    size_t length = 0;
    RF__TORCH_TRY(torch_string_c_str(string, text));
    RF__TORCH_TRY(torch_string_length(string, &length));
    if (strlen(*text) == length) return RF_OK;
    status =
        rf__fail(RF_ERR_VALUE, "%s is \"%s\" with a zero byte behind it, must have none", argument, *text);
out:
    return status;
}

static rf_status tensor_look(AtenTensorHandle handle, rf__tensor *tensor) {
    rf_status status = RF_OK;
    int64_t *sizes = NULL, *strides = NULL;
    tensor->handle = handle;
    RF__TORCH_TRY(aoti_torch_get_dim(handle, &tensor->dim));
    RF__TORCH_TRY(aoti_torch_get_sizes(handle, &sizes));
    RF__TORCH_TRY(aoti_torch_get_strides(handle, &strides));
    RF__TORCH_TRY(aoti_torch_get_dtype(handle, &tensor->dtype));
    RF__TORCH_TRY(torch_get_const_data_ptr(handle, &tensor->data));
    tensor->sizes = sizes;
    tensor->strides = strides;
out:
    return status;
}

rf_status rf__tensor_place(AtenTensorHandle handle, rf__place *place) {
    rf_status status = RF_OK;
    RF__TORCH_TRY(aoti_torch_get_device_type(handle, &place->type));
    RF__TORCH_TRY(aoti_torch_get_device_index(handle, &place->index));
out:
    return status;
}

bool rf__place_is_cpu(const rf__place *place) { return place->type == aoti_torch_device_type_cpu(); }

rf__place rf__place_of_cpu(void) { return (rf__place){aoti_torch_device_type_cpu(), -1}; }

/* The storage of a tensor can be freed or made smaller under it: untyped_storage().resize_(0). */
static rf_status memory_check(const rf__tensor *tensor) {
    rf_status status = RF_OK;
    int64_t last = 0, offset = 0, has = 0, needs = 0;
    for (int64_t d = 0; d < tensor->dim; d++) {
        if (tensor->sizes[d] == 0) return RF_OK;
        last += (tensor->sizes[d] - 1) * tensor->strides[d];
    }
    RF__TORCH_TRY(aoti_torch_get_storage_offset(tensor->handle, &offset));
    RF__TORCH_TRY(aoti_torch_get_storage_size(tensor->handle, &has));
    needs = (offset + last + 1) * (int64_t)aoti_torch_dtype_element_size(tensor->dtype);
    if (tensor->data != NULL && needs <= has) return RF_OK;
    status = rf__fail(
        RF_ERR_VALUE,
        "%s has no memory for its elements: they need %lld bytes of its storage, which has %lld; was "
        "the storage freed or resized?",
        tensor->argument, (long long)needs, (long long)has);
out:
    return status;
}

rf_status rf__tensor_read(const char *argument, AtenTensorHandle handle, int64_t dim, const rf__place *place,
                          rf__tensor *tensor) {
    rf_status status = RF_OK;
    tensor->argument = argument;
    RF_TRY(rf__tensor_place(handle, &tensor->place));
    if (tensor->place.type != place->type || tensor->place.index != place->index) {
        return rf__fail(RF_ERR_VALUE, "%s is %s, other arguments are %s; move all tensors to one device",
                        argument,
                        rf__place_is_cpu(&tensor->place)    ? "on the CPU"
                        : tensor->place.type == place->type ? "on another GPU"
                                                            : "not on the CPU",
                        rf__place_is_cpu(place) ? "on the CPU" : "on a GPU");
    }
    RF_TRY(tensor_look(handle, tensor));
    if (tensor->dim != dim) {
        return rf__fail(RF_ERR_VALUE, "%s has %lld dimensions, must have %lld", argument,
                        (long long)tensor->dim, (long long)dim);
    }
    RF_TRY(memory_check(tensor));
out:
    return status;
}

bool rf__tensor_is_contiguous(const rf__tensor *tensor) {
    int64_t expected = 1;
    for (int64_t d = tensor->dim - 1; d >= 0; d--) {
        if (tensor->sizes[d] == 0) return true;
        if (tensor->sizes[d] != 1 && tensor->strides[d] != expected) return false;
        expected *= tensor->sizes[d];
    }
    return true;
}

/* Contiguous; at most two dimensions, as all operators here take. */
static rf_status tensor_empty(int64_t dim, const int64_t *sizes, int32_t dtype, const rf__place *place,
                              AtenTensorHandle *tensor) {
    const int64_t row = dim == 2 && sizes[1] > 0 ? sizes[1] : 1;
    const int64_t strides[2] = {row, 1};
    return rf__torch_status(aoti_torch_empty_strided(dim, sizes, dim == 2 ? strides : strides + 1, dtype,
                                                     place->type, place->index, tensor),
                            "aoti_torch_empty_strided");
}

rf_status rf__tensor_make_contiguous(rf__tensor *tensor, int32_t dtype, AtenTensorHandle *copy) {
    rf_status status = RF_OK;
    if (tensor->dtype == dtype && rf__tensor_is_contiguous(tensor)) return RF_OK;
    RF_TRY(tensor_empty(tensor->dim, tensor->sizes, dtype, &tensor->place, copy));
    RF__TORCH_TRY(aoti_torch_copy_(*copy, tensor->handle, false));
    RF_TRY(tensor_look(*copy, tensor));
out:
    return status;
}

rf_status rf__tensor_new(int64_t rows, int64_t columns, int32_t dtype, const rf__place *place,
                         AtenTensorHandle *tensor, void **data) {
    rf_status status = RF_OK;
    const int64_t sizes[2] = {rows, columns};
    RF_TRY(tensor_empty(2, sizes, dtype, place, tensor));
    RF__TORCH_TRY(torch_get_mutable_data_ptr(*tensor, data));
out:
    return status;
}

rf_status rf__tensor_new_list(int64_t count, int32_t dtype, const rf__place *place, AtenTensorHandle *tensor,
                              void **data) {
    rf_status status = RF_OK;
    RF_TRY(tensor_empty(1, &count, dtype, place, tensor));
    RF__TORCH_TRY(torch_get_mutable_data_ptr(*tensor, data));
out:
    return status;
}

void rf__tensor_free(AtenTensorHandle tensor) {
    if (tensor != NULL) aoti_torch_delete_tensor_object(tensor);
}

int32_t rf__torch_dtype(rf_dtype dtype) {
    switch (dtype) {
    case RF_FLOAT16:
        return aoti_torch_dtype_float16();
    case RF_BFLOAT16:
        return aoti_torch_dtype_bfloat16();
    default:
        return aoti_torch_dtype_float32();
    }
}

const char *rf__torch_dtype_name(int32_t dtype) {
#define NAME_IF_SAME(name) \
    if (dtype == aoti_torch_dtype_##name()) return #name;
    RF__TORCH_DTYPE_LIST(NAME_IF_SAME)
#undef NAME_IF_SAME
    return "another dtype";
}

rf_status rf__tensor_dtype(const rf__tensor *tensor, rf_dtype *dtype) {
    for (rf_dtype known = RF_FLOAT32; known <= RF_BFLOAT16; known++) {
        if (tensor->dtype == rf__torch_dtype(known)) {
            *dtype = known;
            return RF_OK;
        }
    }
    return rf__fail(RF_ERR_TYPE, "%s is %s, must be float32, float16 or bfloat16", tensor->argument,
                    rf__torch_dtype_name(tensor->dtype));
}

rf_status rf__tensor_int_type(const rf__tensor *tensor, rf_int_type *type) {
    const bool is_int64 = tensor->dtype == aoti_torch_dtype_int64();
    if (!is_int64 && tensor->dtype != aoti_torch_dtype_int32()) {
        return rf__fail(RF_ERR_TYPE, "%s is %s, must be int32 or int64", tensor->argument,
                        rf__torch_dtype_name(tensor->dtype));
    }
    *type = is_int64 ? RF_INT64 : RF_INT32;
    return RF_OK;
}
