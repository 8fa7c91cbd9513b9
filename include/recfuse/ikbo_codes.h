/* Codes of linear layers. */
#ifndef RECFUSE_API_IKBO_CODES_H
#define RECFUSE_API_IKBO_CODES_H

#include "recfuse/codes.h"

/* Of the sum, in float32 (float64: in float64): name, text. GELU is x * (1 + erf(x / sqrt(2))) / 2, SiLU x /
 * (1 + exp(-x)). */
#define RF_ACTIVATION_LIST(X)     \
    X(RF_ACTIVATION_NONE, "none") \
    X(RF_ACTIVATION_RELU, "relu") \
    X(RF_ACTIVATION_GELU, "gelu") \
    X(RF_ACTIVATION_SILU, "silu")

typedef enum rf_activation { RF_ACTIVATION_LIST(RF_CODE_NAME) } rf_activation;

#endif
