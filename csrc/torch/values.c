/* Stack values and tensors of libtorch <-> C. */
#define _GNU_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#include "torch/values.h"

#include "core/tensors.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

rf__value rf__value_take(rf__type type, StableIValue bits) {
    StableIValue *box = (StableIValue *)(uintptr_t)bits;
    if (!type.optional) return (rf__value){.is_present = true, .bits = bits};
    if (box == NULL) return (rf__value){0};
    const rf__value value = {.is_present = true, .bits = *box};
    if (torch_delete_stable_ivalue != NULL) {
        torch_delete_stable_ivalue(box);
    } else {
        rf__cxx_delete(box);
    }
    return value;
}

rf_status rf__value_release(rf__type type, const rf__value *value, StableIValue *bits) {
    StableIValue *box = NULL;
    *bits = type.optional ? 0 : value->bits;
    if (!type.optional || !value->is_present) return RF_OK;
    if (torch_new_stable_ivalue != NULL) {
        RF__TORCH_CHECK(torch_new_stable_ivalue(&box));
    } else {
        box = rf__cxx_new(sizeof *box);
    }
    *box = value->bits;
    *bits = (StableIValue)(uintptr_t)box;
    return RF_OK;
}

void rf__value_free(rf__type type, const rf__value *value) {
    if (!value->is_present) return;
    if (type.list) { /* torch_delete_list frees only the list: its elements are handed out one by one */
        size_t size = 0;
        torch_list_size(value->list, &size);
        for (size_t i = 0; i < size && (type.kind == RF__TENSOR || type.kind == RF__STRING); i++) {
            rf__value item = {.is_present = true};
            torch_list_get_item(value->list, i, &item.bits);
            rf__value_free((rf__type){.kind = type.kind}, &item);
        }
        torch_delete_list(value->list);
    } else if (type.kind == RF__TENSOR) {
        rf__tensor_free(value->tensor);
    } else if (type.kind == RF__STRING && value->string != NULL) {
        torch_delete_string(value->string);
    }
}

/* Interprets libtorch's text. Older versions have no text: a function that creates tensors is then assumed to
 * have run out of memory. */
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
    if (torch_exception_get_what_without_backtrace != NULL)
        why = torch_exception_get_what_without_backtrace();
    return rf__fail(kind_of_failure(call, why), "libtorch's %.*s failed: %s", (int)strcspn(call, "("), call,
                    why);
}

static rf_status tensor_look(AtenTensorHandle handle, rf__tensor *tensor) {
    int64_t *sizes = NULL, *strides = NULL;
    tensor->handle = handle;
    RF__TORCH_CHECK(aoti_torch_get_dim(handle, &tensor->dim));
    RF__TORCH_CHECK(aoti_torch_get_sizes(handle, &sizes));
    RF__TORCH_CHECK(aoti_torch_get_strides(handle, &strides));
    RF__TORCH_CHECK(aoti_torch_get_dtype(handle, &tensor->dtype));
    RF__TORCH_CHECK(torch_get_const_data_ptr(handle, &tensor->data));
    tensor->sizes = sizes;
    tensor->strides = strides;
    return RF_OK;
}

rf_status rf__tensor_device(AtenTensorHandle handle, rf__torch_device *device) {
    RF__TORCH_CHECK(aoti_torch_get_device_type(handle, &device->type));
    RF__TORCH_CHECK(aoti_torch_get_device_index(handle, &device->index));
    return RF_OK;
}

bool rf__device_is_cpu(rf__torch_device device) { return device.type == aoti_torch_device_type_cpu(); }

rf__torch_device rf__device_cpu(void) { return (rf__torch_device){aoti_torch_device_type_cpu(), -1}; }

