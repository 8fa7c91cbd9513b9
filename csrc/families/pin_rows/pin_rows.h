/* Pinning rows in L2, lowered. */
#ifndef RECFUSE_CUDA_PIN_ROWS_H
#define RECFUSE_CUDA_PIN_ROWS_H

#include "gpu/launches/launches.h"

/* Lowers a call with checked params. */
rf_status rf__pin_rows_lower(const rf_pin_rows_params *params, bool pins, rf__launches *launches);

#endif
