/* Codes of lookups without pooling. */
#ifndef RECFUSE_API_FUSED_EMBEDDING_CODES_H
#define RECFUSE_API_FUSED_EMBEDDING_CODES_H

#include "recfuse/codes.h"

/* The layout of an output: features one after the other; side by side, for features whose histories are
 * equally long; side by side with padding after each history. */
#define RF_HISTORY_LAYOUT_LIST(X)  \
    X(RF_HISTORY_JAGGED, "jagged") \
    X(RF_HISTORY_JOINED, "joined") \
    X(RF_HISTORY_PADDED, "padded")
typedef enum rf_history_layout { RF_HISTORY_LAYOUT_LIST(RF_CODE_NAME) } rf_history_layout;

#endif
