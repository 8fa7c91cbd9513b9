/* The functions of recfuse._C: one list, which module.c makes its method table from. Only files in
 * this folder and in families' folders python/ know CPython and NumPy. They keep to the limited API of both.
 *
 * module.c defines RF__IMPORT_NUMPY before it includes this, and calls import_array1 in its exec slot. */
#ifndef RECFUSE_PYTHON_METHODS_H
#define RECFUSE_PYTHON_METHODS_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030a0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#ifndef NPY_TARGET_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#endif
#define PY_ARRAY_UNIQUE_SYMBOL rf__numpy_api
#ifndef RF__IMPORT_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include "recfuse.h"

/* name in Python, which is rf__py_<name> in C; its docstring. All take positional arguments (METH_VARARGS). */
#define RF__PYTHON_METHODS(X)                                                                                \
    X(workload_lengths,                                                                                      \
      "workload_lengths(groups: float64 [G, 6], batch: int, seed: int) -> int32 [G, batch]")                 \
    X(workload_indices,                                                                                      \
      "workload_indices(groups: float64 [G, 6], lengths: int32 [G, batch], skew: float, model_seed: int, "   \
      "seed: int, wide: bool) -> int64 [lookups] where wide, else int32")                                    \
    X(batch_sizes,                                                                                           \
      "batch_sizes(median: float, spread: float, maximum: int, seed: int, count: int) -> int64 [count]")     \
    X(permutation, "permutation(count: int, seed: int) -> int64 [count], a permutation of 0 ... count - 1")  \
    X(uniform, "uniform(count: int, bound: int, seed: int) -> int64 [count], each in [0, bound)")            \
    X(trace_curve, "trace_curve(ranks, counts: float64 [points], positions: float64 [n]) -> float64 [n]")    \
    X(trace_times,                                                                                           \
      "trace_times(counts: int64 [rows], length: float, burst: float, median: float, sigma: float, "         \
      "seed: int) -> float64 [sum of counts]")                                                               \
    X(trace_reuse,                                                                                           \
      "trace_reuse(rows: int64 [lookups], n_rows: int) -> (gaps, distances), int64 [lookups] each")          \
    X(hash_strings, "hash_strings(bytes: int, n_bytes: int, offsets: int, offset_type: int, count: int, "    \
                    "seed: int, threads: int) -> int64 [count]; bytes and offsets are addresses")            \
    X(hash_padded_strings, "hash_padded_strings(strings: S or U [count], contiguous and native, seed: int, " \
                           "threads: int) -> int64 [count]")                                                 \
    X(hash_string_objects,                                                                                   \
      "hash_string_objects(strings: list of str, bytes, None or NaN, seed: int, threads: int) -> (hashes: "  \
      "int64 [present], offsets: int64 [strings + 1]), of which string i has one hash or none")              \
    X(embedding_columns_program,                                                                             \
      "embedding_columns_program(columns: int64 [n, 17], sources: int64 [n, 5], steps: int64 [n, 3], "       \
      "boundaries: float32 [n], vocabulary: int64 [n]) -> int64 [words]; fields as in "                      \
      "recfuse/embedding_columns.h")                                                                         \
    X(tensor_cell, "tensor_cell(tensor: torch.Tensor, implementation: its _cdata, size: bytes of the "       \
                   "object) -> int, the "                                                                    \
                   "first byte of the object's word that is `implementation`; -1: there is none")            \
    X(check_storages,                                                                                        \
      "check_storages(type: torch.Tensor, cell: of tensor_cell, where: str, name: str, tensors: tuple): "    \
      "raises ValueError where the storage of a tensor is too small for it; objects of other types pass")    \
    X(join_offsets,                                                                                          \
      "join_offsets(type: torch.Tensor, cell: of tensor_cell, offsets: torch.Tensor [tables, bags], "        \
      "indices: torch.Tensor [tables, n] or a list or tuple of a tensor [n] a table, joined: int64 "         \
      "torch.Tensor [tables * bags + 1], which is written) -> bool: whether the indices table after table "  \
      "have the offsets `joined`; False: a tensor is no plain one of integers on the CPU, has no memory, "   \
      "or another shape, or offsets of a table do not begin with 0")                                         \
    X(embedding_columns_inputs,                                                                              \
      "embedding_columns_inputs(type: torch.Tensor, cell: of tensor_cell, entries: tuple of tensors and of " \
      "(values, offsets[, weights]), batch: int, -1: of the first, with jagged entries of one feature) -> "  \
      "(owner: a capsule, while which lives the operator finds the inputs by their number; number: int; "    \
      "forms: int64 [inputs, 4], type, width, features and whether weighted, dense ones first; widths: "     \
      "int64 [entries], 0: jagged; batch; on_gpu: int; device: int), or None: an entry is no plain tensor "  \
      "or pair of them, does not fit the others, or has no memory. The caller keeps the tensors")            \
    X(embedding_columns_pack,                                                                                \
      "embedding_columns_pack(owner: of embedding_columns_inputs, on the CPU; groups: int32 [inputs], of "   \
      "inputs that become one, dense ones first; n_groups: int; memory: address or 0, capacity: its bytes) " \
      "-> (bytes needed, parts: list[(field of Inputs, type, rows, columns or -1, byte)]), which are there " \
      "if there is memory")                                                                                  \
    X(jit_status, "jit_status() -> dict: nvrtc and builtins (paths or None), major, minor, missing (text "   \
                  "or None), folder of "                                                                     \
                  "the cache (or None), entries and bytes in it, allowed (to compile), refused (why the "    \
                  "folder is not used, or None), ignored (files in it that others may have written)")        \
    X(gpus,                                                                                                  \
      "gpus() -> list[dict]: the known GPUs; those of an architecture side by side, the typical one first")  \
    X(gpu,                                                                                                   \
      "gpu(name: str) -> dict: a GPU by its name, or of an architecture: sm_90a, or sm_90a:114:50 with SMs " \
      "and MiB of L2")                                                                                       \
    X(explain_begin,                                                                                         \
      "explain_begin(gpu: str | None): records the launches of calls until explain_end; with a GPU, "        \
      "calls of this thread on the CPU's tensors are lowered for it instead of run")                         \
    X(explain_end, "explain_end() -> list[dict]: the launches")                                              \
    X(explain_lowers, "explain_lowers() -> bool: whether calls of this thread are lowered instead of run")   \
    X(explain_gpu, "explain_gpu() -> dict | None: the GPU that they are lowered for")                        \
    X(kernel_compile, "kernel_compile(arch: str, file: str, kernel: str, defines: str, cached_only: bool = " \
                      "False) -> dict: what the compiler says about it; None where it is not in the cache")  \
    X(occupancy,                                                                                             \
      "occupancy(registers_per_sm, shared_per_sm, reserved_shared_per_block, threads_per_sm, "               \
      "blocks_per_sm, registers: a thread, threads: a block, shared: bytes a block) -> int, blocks an SM")   \
    X(embedding_bag_compile,                                                                                 \
      "embedding_bag_compile(arch: str | None, dim: int, stride: int, alignment: int, dtype: int, "          \
      "index_type: "                                                                                         \
      "int, "                                                                                                \
      "offset_type: int, pooling: int, weighted: bool, padded: bool, check: bool, lookups: int, bags: int, " \
      "schedule: str, rows: int = lookups, sms: int, l2_bytes: int = a typical GPU's) -> dict: the "         \
      "complete schedule, and what the compiler says "                                                       \
      "about its GPU kernel; of arch None nothing is compiled")                                              \
    X(embedding_bag_measure,                                                                                 \
      "embedding_bag_measure(device: int, stream: int, table: (weight, rows, dim, stride, dtype), batches: " \
      "list[(indices, lookups, index_type, offsets, bags, offset_type, include_last_offset, "                \
      "sample_weights, "                                                                                     \
      "output)], pooling: int, padding_idx: int, check: bool, schedules: list[str], rounds: int, pinned: "   \
      "(rows, count, index_type = int64) | None) -> float64 [schedules, rounds], seconds a batch")           \
    X(fused_embedding_bag_describe,                                                                          \
      "fused_embedding_bag_describe(call, schedules: int32 [features, 5], warps: int) -> what "              \
      "fused_embedding_bag_map wants; call: (buffers: list[(address, numel, dtype)], features: int64 "       \
      "[features, 7], output_dtype: int, output_stride: int)")                                               \
    X(fused_embedding_bag_map,                                                                               \
      "fused_embedding_bag_map(described, offsets: int32 or int64 [features * bags + 1], sms: int = 132, "   \
      "stage: bool = True, memory: makes the array that is written to, from its rows = None) -> int32 "      \
      "[rows, 8]")                                                                                           \
    X(fused_embedding_bag_candidates,                                                                        \
      "fused_embedding_bag_candidates(call, feature: int) -> list of tuples of 5 ints: schedules worth a "   \
      "try for a feature")                                                                                   \
    X(fused_embedding_bag_compile,                                                                           \
      "fused_embedding_bag_compile(arch: str, call, index_type: int, offset_type: int, weighted: bool, "     \
      "check: bool, schedules: int32 [sets, features, 5], warps: int, timed: bool, mapped: the mapping is "  \
      "the caller's = False, huge: batches of 2 ** 30 lookups and more = False) -> dict: what the compiler " \
      "says about the kernel that has the schedules of "                                                     \
      "all sets")                                                                                            \
    X(fused_embedding_bag_measure,                                                                           \
      "fused_embedding_bag_measure(device: int, stream: int, call, batches: list[(indices, lookups, "        \
      "index_type, offsets, bags, offset_type, sample_weights, output, host_offsets)], schedules: int32 "    \
      "[sets, features, 5], warps: int, rounds: int, timed: bool) -> float64: [sets, rounds], seconds a "    \
      "batch; or where timed [sets, features], clock cycles of the blocks of a feature")                     \
    X(fused_embedding_bag_backward_leave_out,                                                                \
      "fused_embedding_bag_backward_leave_out(parts: int): later backward passes on a GPU do without these " \
      "parts; 1: the path of small tables; 0: all are used")

