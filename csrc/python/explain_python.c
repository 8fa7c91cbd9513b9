/* recfuse._C: known GPUs, records of launches, and compilation of kernels ahead. */
#include "python/methods.h"

#include <string.h>

#include "gpu/launches/explain.h"
#include "gpu/tune/occupancy.h"

static PyObject *gpu_dict(const rf__gpu *gpu) {
    return Py_BuildValue(
        "{s:s,s:s,s:i,s:i,s:i,s:i,s:L,s:L,s:L,s:L,s:L,s:d,s:d,s:d,s:d}", "name", gpu->name, "arch", gpu->arch,
        "major", gpu->cc_major, "sms", gpu->sms, "threads_per_sm", gpu->threads_per_sm, "blocks_per_sm",
        gpu->blocks_per_sm, "registers_per_sm", (long long)gpu->registers_per_sm, "shared_per_sm",
        (long long)gpu->shared_per_sm, "shared_per_block", (long long)gpu->shared_per_block_optin,
        "reserved_shared_per_block", (long long)gpu->reserved_shared_per_block, "l2_bytes",
        (long long)gpu->l2_bytes, "clock", gpu->clock, "bytes_per_second", gpu->bytes_per_second,
        "flops_per_clock", gpu->flops_per_clock, "tensor_flops_per_clock", gpu->tensor_flops_per_clock);
}

RF__PY_METHOD(
    gpus,
    "gpus() -> list[dict]: the known GPUs; those of an architecture side by side, the typical one first") {
    int32_t count = 0;
    const rf__gpu *gpus = rf__gpus(&count);
    PyObject *list = NULL;
    if (!PyArg_ParseTuple(arguments, ":gpus") || (list = PyList_New(0)) == NULL) return NULL;
    for (int32_t i = 0; i < count; i++) {
        PyObject *gpu = gpu_dict(&gpus[i]);
        const int failed = gpu == NULL || PyList_Append(list, gpu) != 0;
        Py_XDECREF(gpu);
        if (failed) Py_CLEAR(list);
        if (failed) return NULL;
    }
    return list;
}

RF__PY_METHOD(gpu, "gpu(name: str) -> dict: a GPU by its name, or of an architecture: sm_90a, or "
                   "sm_90a:114:50 with SMs and MiB of L2") {
    const char *name;
    rf__gpu gpu;
    if (!PyArg_ParseTuple(arguments, "s:gpu", &name)) return NULL;
    const rf_status status = rf__gpu_find(name, &gpu);
    return status == RF_OK ? gpu_dict(&gpu) : rf__py_result(NULL, status, "gpu");
}

RF__PY_METHOD(explain_begin,
              "explain_begin(gpu: str | None): records the launches of calls until explain_end; with a GPU, "
              "calls of this thread on the CPU's tensors are lowered for it instead of run") {
    const char *name = NULL;
    rf__gpu gpu;
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "z:explain_begin", &name)) return NULL;
    if (name != NULL) status = rf__gpu_find(name, &gpu);
    if (status == RF_OK) status = rf__explain_begin(name != NULL ? &gpu : NULL);
    Py_INCREF(Py_None);
    return rf__py_result(Py_None, status, "explain");
}

static PyObject *triple(const uint32_t *sizes) {
    return Py_BuildValue("(III)", sizes[0] > 0 ? sizes[0] : 1, sizes[1] > 0 ? sizes[1] : 1,
                         sizes[2] > 0 ? sizes[2] : 1);
}

static PyObject *launch_dict(const rf__explained *explained) {
    const rf__kernel_launch *launch = &explained->launch;
    const rf__kernel_source *source = launch->source;
    const uint32_t limiting = launch->limiting_shared_bytes;
    return Py_BuildValue(
        "{s:s,s:i,s:N,s:z,s:s,s:s,s:N,s:N,s:N,s:I,s:I,s:I,s:i,s:L,s:L,s:d,s:d,s:L}", "operator",
        explained->name, "call", explained->call, "gpu", gpu_dict(&explained->gpu), "file",
        source != NULL ? source->file : NULL, "kernel", source != NULL ? source->entry : "fill", "defines",
        explained->defines, "grid", triple(launch->grid), "block", triple(launch->block), "cluster",
        triple(launch->cluster), "shared_bytes", launch->shared_bytes, "limiting_shared_bytes", limiting,
        "most_blocks", launch->most_blocks, "dynamic_shared", explained->dynamic_shared, "read_bytes",
        (long long)launch->read_bytes, "written_bytes", (long long)launch->written_bytes, "flops",
        launch->flops, "tensor_flops", launch->tensor_flops, "workspace_bytes",
        (long long)explained->workspace_bytes);
}

