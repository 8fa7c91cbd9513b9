/* Registers the operators with torch's dispatcher when the library is loaded: one namespace, one list. */
#include "torch/ops.h"

#include <stdio.h>
#include <string.h>

#include "cuda/driver/driver.h"
#include "base/file.h"

/* Runs one boxed call: the arguments are freed whatever happens, and the exception is thrown last, from
 * here alone. The Python type travels in the text, since newer torch makes every C++ exception a
 * RuntimeError. */
static void call(const char *name, const char *kinds, rf__operator kernel, StableIValue *stack,
                 uint64_t n_out) {
    rf__value values[RF__MAX_ARGUMENTS];
    AtenTensorHandle outputs[RF__MAX_OUTPUTS] = {NULL, NULL};
    char message[4096 + 256]; /* the longest of rf_last_error, and what it is of */
    rf__arguments_take(kinds, stack, values);
    const rf_status status = kernel(values, outputs);
    rf__arguments_free(kinds, values);
    if (status == RF_OK) {
        for (uint64_t i = 0; i < n_out; i++) stack[i] = (StableIValue)(uintptr_t)outputs[i];
        return;
    }
    for (int i = RF__MAX_OUTPUTS - 1; i >= 0; i--) rf__tensor_free(outputs[i]);
    /* The C API names its operator itself; what fails before it is reached does not. */
    if (strncmp(rf_last_error(), "recfuse.", strlen("recfuse.")) == 0) {
        snprintf(message, sizeof message, "%s: %s", rf_status_python(status), rf_last_error());
    } else {
        snprintf(message, sizeof message, "%s: recfuse.%s: %s", rf_status_python(status), name,
                 rf_last_error());
    }
    aoti_torch_check(false, name, __FILE__, __LINE__, message);
}

#define BOXED(name, kinds, schema)                                                          \
    _Static_assert(sizeof kinds <= RF__MAX_ARGUMENTS + 1, #name " has too many arguments"); \
    static void name##_boxed(StableIValue *stack, uint64_t n_in, uint64_t n_out) {          \
        (void)n_in;                                                                         \
        call(#name, kinds, rf__torch_##name, stack, n_out);                                 \
    }
RF__OPERATOR_LIST(BOXED)
RF__CPU_OPERATOR_LIST(BOXED)

/* libtorch before 2.15 copies a returned string and never frees it: 48 bytes a call that are not ours to
 * free, since later ones do. Nothing that runs often returns one. */
static void give_string(const char *name, const char *text, StableIValue *stack) {
    StringHandle string = NULL;
    if (torch_new_string_handle(text, strlen(text), &string) != 0) {
        aoti_torch_check(false, name, __FILE__, __LINE__, "MemoryError: recfuse: no memory for a string");
    }
    stack[0] = (StableIValue)(uintptr_t)string;
}

static void cpu_isa(StableIValue *stack, uint64_t n_in, uint64_t n_out) {
    (void)n_in, (void)n_out;
    give_string("cpu_isa", rf_cpu_isa(), stack);
}

static void library_version(StableIValue *stack, uint64_t n_in, uint64_t n_out) {
    (void)n_in, (void)n_out;
    give_string("library_version", rf_version(), stack);
}

static void library_path(StableIValue *stack, uint64_t n_in, uint64_t n_out) {
    (void)n_in, (void)n_out;
    give_string("library_path", rf__library_file(), stack);
}

static rf_status check_device(const rf__value *values, AtenTensorHandle *outputs) {
    (void)outputs;
    const int64_t device = values[0].integer;
    if (device < 0 || device > INT32_MAX) {
        return rf__fail(RF_ERR_VALUE, "device is %lld, must be the ordinal of a GPU", (long long)device);
    }
    return rf_cuda_check((int32_t)device);
}

static void check(StableIValue *stack, uint64_t n_in, uint64_t n_out) {
    (void)n_in;
    call("check", "i", check_device, stack, n_out);
}

/* A second file with this library in one process: torch's operators are the first one's, and so is the state of
 * devices. Nothing can be raised while a library is loaded, so a warning says so, and an error what is called here. */
static void refuse_second_copy(void) {
    StableIValue result = 0;
    StringHandle string = NULL;
    const char *first = "another file";
    char text[2 * RF__PATH_BYTES + 512];
    if (torch_call_dispatcher("recfuse::library_path", "", &result, RF__TORCH_BUILD_VERSION) == 0) {
        string = (StringHandle)(uintptr_t)result;
        if (torch_string_c_str(string, &first) != 0) first = "another file";
    }
    snprintf(text, sizeof text,
             "recfuse: %s is a second copy of librecfuse.so in this process, whose operators are those of "
             "%s; load one "
             "file alone (RECFUSE_LIBRARY names it to the Python package)",
             rf__library_file(), first);
    if (string != NULL) torch_delete_string(string);
    rf__cuda_refuse(text);
    aoti_torch_warn(__func__, __FILE__, __LINE__, text);
}

/* A call that fails has been logged by libtorch, and nothing can be raised from here. */
__attribute__((constructor)) static void register_operators(void) {
    TorchLibraryHandle schemas = NULL, anywhere = NULL, cpu = NULL, cuda = NULL;
    const char *space = "recfuse";
    if (aoti_torch_library_init_def(space, __FILE__, __LINE__, &schemas) != 0) {
        refuse_second_copy();
        return;
    }
    if (aoti_torch_library_init_impl(space, "CompositeExplicitAutograd", __FILE__, __LINE__, &anywhere) !=
            0 ||
        aoti_torch_library_init_impl(space, "CPU", __FILE__, __LINE__, &cpu) != 0 ||
        aoti_torch_library_init_impl(space, "CUDA", __FILE__, __LINE__, &cuda) != 0) {
        return;
    }
    aoti_torch_library_def(schemas, "cpu_isa() -> str");
    aoti_torch_library_def(schemas, "check(int device) -> ()");
    torch_library_impl(anywhere, "check", check, RF__TORCH_BUILD_VERSION);
    aoti_torch_library_def(schemas, "library_version() -> str");
    aoti_torch_library_def(schemas, "library_path() -> str");
    torch_library_impl(anywhere, "library_path", library_path, RF__TORCH_BUILD_VERSION);
    torch_library_impl(anywhere, "cpu_isa", cpu_isa, RF__TORCH_BUILD_VERSION);
    torch_library_impl(anywhere, "library_version", library_version, RF__TORCH_BUILD_VERSION);
#define REGISTER_CPU(name, kinds, schema)          \
    aoti_torch_library_def(schemas, #name schema); \
    torch_library_impl(cpu, #name, name##_boxed, RF__TORCH_BUILD_VERSION);
#define REGISTER(name, kinds, schema) \
    REGISTER_CPU(name, kinds, schema) \
    torch_library_impl(cuda, #name, name##_boxed, RF__TORCH_BUILD_VERSION);
    RF__OPERATOR_LIST(REGISTER)
    RF__CPU_OPERATOR_LIST(REGISTER_CPU)
#undef REGISTER
#undef REGISTER_CPU
}