/* The name of capsules that own an rf__columns_inputs. */
#define RF__PY_COLUMNS_INPUTS "recfuse.columns_inputs"

/* The head of a function of the list. */
#define RF__PY_METHOD(name) \
    PyObject *rf__py_##name(__attribute__((unused)) PyObject *module, PyObject *arguments)

#define RF__PYTHON_DECLARE(name, text) RF__PY_METHOD(name);
RF__PYTHON_METHODS(RF__PYTHON_DECLARE)
#undef RF__PYTHON_DECLARE

/* Where the condition holds, raises and jumps to the label `out`. */
#define RF__PY_REFUSE_IF(condition, exception, ...) \
    do {                                            \
        if (condition) {                            \
            PyErr_Format(exception, __VA_ARGS__);   \
            goto out;                               \
        }                                           \
    } while (0)
/* Runs a statement while other threads may run Python. */
#define RF__PY_UNLOCKED(statement)        \
    do {                                  \
        Py_BEGIN_ALLOW_THREADS statement; \
        Py_END_ALLOW_THREADS              \
    } while (0)
/* `result` (NULL: an exception is set) where `status` is RF_OK; else drops it, and raises what `status` stands for with
 * the text "<function>: <detail>". An object or an array. */
PyObject *rf__py_result(void *result, rf_status status, const char *function);

/* `object` as a C-contiguous array of the type and number of dimensions, converted by NumPy's safe
 * casts alone; a new reference, or NULL with TypeError or ValueError. */
PyArrayObject *rf__py_array(PyObject *object, int type, int dimensions, const char *function,
                            const char *argument);

/* A new array [rows, columns], or [rows] where `columns` is -1; NULL with an exception. */
PyArrayObject *rf__py_new(int type, npy_intp rows, npy_intp columns);

/* An address on a GPU, or none: 0. */
static inline void *rf__py_pointer(unsigned long long address) { return (void *)(uintptr_t)address; }

/* Reads one of the batches of embedding_bag_measure, or with `host_offsets` of fused_embedding_bag_measure,
 * into the fields of `batch` that it gives; -1 with an exception. */
int rf__py_batch(PyObject *object, rf_embedding_bag_params *batch, const void **host_offsets);

/* A dict of `info` and `more`, whose reference it takes; NULL with an exception, also where `more` is NULL. */
PyObject *rf__py_kernel(const rf_kernel_info *info, PyObject *more);

#endif
