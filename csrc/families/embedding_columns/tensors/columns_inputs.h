/* Inputs of embedding columns, read from tensors. csrc/python reads the tensors of a batch into a list, and
 * an operator takes the list by its number: an operator takes no address from its caller. */
#ifndef RECFUSE_COLUMNS_INPUTS_H
#define RECFUSE_COLUMNS_INPUTS_H

#include "core/status.h"

/* The name of Python's capsules that own such a list. */
#define RF__COLUMNS_INPUTS_CAPSULE "recfuse.columns_inputs"

/* The inputs of a batch, dense ones first. The creator owns a reference, and keeps the tensors alive until it
 * drops it. */
typedef struct rf__columns_inputs {
    struct rf__columns_inputs *next, *previous; /* of the lists with numbers */
    int64_t number, references; /* the lock of columns_inputs.c guards all up to here */
    int64_t batch; /* -1: the first tensor that is read tells it */
    int64_t count;
    int32_t on_gpu, device; /* 1: on a GPU, -1: told by the first tensor; its number, -1 on the CPU */
    rf_column_input rows[]; /* [count] */
} rf__columns_inputs;

/* Returns a list of `count` zeroed inputs, without a number, whose batch and device are unknown. NULL: out of
 * memory. */
RF__SHARED rf__columns_inputs *rf__columns_inputs_new(int64_t count);
/* Gives a complete list a number, 1 or more, which identifies it until rf__columns_inputs_remove. */
RF__SHARED int64_t rf__columns_inputs_add(rf__columns_inputs *inputs);
/* Removes the number, if any, and drops the creator's reference. NULL is allowed. */
RF__SHARED void rf__columns_inputs_remove(rf__columns_inputs *inputs);

/* Returns the list with a number, and a reference to it, or NULL. */
rf__columns_inputs *rf__columns_inputs_take(int64_t number);
/* Drops a reference. NULL is fine. */
void rf__columns_inputs_drop(rf__columns_inputs *inputs);

#endif
