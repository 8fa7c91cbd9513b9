/* Boxed calls: schemas, registration, arguments, results and errors. */
#include "torch/call.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Reads a type, as in "Tensor[]? " or "Tensor(a!) "; returns the following text, or NULL for an unsupported
 * type. */
static const char *type_read(const char *text, rf__type *type) {
    static const struct {
        const char *name;
        rf__kind kind;
    } kinds[] = {{"Tensor", RF__TENSOR},  {"str", RF__STRING},  {"int", RF__INTEGER},
                 {"SymInt", RF__INTEGER}, {"float", RF__FLOAT}, {"ScalarType", RF__INTEGER},
                 {"bool", RF__BOOLEAN}};
    const size_t length = strcspn(text, "([? ,)");
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        if (strlen(kinds[i].name) != length || strncmp(text, kinds[i].name, length) != 0) continue;
        *type = (rf__type){.kind = kinds[i].kind};
        text += length;
        if (*text == '(') text += strcspn(text, ")") + 1; /* it is written */
        if (*text == '[') {
            type->list = true;
            text += strcspn(text, "]") + 1;
        }
        type->optional = *text == '?';
        return type->optional ? text + 1 : text;
    }
    return NULL;
}

/* Skips a default: returns the comma or parenthesis that ends an argument, outside of quotes and brackets. */
static const char *default_skip(const char *text) {
    char closing = '\0';
    for (; *text != '\0' && (closing != '\0' || (*text != ',' && *text != ')')); text++) {
        if (closing != '\0') {
            if (*text == closing) closing = '\0';
        } else if (*text == '"' || *text == '[') {
            closing = *text == '"' ? '"' : ']';
        }
    }
    return text;
}

static const char *argument_read(const char *text, rf__signature *signature) {
    const int32_t at = signature->n_arguments;
    if (at == RF__MAX_ARGUMENTS) return NULL;
    text = type_read(text, &signature->arguments[at]);
    if (text == NULL || *text != ' ') return NULL;
    const size_t length = strcspn(++text, "=,)");
    if (length >= RF__NAME_BYTES) return NULL;
    memcpy(signature->names[at], text, length);
    signature->n_arguments++;
    return default_skip(text + length);
}

bool rf__signature_read(const char *schema, rf__signature *signature) {
    *signature = (rf__signature){0};
    const char *text = schema + 1;
    while (*text != ')') {
        if (strncmp(text, "*, ", 3) == 0) text += 3; /* keyword-only from here on */
        text = argument_read(text, signature);
        if (text == NULL || *text == '\0') return false;
        if (*text == ',') text += 2;
    }
    if (strncmp(text, ") -> ", 5) != 0) return false;
    text += 5;
    if (*text == '(') text++;
    while (*text != '\0' && *text != ')') {
        if (signature->n_outputs == RF__MAX_OUTPUTS) return false;
        text = type_read(text, &signature->outputs[signature->n_outputs++]);
        if (text == NULL) return false;
        if (*text == ',') text += 2;
    }
    return true;
}

/* Returns the longest operator's name with which a private operator's name begins after its underscore; its
 * own name without any. */
static const char *public_name(const rf__registered *operators, size_t count, const char *name) {
    const char *match = name;
    size_t longest = 0;
    for (size_t i = 0; name[0] == '_' && i < count; i++) {
        const size_t length = strlen(operators[i].name);
        if (length <= longest || strncmp(name + 1, operators[i].name, length) != 0) continue;
        match = operators[i].name;
        longest = length;
    }
    return match;
}

