/* The module recfuse._C: its method table has the list in methods.h and those of the families. */
#define RF__IMPORT_NUMPY
#include "python/methods.h"

#include <string.h>

static PyMethodDef methods[] = {
#define RF__PYTHON_FUNCTION(name) {#name, rf__py_##name, METH_VARARGS, rf__py_##name##_text},
    RF__PYTHON_OWN_FUNCTIONS(RF__PYTHON_FUNCTION)
#include "families.h"
        {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module) {
    (void)module;
    if (strcmp(rf_version(), RECFUSE_VERSION) != 0) {
        PyErr_Format(
            PyExc_ImportError,
            "recfuse._C is of version %s, librecfuse.so of %s; expected one version. Install one package.",
            RECFUSE_VERSION, rf_version());
        return -1;
    }
    import_array1(-1);
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)module_exec}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_C",
    .m_doc = "Generators and statistics in C over NumPy arrays.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__C(void);
PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&definition); }
