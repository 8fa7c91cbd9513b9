/* The steps of optimizers, written once for the host and for kernels, and the facts that both read of RF_OPTIMIZER_LIST.
 * Included as "families/fused_backward/device/optimizer_steps.h"; RF_OPTIMIZER_STEP is expanded where a row is updated.
 *
 * To add an optimizer, add a line to RF_OPTIMIZER_LIST and its step below. */
#ifndef RECFUSE_OPTIMIZER_STEPS_H
#define RECFUSE_OPTIMIZER_STEPS_H

#include "recfuse/update_codes.h"

#ifdef __CUDACC__
#define RF_OPTIMIZER_FACT static constexpr __device__ __forceinline__
#else
#define RF_OPTIMIZER_FACT static inline
#endif

/* Facts of an optimizer by its code; 0 of a code that is none, as where gradients are written. */
#define RF_COLUMN_STATES(code, name, columns, ...) optimizer == (int)code ? columns:
RF_OPTIMIZER_FACT int rf_optimizer_column_states(int optimizer) {
    return RF_OPTIMIZER_LIST(RF_COLUMN_STATES) 0;
}
#define RF_ROW_STATES(code, name, columns, rows, ...) optimizer == (int)code ? rows:
RF_OPTIMIZER_FACT int rf_optimizer_row_states(int optimizer) { return RF_OPTIMIZER_LIST(RF_ROW_STATES) 0; }
#define RF_STEP_COUNTS(code, name, columns, rows, counts, ...) optimizer == (int)code ? counts:
RF_OPTIMIZER_FACT int rf_optimizer_counts(int optimizer) { return RF_OPTIMIZER_LIST(RF_STEP_COUNTS) 0; }
#define RF_OPERATIONS(code, name, columns, rows, counts, operations, ...) optimizer == (int)code ? operations:
RF_OPTIMIZER_FACT int rf_optimizer_operations(int optimizer) { return RF_OPTIMIZER_LIST(RF_OPERATIONS) 0; }

/* The step on the weight `w` by the gradient `g`, with the states `first` and `second` of the same columns, of which an optimizer
 * has as many as the list says. All are numbers, or vectors of them. `optimizer` is a constant. Numbers of the update
 * come from macros of the file that expands it:
 *     RF_STEP_LR, RF_STEP_EPS          lr, eps
 *     RF_STEP_RATE1, RF_STEP_RATE2     1 - beta1, 1 - beta2
 *     RF_STEP_CORRECTED_LR             lr * sqrt(1 - beta2^step) / (1 - beta1^step)
 *     RF_STEP_ROOT(x), RF_STEP_QUOTIENT(x, y)
 *     RF_STEP_BY_ROW(g)                lr * g / (sqrt(the state of the row, with this step) + eps) */
#define RF_OPTIMIZER_STEP(optimizer, w, g, first, second)                                                   \
    do {                                                                                                    \
        if ((optimizer) == RF_SGD) (w) = (w) - RF_STEP_LR * (g);                                            \
        if ((optimizer) == RF_ROWWISE_ADAGRAD) (w) = (w) - RF_STEP_BY_ROW(g);                               \
        if ((optimizer) == RF_ADAGRAD) {                                                                    \
            (first) += (g) * (g);                                                                           \
            (w) = (w) - RF_STEP_QUOTIENT(RF_STEP_LR * (g), RF_STEP_ROOT(first) + RF_STEP_EPS);              \
        }                                                                                                   \
        if ((optimizer) == RF_ADAM) {                                                                       \
            (first) += RF_STEP_RATE1 * ((g) - (first));                                                     \
            (second) += RF_STEP_RATE2 * ((g) * (g) - (second));                                             \
            (w) =                                                                                           \
                (w) - RF_STEP_QUOTIENT(RF_STEP_CORRECTED_LR * (first), RF_STEP_ROOT(second) + RF_STEP_EPS); \
        }                                                                                                   \
    } while (0)

#endif