/* The storage of a tensor can be freed or shrunk: untyped_storage().resize_(0). */
static rf_status memory_check(const rf__tensor *tensor, bool has_data) {
    int64_t last = 0, first = 0, available = 0, required = 0;
    for (int64_t d = 0; d < tensor->dim; d++) {
        if (tensor->sizes[d] == 0) return RF_OK;
        last += (tensor->sizes[d] - 1) * tensor->strides[d];
    }
    if (aoti_torch_get_storage_size(tensor->handle, &available) != 0 ||
        aoti_torch_get_storage_offset(tensor->handle, &first) != 0)
        return RF_OK; /* not strided */
    required = (first + last + 1) * (int64_t)aoti_torch_dtype_element_size(tensor->dtype);
    RF_FAIL_IF(!has_data || required > available, RF_ERR_VALUE,
               "%s has no memory for its elements, which need %lld bytes of its storage, but it has %lld. "
               "Keep the storage until the call, and do not resize it.",
               tensor->argument, (long long)required, (long long)available);
    return RF_OK;
}

rf_status rf__tensor_storage_check(const char *argument, void *handle) {
    rf__tensor tensor = {.argument = argument, .handle = handle};
    int64_t *sizes = NULL, *strides = NULL;
    if (aoti_torch_get_dim(handle, &tensor.dim) != 0 || aoti_torch_get_sizes(handle, &sizes) != 0 ||
        aoti_torch_get_strides(handle, &strides) != 0 || aoti_torch_get_dtype(handle, &tensor.dtype) != 0)
        return RF_OK;
    tensor.sizes = sizes;
    tensor.strides = strides;
    return memory_check(&tensor, true);
}

bool rf__tensor_integers(void *handle, int64_t dim, rf__integers *integers) {
    rf__tensor tensor = {.argument = "integers", .handle = handle};
    if (rf__tensor_device(handle, &tensor.device) != RF_OK || !rf__device_is_cpu(tensor.device) ||
        tensor_look(handle, &tensor) != RF_OK || tensor.dim != dim ||
        (tensor.dtype != aoti_torch_dtype_int32() && tensor.dtype != aoti_torch_dtype_int64()) ||
        memory_check(&tensor, tensor.data != NULL) != RF_OK)
        return false;
    integers->data = (void *)tensor.data;
    integers->type = tensor.dtype == aoti_torch_dtype_int32() ? RF_INT32 : RF_INT64;
    integers->dim = dim;
    for (int64_t d = 0; d < dim; d++) {
        integers->sizes[d] = tensor.sizes[d];
        integers->strides[d] = tensor.strides[d];
    }
    return true;
}

rf_status rf__tensor_read(const char *argument, AtenTensorHandle handle, int64_t dim, rf__torch_device device,
                          rf__tensor *tensor) {
    tensor->argument = argument;
    RF_CHECK(rf__tensor_device(handle, &tensor->device));
    RF_FAIL_IF(tensor->device.type != device.type || tensor->device.index != device.index, RF_ERR_VALUE,
               "%s is %s, other arguments are %s. Move all tensors to one device.", argument,
               rf__device_is_cpu(tensor->device)    ? "on the CPU"
               : tensor->device.type == device.type ? "on another GPU"
                                                    : "not on the CPU",
               rf__device_is_cpu(device) ? "on the CPU" : "on a GPU");
    RF_CHECK(tensor_look(handle, tensor));
    RF_FAIL_IF(dim != RF__ANY_DIM && tensor->dim != dim, RF_ERR_VALUE,
               "%s has %lld dimensions; expected %lld", argument, (long long)tensor->dim, (long long)dim);
    return memory_check(tensor, tensor->data != NULL);
}

bool rf__tensor_is_contiguous(const rf__tensor *tensor) {
    int64_t stride = 1;
    for (int64_t d = 0; d < tensor->dim; d++)
        if (tensor->sizes[d] == 0) return true;
    for (int64_t d = tensor->dim - 1; d >= 0; d--) {
        if (tensor->sizes[d] != 1 && tensor->strides[d] != stride) return false;
        stride *= tensor->sizes[d];
    }
    return true;
}

/* Strides [dim] of a contiguous tensor, and its elements; a size of 0 counts as 1. */
static rf_status strides_of(int64_t dim, const int64_t *sizes, int64_t *strides, int64_t *numel) {
    int64_t stride = 1;
    RF_FAIL_IF(dim > RF__MAX_DIM, RF_ERR_UNSUPPORTED, "a tensor of %lld dimensions, at most %d are supported",
               (long long)dim, RF__MAX_DIM);
    for (int64_t d = dim - 1; d >= 0; d--) {
        strides[d] = stride;
        stride *= sizes[d] > 1 ? sizes[d] : 1;
    }
    *numel = stride;
    return RF_OK;
}

