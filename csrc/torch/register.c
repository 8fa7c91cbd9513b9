/* Registers the operators with torch's dispatcher when the library is loaded. */
#include "torch/operators.h"

#include <stdio.h>

#include "core/file.h"
#include "gpu/driver/driver.h"

enum {
#define RF__TORCH_OPERATOR(name) NUMBER_##name,
    RF__TORCH_OWN_OPERATORS(RF__TORCH_OPERATOR)
#include "families.h"
        COUNT
};

static rf__registered operators[COUNT]; /* filled once, while the library is loaded */

#define RF__TORCH_OPERATOR(name)                                                   \
    static void name##_boxed(StableIValue *stack, uint64_t n_in, uint64_t n_out) { \
        (void)n_in, (void)n_out;                                                   \
        rf__call_run(&operators[NUMBER_##name], stack);                            \
    }
RF__TORCH_OWN_OPERATORS(RF__TORCH_OPERATOR)
#include "families.h"

/* A second file with this library in one process: torch's operators are those of the first, and so is the
 * state of devices. Loading cannot raise, so it prints a warning, and each call of this library raises an
 * error. */
static void refuse_second_copy(void) {
    rf__value path = {0};
    const char *first = "another file";
    char text[2 * RF__PATH_BYTES + 512];
    if (torch_call_dispatcher("recfuse::library_path", "", &path.bits, RF__TORCH_BUILD_VERSION) == 0) {
        path.is_present = true;
        if (torch_string_c_str(path.string, &first) != 0) first = "another file";
    }
    snprintf(text, sizeof text,
             "recfuse: %s is a second copy of librecfuse.so in this process, whose operators are those of "
             "%s; load one file alone (RECFUSE_LIBRARY names it to the Python package)",
             rf__library_file(), first);
    rf__value_free((rf__type){.kind = RF__STRING}, &path);
    rf__cuda_refuse(text);
    aoti_torch_warn(__func__, __FILE__, __LINE__, text);
}

__attribute__((constructor)) static void register_operators(void) {
#define RF__TORCH_OPERATOR(name) \
    operators[NUMBER_##name] = (rf__registered){#name, &rf__torch_##name, name##_boxed, {0}, NULL};
    RF__TORCH_OWN_OPERATORS(RF__TORCH_OPERATOR)
#include "families.h"
    if (!rf__operators_register("recfuse", operators, COUNT)) refuse_second_copy();
}
