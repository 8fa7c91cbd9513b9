/* recfuse._C: the compiler of GPU kernels, and the kernels that are compiled already. */
#include "python/methods.h"

#include <stdlib.h>

#include "gpu/jit/cache.h"
#include "gpu/jit/jit.h"
#include "gpu/jit/nvrtc.h"

/* Returns a new reference; None for NULL. Paths need not be valid text. */
static PyObject *text_or_none(const char *text) {
    if (text != NULL) return PyUnicode_DecodeFSDefault(text);
    Py_INCREF(Py_None);
    return Py_None;
}

RF__PY_METHOD(jit_status,
              "jit_status() -> dict: nvrtc and builtins (paths or None), major, minor, missing (text or "
              "None), folder of the cache (or None), entries and bytes in it, allowed (to compile), refused "
              "(why the folder is not used, or None), ignored (files in it that others may have written)") {
    const rf__nvrtc_library *library = NULL;
    char folder[RF__PATH_BYTES], refused[RF__CACHE_REASON_BYTES] = "";
    rf__cache_file *files = NULL;
    long long entries = 0, bytes = 0, ignored = 0;
    if (!PyArg_ParseTuple(arguments, ":jit_status")) return NULL;
    const bool has_nvrtc = rf__nvrtc_find(&library) == RF_OK;
    const bool has_folder = rf__cache_folder(folder) && rf__cache_folder_trusted(folder, refused);
    const size_t count = has_folder ? rf__cache_list(folder, NULL, &files) : 0;
    for (size_t i = 0; i < count; i++) {
        if (files[i].temporary) continue;
        if (!files[i].trusted) {
            ignored++;
            continue;
        }
        entries++;
        bytes += files[i].bytes;
    }
    free(files);
    return Py_BuildValue("{sNsNsisisNsNsLsLsNsNsL}", "nvrtc", text_or_none(has_nvrtc ? library->path : NULL),
                         "builtins", text_or_none(has_nvrtc ? library->builtins : NULL), "major",
                         has_nvrtc ? (int)library->major : 0, "minor", has_nvrtc ? (int)library->minor : 0,
                         "missing", text_or_none(has_nvrtc ? NULL : rf_last_error()), "folder",
                         text_or_none(folder[0] != '\0' ? folder : NULL), "entries", entries, "bytes", bytes,
                         "allowed", PyBool_FromLong(rf__jit_allowed()), "refused",
                         text_or_none(refused[0] != '\0' ? refused : NULL), "ignored", ignored);
}
