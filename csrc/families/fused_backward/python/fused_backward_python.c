/* recfuse._C: facts of optimizers, and the parts that backward passes on a GPU use. */
#include "python/methods.h"

#include "families/fused_backward/backward.h"

RF__PY_METHOD(fused_embedding_bag_backward_leave_out,
              "fused_embedding_bag_backward_leave_out(parts: int): later backward passes on a GPU do without "
              "these parts; 1: the path of small tables; 0: all are used") {
    int parts;
    if (!PyArg_ParseTuple(arguments, "i:fused_embedding_bag_backward_leave_out", &parts)) return NULL;
    rf__backward_omit(parts);
    Py_RETURN_NONE;
}

RF__PY_METHOD(
    optimizers,
    "optimizers() -> list of (name, states: names with spaces between, by_row: whether a state has one "
    "number a row, counts: whether the step depends on the number of steps, step: type of the "
    "entry \"step\" in a state, or empty), by code") {
    static const struct {
        const char *name;
        int columns, rows, counts, operations;
        const char *states, *step;
    } facts[] = {
#define FACTS(code, ...) {__VA_ARGS__},
        RF_OPTIMIZER_LIST(FACTS)
#undef FACTS
    };
    if (!PyArg_ParseTuple(arguments, ":optimizers")) return NULL;
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && i < RF_OPTIMIZERS; i++) {
        PyObject *entry =
            Py_BuildValue("(ssNNs)", facts[i].name, facts[i].states, PyBool_FromLong(facts[i].rows > 0),
                          PyBool_FromLong(facts[i].counts), facts[i].step);
        if (entry == NULL || PyList_Append(list, entry) != 0) Py_CLEAR(list);
        Py_XDECREF(entry);
    }
    return list;
}

RF__PY_METHOD(
    update_bounds,
    "update_bounds() -> list of (least, end): bounds of the numbers of an update, by code; an end of "
    "0 is none") {
#define BOUNDS(code, name, least, end) {least, end},
    static const double bounds[][2] = {RF_UPDATE_NUMBER_LIST(BOUNDS)};
#undef BOUNDS
    if (!PyArg_ParseTuple(arguments, ":update_bounds")) return NULL;
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && i < RF_UPDATE_NUMBERS; i++) {
        PyObject *entry = Py_BuildValue("(dd)", bounds[i][0], bounds[i][1]);
        if (entry == NULL || PyList_Append(list, entry) != 0) Py_CLEAR(list);
        Py_XDECREF(entry);
    }
    return list;
}
