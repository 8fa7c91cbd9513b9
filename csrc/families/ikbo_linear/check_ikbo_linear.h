/* Checks of the arguments of ikbo_linear. */
#ifndef RECFUSE_CHECK_IKBO_LINEAR_H
#define RECFUSE_CHECK_IKBO_LINEAR_H

#include "core/validate.h"

/* Checks the broadcast sum on any device, except for the contents of `parent`. */
rf_status rf__check_ikbo_add(const rf_ikbo_add_params *params);
rf_status rf__check_ikbo_linear(const rf_ikbo_linear_params *params);

#endif
