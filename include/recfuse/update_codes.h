/* Codes of fused optimizers. */
#ifndef RECFUSE_API_UPDATE_CODES_H
#define RECFUSE_API_UPDATE_CODES_H

#include "recfuse/codes.h"

/* Only rows with a lookup that counts change, and so do their states. With w the row as float32, s the
 * float32 sum of its gradients, and all other values from rf_update_number: g = s * GRAD_SCALE + WEIGHT_DECAY
 * * w, then
 *   RF_SGD              w -= LR * g
 *   RF_ADAGRAD          sum += g^2; w -= LR * g / (sqrt(sum) + EPS)           (torch.optim.Adagrad, sparse
 *   gradients)
 *   RF_ROWWISE_ADAGRAD  sum += mean(g^2), a number per row; w as above         (FBGEMM's
 *   EXACT_ROWWISE_ADAGRAD)
 *   RF_ADAM             m += (1 - BETA1) * (g - m); v += (1 - BETA2) * (g^2 - v);
 *                       w -= LR * sqrt(1 - BETA2^STEP) / (1 - BETA1^STEP) * m / (sqrt(v) + EPS)
 *                       (torch.optim.SparseAdam)
 * On a GPU roots and quotients of w's steps may be off by two units in the last place. A gradient that is not
 * finite affects only its own row.
 *
 * X(code, name in recfuse.optim, states [rows, dim], states [rows], whether the step depends on STEP, operations
 * per element, names of the states in torch between spaces, type of the entry "step" in states of torch:
 * "tensor", "int" or ""). csrc/families/fused_backward/device/optimizer_steps.h has the steps.
 */
#define RF_OPTIMIZER_LIST(X)                                             \
    X(RF_SGD, "SGD", 0, 0, 0, 2, "", "")                                 \
    X(RF_ADAGRAD, "Adagrad", 1, 0, 0, 6, "sum", "tensor")                \
    X(RF_ROWWISE_ADAGRAD, "RowWiseAdagrad", 0, 1, 0, 4, "sum", "tensor") \
    X(RF_ADAM, "Adam", 2, 0, 1, 12, "exp_avg exp_avg_sq", "int")
typedef enum rf_optimizer { RF_OPTIMIZER_LIST(RF_CODE_NAME) RF_OPTIMIZERS } rf_optimizer;

/* Float32 numbers that an update reads when it runs, so that a CUDA graph uses values written after its
 * capture. X(code, name, least, end): bounds of the argument of that name, if there is one: at least `least`,
 * and less than `end`; an end of 0: no bound. */
#define RF_UPDATE_NUMBER_LIST(X)                                                     \
    X(RF_UPDATE_LR, "lr", 0, 0)                                                      \
    X(RF_UPDATE_WEIGHT_DECAY, "weight_decay", 0, 0)                                  \
    X(RF_UPDATE_EPS, "eps", 0, 0)                                                    \
    X(RF_UPDATE_BETA1, "beta1", 0, 1)                                                \
    X(RF_UPDATE_BETA2, "beta2", 0, 1)                                                \
    X(RF_UPDATE_STEP, "step", 1, 0) /* of this update, from 1 */                     \
    X(RF_UPDATE_GRAD_SCALE, "grad_scale", 0, 0) /* gradients are multiplied by it */ \
    X(RF_UPDATE_SKIP, "skip", 0, 0) /* not 0: nothing changes */
typedef enum rf_update_number { RF_UPDATE_NUMBER_LIST(RF_CODE_NAME) RF_UPDATE_NUMBERS } rf_update_number;

#endif
