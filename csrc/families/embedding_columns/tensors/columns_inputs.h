/* Inputs of embedding columns by their addresses. csrc/python reads addresses from tensors into a list, and csrc/torch takes a list by its
 * number: an operator takes no address from its caller. */
#ifndef RECFUSE_COLUMNS_INPUTS_H
#define RECFUSE_COLUMNS_INPUTS_H

#include "core/status.h"

/* One batch's inputs, dense ones first. Whoever makes it owns a reference, and keeps the tensors as long as that. */
typedef struct rf__columns_inputs {
    struct rf__columns_inputs *next, *previous; /* of the lists that have numbers */
    int64_t number, references; /* the lock of columns_inputs.c guards all up to here */
    int64_t batch, count;
    int32_t on_gpu, device; /* whether on a GPU, and which */
    rf_column_input rows[]; /* [count] */
} rf__columns_inputs;

/* A list of `count` zeroed inputs, without a number. NULL: no memory. */
RF__SHARED rf__columns_inputs *rf__columns_inputs_new(int64_t count);
/* Gives a list that is complete its number, 1 or more, by which it is found until rf__columns_inputs_remove. */
RF__SHARED int64_t rf__columns_inputs_add(rf__columns_inputs *inputs);
/* Takes the number away where there is one, and drops the maker's reference. NULL is fine. */
RF__SHARED void rf__columns_inputs_remove(rf__columns_inputs *inputs);

/* The list with a number, and a reference to it; NULL: there is none. */
rf__columns_inputs *rf__columns_inputs_take(int64_t number);
/* Drops a reference. NULL is fine. */
void rf__columns_inputs_drop(rf__columns_inputs *inputs);

#endif
