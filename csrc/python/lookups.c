/* recfuse._C: a look at the lookups of a bag. Indices and offsets are addresses of memory that the caller keeps. */
#include "python/methods.h"

#include "tools/lookups.h"

RF__PY_METHOD(lookups_suit_torch) {
    enum { FEW = 2048 };
    unsigned long long indices, offsets;
    long long count, bags, rows;
    int type, has_end;
    if (!PyArg_ParseTuple(arguments, "KLKLpiL:lookups_suit_torch", &indices, &count, &offsets, &bags,
                          &has_end, &type, &rows))
        return NULL;
    if (count <= 0 || bags <= 0 || (type != RF_INT32 && type != RF_INT64)) Py_RETURN_FALSE;
    const rf__lookups lookups = {.indices = rf__py_pointer(indices),
                                 .offsets = rf__py_pointer(offsets),
                                 .type = (rf_int_type)type,
                                 .count = count,
                                 .bags = bags,
                                 .rows = rows,
                                 .has_end = has_end};
    return PyBool_FromLong(rf__lookups_good(&lookups) && (count <= FEW || rf__lookups_distinct(&lookups)));
}