int rf__py_launches(const rf__gpu *gpu, const rf__launches *launches, PyObject *list) {
    rf__explained *explained = NULL;
    int failed = 0;
    const rf_status status = rf__explained_of(gpu, launches, &explained);
    if (status != RF_OK) {
        rf__py_result(NULL, status, launches->name);
        return -1;
    }
    for (int32_t i = 0; !failed && i < launches->count; i++) {
        PyObject *launch = launch_dict(&explained[i]);
        failed = launch == NULL || PyList_Append(list, launch) != 0;
        Py_XDECREF(launch);
    }
    rf__explained_free(explained, launches->count);
    return failed ? -1 : 0;
}

RF__PY_METHOD(explain_end, "explain_end() -> list[dict]: the launches") {
    rf__explained *launches = NULL;
    int32_t count = 0;
    PyObject *list = NULL;
    if (!PyArg_ParseTuple(arguments, ":explain_end")) return NULL;
    rf__explain_end(&launches, &count);
    list = PyList_New(0);
    for (int32_t i = 0; list != NULL && i < count; i++) {
        PyObject *launch = launch_dict(&launches[i]);
        if (launch == NULL || PyList_Append(list, launch) != 0) Py_CLEAR(list);
        Py_XDECREF(launch);
    }
    rf__explained_free(launches, count);
    return list;
}

RF__PY_METHOD(explain_lowers,
              "explain_lowers() -> bool: whether calls of this thread are lowered instead of run") {
    if (!PyArg_ParseTuple(arguments, ":explain_lowers")) return NULL;
    return PyBool_FromLong(rf__cuda_described_gpu() != NULL);
}

RF__PY_METHOD(explain_gpu, "explain_gpu() -> dict | None: the GPU that they are lowered for") {
    if (!PyArg_ParseTuple(arguments, ":explain_gpu")) return NULL;
    const rf__gpu *gpu = rf__cuda_described_gpu();
    if (gpu == NULL) Py_RETURN_NONE;
    return gpu_dict(gpu);
}

RF__PY_METHOD(kernel_compile,
              "kernel_compile(arch: str, file: str, kernel: str, defines: str, cached_only: bool = False) -> "
              "dict: the compiler's report; None if the kernel is not in the cache") {
    rf__kernel_source source;
    rf__kernel_options options = {0};
    const char *arch, *defines;
    int cached_only = 0;
    bool is_cached = true;
    rf__kernel_info info = {0};
    rf_status status = RF_OK;
    if (!PyArg_ParseTuple(arguments, "ssss|p:kernel_compile", &arch, &source.file, &source.entry, &defines,
                          &cached_only))
        return NULL;
    if (strlen(defines) >= sizeof options.defines || strstr(source.file, "..") != NULL)
        return PyErr_Format(PyExc_ValueError,
                            "kernel_compile: found the file %s and options of %zu bytes; expected "
                            "a path under kernels/ and less than %zu bytes",
                            source.file, strlen(defines), sizeof options.defines);
    memcpy(options.defines, defines, strlen(defines) + 1);
    if (cached_only)
        RF__PY_UNLOCKED(is_cached = rf__jit_is_cached(&source, &options, arch, &info));
    else
        RF__PY_UNLOCKED(status = rf__jit_compile(&source, &options, arch, NULL, NULL, &info));
    if (status != RF_OK) return rf__py_result(NULL, status, "kernel_compile");
    if (!is_cached) Py_RETURN_NONE;
    return rf__py_kernel(&info, Py_BuildValue("{s:i}", "shared_bytes", info.shared_bytes));
}

RF__PY_METHOD(
    occupancy,
    "occupancy(registers_per_sm, shared_per_sm, reserved_shared_per_block, threads_per_sm, blocks_per_sm, "
    "registers: a thread, threads: a block, shared: bytes a block) -> int, blocks an SM") {
    rf__gpu gpu = {0};
    long long registers_per_sm, shared_per_sm, reserved, shared;
    int registers, threads;
    if (!PyArg_ParseTuple(arguments, "LLLiiiiL:occupancy", &registers_per_sm, &shared_per_sm, &reserved,
                          &gpu.threads_per_sm, &gpu.blocks_per_sm, &registers, &threads, &shared))
        return NULL;
    gpu.registers_per_sm = registers_per_sm;
    gpu.shared_per_sm = shared_per_sm;
    gpu.reserved_shared_per_block = reserved;
    if (registers < 1 || threads < 1)
        return PyErr_Format(PyExc_ValueError, "occupancy: registers is %d and threads %d; expected 1 or more",
                            registers, threads);
    return PyLong_FromLongLong(rf__occupancy(&gpu, registers, (threads + 31) / 32 * 32, shared));
}