rf_status rf__tensor_new(int64_t dim, const int64_t *sizes, int32_t dtype, rf__torch_device device,
                         AtenTensorHandle *tensor, void **data) {
    int64_t strides[RF__MAX_DIM], numel = 0;
    RF_CHECK(strides_of(dim, sizes, strides, &numel));
    RF__TORCH_CHECK(aoti_torch_empty_strided(dim, sizes, strides, dtype, device.type, device.index, tensor));
    RF__TORCH_CHECK(torch_get_mutable_data_ptr(*tensor, data));
    return RF_OK;
}

static void unmap(void *data, void *context) { (void)munmap(data, (size_t)(uintptr_t)context); }

rf_status rf__tensor_reserve(int64_t dim, const int64_t *sizes, int32_t dtype, AtenTensorHandle *tensor,
                             void **data) {
    const rf__torch_device device = rf__device_cpu();
    int64_t strides[RF__MAX_DIM], numel = 0;
    RF_CHECK(strides_of(dim, sizes, strides, &numel));
    const size_t bytes = (size_t)numel * aoti_torch_dtype_element_size(dtype) + 1;
    *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    RF_FAIL_IF(*data == MAP_FAILED, RF_ERR_MEMORY, "no address space for a tensor of %zu bytes", bytes);
    RF__TORCH_CHECK(torch_from_blob(*data, dim, sizes, strides, 0, dtype, device.type, device.index, tensor,
                                    aoti_torch_layout_strided(), NULL, 0, unmap, (void *)bytes));
    return RF_OK;
}

rf_status rf__tensor_make_contiguous(rf__tensor *tensor, int32_t dtype, AtenTensorHandle *copy) {
    void *data;
    if (tensor->dtype == dtype && rf__tensor_is_contiguous(tensor)) return RF_OK;
    RF_CHECK(rf__tensor_new(tensor->dim, tensor->sizes, dtype, tensor->device, copy, &data));
    RF__TORCH_CHECK(aoti_torch_copy_(*copy, tensor->handle, false));
    return tensor_look(*copy, tensor);
}

void rf__tensor_free(AtenTensorHandle tensor) {
    if (tensor != NULL) aoti_torch_delete_tensor_object(tensor);
}

rf_status rf__tensor_refuse(const rf__tensor *tensor, rf_status code, const char *format, ...) {
    char sizes[RF__MAX_DIM * 24] = "", must[512];
    size_t length = 0;
    for (int64_t d = 0; d < tensor->dim && d < RF__MAX_DIM; d++)
        length += (size_t)snprintf(sizes + length, sizeof sizes - length, "%s%lld", d > 0 ? ", " : "",
                                   (long long)tensor->sizes[d]);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(must, sizeof must, format, arguments);
    va_end(arguments);
    return rf__fail(code, "%s is %s [%s]; expected %s", tensor->argument, rf__torch_dtype_name(tensor->dtype),
                    sizes, must);
}

int32_t rf__torch_dtype(rf_dtype dtype) {
    return dtype == RF_FLOAT16    ? aoti_torch_dtype_float16()
           : dtype == RF_BFLOAT16 ? aoti_torch_dtype_bfloat16()
           : dtype == RF_FLOAT64  ? aoti_torch_dtype_float64()
                                  : aoti_torch_dtype_float32();
}

const char *rf__torch_dtype_name(int32_t dtype) {
#define NAME_IF_SAME(name) \
    if (dtype == aoti_torch_dtype_##name()) return #name;
    RF__TORCH_DTYPE_LIST(NAME_IF_SAME)
#undef NAME_IF_SAME
    return "another dtype";
}

rf_status rf__tensor_dtype(const rf__tensor *tensor, rf_dtype *dtype) {
    for (*dtype = RF_FLOAT32; *dtype <= RF_BFLOAT16; ++*dtype)
        if (tensor->dtype == rf__torch_dtype(*dtype)) return RF_OK;
    return rf__fail(RF_ERR_TYPE, "%s is %s; expected float32, float16 or bfloat16", tensor->argument,
                    rf__torch_dtype_name(tensor->dtype));
}
