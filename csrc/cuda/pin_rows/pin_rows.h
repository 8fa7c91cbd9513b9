/* Pinning without the checks of its arguments. */
#ifndef RECFUSE_CUDA_PIN_ROWS_H
#define RECFUSE_CUDA_PIN_ROWS_H

#include "cuda/driver/device.h"

/* Launches; the device's context is current. */
rf_status rf__pin_rows_launch(const rf__cuda_device *device, const rf_pin_rows_params *params, bool keep,
                              void *stream);

/* Fills the cache with every variant; needs no GPU. */
RF__SHARED rf_status rf__pin_rows_compile(const char *arch);

#endif
