/* Checks of the arguments of ikbo_attention. */
#ifndef RECFUSE_CHECK_IKBO_ATTENTION_H
#define RECFUSE_CHECK_IKBO_ATTENTION_H

#include "core/validate.h"

/* Checks all except contents; the second: the conditions that hold before there are outputs. */
rf_status rf__check_ikbo_attention(const rf_ikbo_attention_params *params);
rf_status rf__check_ikbo_attention_sizes(const rf_ikbo_attention_params *params);

#endif
