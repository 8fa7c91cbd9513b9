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
 */
#define RF_OPTIMIZER_LIST(X)                  \
    X(RF_SGD, "SGD")                          \
    X(RF_ADAGRAD, "Adagrad")                  \
    X(RF_ROWWISE_ADAGRAD, "row-wise Adagrad") \
    X(RF_ADAM, "Adam")
typedef enum rf_optimizer { RF_OPTIMIZER_LIST(RF_CODE_NAME) } rf_optimizer;

/* Float32 numbers that an update reads when it runs, so that a CUDA graph uses values written after its
 * capture. */
#define RF_UPDATE_NUMBER_LIST(X)                                               \
    X(RF_UPDATE_LR, "lr")                                                      \
    X(RF_UPDATE_WEIGHT_DECAY, "weight_decay")                                  \
    X(RF_UPDATE_EPS, "eps")                                                    \
    X(RF_UPDATE_BETA1, "beta1")                                                \
    X(RF_UPDATE_BETA2, "beta2")                                                \
    X(RF_UPDATE_STEP, "step") /* of this update, from 1 */                     \
    X(RF_UPDATE_GRAD_SCALE, "grad_scale") /* gradients are multiplied by it */ \
    X(RF_UPDATE_SKIP, "skip") /* not 0: nothing changes */
typedef enum rf_update_number { RF_UPDATE_NUMBER_LIST(RF_CODE_NAME) RF_UPDATE_NUMBERS } rf_update_number;

#endif
