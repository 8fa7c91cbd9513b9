/* Checks of the arguments of the embedding bag. */
#ifndef RECFUSE_CHECK_EMBEDDING_BAG_H
#define RECFUSE_CHECK_EMBEDDING_BAG_H

#include "core/validate.h"

/* Checks the whole params struct of the operator of one table, for pointers of any device. */
rf_status rf__check_embedding_bag(const rf_embedding_bag_params *params);

#endif
