/* recfuse._C: which parts backward passes on a GPU use. */
#include "python/methods.h"

#include "families/fused_backward/backward.h"

RF__PY_METHOD(fused_embedding_bag_backward_leave_out,
              "fused_embedding_bag_backward_leave_out(parts: int): later backward passes on a GPU do without "
              "these parts; 1: the path of small tables; 0: all are used") {
    int parts;
    if (!PyArg_ParseTuple(arguments, "i:fused_embedding_bag_backward_leave_out", &parts)) return NULL;
    rf__backward_leave_out(parts);
    Py_RETURN_NONE;
}