/* A call that fails has been logged by libtorch, and nothing can be raised while a library is loaded. */
bool rf__operators_register(const char *space, rf__registered *operators, size_t count) {
    static const struct {
        int32_t key;
        const char *name;
    } keys[] = {{RF__CPU, "CPU"}, {RF__CUDA, "CUDA"}, {RF__ANYWHERE, "CompositeExplicitAutograd"}};
    TorchLibraryHandle schemas = NULL;
    char schema[1024];
    if (aoti_torch_library_init_def(space, __FILE__, __LINE__, &schemas) != 0) return false;
    for (size_t i = 0; i < count; i++) {
        operators[i].public_name = public_name(operators, count, operators[i].name);
        snprintf(schema, sizeof schema, "%s%s", operators[i].name, operators[i].definition->schema);
        if (rf__signature_read(operators[i].definition->schema, &operators[i].signature)) {
            aoti_torch_library_def(schemas, schema);
        } else {
            aoti_torch_warn(__func__, __FILE__, __LINE__, schema);
        }
    }
    for (size_t k = 0; k < sizeof keys / sizeof keys[0]; k++) {
        TorchLibraryHandle library = NULL;
        if (aoti_torch_library_init_impl(space, keys[k].name, __FILE__, __LINE__, &library) != 0) continue;
        for (size_t i = 0; i < count; i++)
            if (operators[i].definition->keys & keys[k].key)
                torch_library_impl(library, operators[i].name, operators[i].boxed, RF__TORCH_BUILD_VERSION);
    }
    return true;
}

static rf_status run(rf__call *call, StableIValue *stack) {
    const rf__signature *signature = &call->registered->signature;
    RF_CHECK(call->registered->definition->run(call));
    for (int32_t i = 0; i < signature->n_outputs; i++)
        RF_FAIL_IF(!signature->outputs[i].optional && !call->outputs[i].is_present, RF_ERR_INTERNAL,
                   "output %d was not made", (int)i);
    for (int32_t i = 0; i < signature->n_outputs; i++) {
        RF_CHECK(rf__value_release(signature->outputs[i], &call->outputs[i], &stack[i]));
        call->outputs[i].is_present = false; /* the stack's now */
    }
    return RF_OK;
}

/* For a call that failed inside libtorch: None for a tensor gets that far. */
static rf_status null_refuse(const rf__call *call, rf_status status) {
    const rf__signature *signature = &call->registered->signature;
    for (int32_t i = 0; i < signature->n_arguments && status == RF_ERR_INTERNAL; i++) {
        const rf__type type = signature->arguments[i];
        bool is_defined = true;
        if (type.kind == RF__TENSOR && !type.list && call->values[i].is_present)
            aoti_torch_is_defined(call->values[i].tensor, &is_defined);
        RF_FAIL_IF(!is_defined, RF_ERR_TYPE, "%s is None; expected a tensor", signature->names[i]);
    }
    return status;
}

/* The arguments are always freed, and the exception is thrown last, only here. The text carries the Python
 * type, because newer torch makes every C++ exception a RuntimeError. */
void rf__call_run(const rf__registered *registered, StableIValue *stack) {
    const rf__signature *signature = &registered->signature;
    rf__call call = {.registered = registered};
    char message[4096 + 256]; /* the longest of rf_last_error, and its prefix */
    for (int32_t i = 0; i < signature->n_arguments; i++)
        call.values[i] = rf__value_take(signature->arguments[i], stack[i]);
    const rf_status status = null_refuse(&call, run(&call, stack));
    for (int32_t i = call.n_temporaries - 1; i >= 0; i--) rf__tensor_free(call.temporaries[i]);
    free(call.scratch);
    free(call.offsets);
    if (call.reference != NULL) call.drop(call.reference);
    for (int32_t i = 0; i < signature->n_arguments; i++)
        rf__value_free(signature->arguments[i], &call.values[i]);
    if (status == RF_OK) return;
    for (int32_t i = 0; i < signature->n_outputs; i++)
        rf__value_free(signature->outputs[i], &call.outputs[i]);
    /* The C API names its operator itself; earlier failures do not. */
    const bool named = strncmp(rf_last_error(), "recfuse.", strlen("recfuse.")) == 0;
    snprintf(message, sizeof message, "%s: %s%s%s%s", rf_status_python(status), named ? "" : "recfuse.",
             named ? "" : registered->public_name, named ? "" : ": ", rf_last_error());
    aoti_torch_check(false, registered->name, __FILE__, __LINE__, message);
}
