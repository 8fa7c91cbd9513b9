/* recfuse::check, and the library's properties. */
#include "core/file.h"
#include "torch/operators.h"

static rf_status check(rf__call *call) {
    const int64_t device = call->values[0].integer;
    RF_FAIL_IF(device < 0 || device > INT32_MAX, RF_ERR_VALUE,
               "device is %lld; expected the ordinal of a GPU", (long long)device);
    return rf_cuda_check((int32_t)device);
}

static rf_status cpu_isa(rf__call *call) { return rf__call_output_text(call, 0, rf_cpu_isa()); }

static rf_status library_version(rf__call *call) { return rf__call_output_text(call, 0, rf_version()); }

static rf_status library_path(rf__call *call) { return rf__call_output_text(call, 0, rf__library_file()); }

const rf__operator rf__torch_check = {"(int device) -> ()", RF__ANYWHERE, check};
const rf__operator rf__torch_cpu_isa = {"() -> str", RF__ANYWHERE, cpu_isa};
const rf__operator rf__torch_library_version = {"() -> str", RF__ANYWHERE, library_version};
const rf__operator rf__torch_library_path = {"() -> str", RF__ANYWHERE, library_path};
