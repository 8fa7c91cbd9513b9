/* Checks of the arguments of gradients and updates. `operator_name` opens every message. */
#ifndef RECFUSE_CHECK_BACKWARD_H
#define RECFUSE_CHECK_BACKWARD_H

#include "core/validate.h"

/* Checks the whole params struct of a weight's gradient, except for the contents of offsets and indices. */
rf_status rf__check_fused_backward(const char *operator_name, const rf_fused_backward_params *params);
/* The two parts of it: all but features; and one feature, by number, of the weight. */
rf_status rf__check_backward_sizes(const char *operator_name, const rf_fused_backward_params *params);
rf_status rf__check_backward_feature(const char *operator_name, const rf_fused_backward_params *params,
                                     int64_t at);

/* Checks a code of an optimizer. */
rf_status rf__check_optimizer(const char *operator_name, int64_t optimizer);
/* Check the whole params structs of updates, except for the contents of indices, offsets, rows and
 * numbers. */
rf_status rf__check_fused_update(const char *operator_name, const rf_fused_update_params *params);
rf_status rf__check_rows_update(const char *operator_name, const rf_rows_update_params *params);
/* The gradient that the update of one matrix follows, in float32. */
rf_fused_backward_params rf__fused_update_gradient(const rf_fused_update_params *params, int64_t matrix);

#endif
