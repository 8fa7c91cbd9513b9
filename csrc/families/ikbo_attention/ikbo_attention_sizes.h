/* The contents of ikbo_attention's arguments, read on the host:
 * csrc/families/ikbo_attention/ikbo_attention_cpu.c. */
#ifndef RECFUSE_IKBO_ATTENTION_H
#define RECFUSE_IKBO_ATTENTION_H

#include "recfuse.h"

/* Checks cand_to_user, kv_lengths and kv_offsets, also if check_bounds is off: host code reads memory by
 * them. RF_ERR_INDEX, RF_ERR_VALUE. */
rf_status rf__ikbo_attention_check_contents(const rf_ikbo_attention_params *params);

/* A user's keys: first position, within the user or, if they are jagged, among all; and their number. */
typedef struct rf__ikbo_keys {
    int64_t first, count;
} rf__ikbo_keys;
rf__ikbo_keys rf__ikbo_attention_keys(const rf_ikbo_attention_params *params, int64_t user);

/* Groups candidates by user, in their order: those of user u are order[starts[u]] to order[starts[u + 1] -
 * 1]. starts: [n_users + 1], order: [candidates.count]; contents are good. */
void rf__ikbo_attention_group(const rf_ikbo_attention_params *params, int64_t *starts, int64_t *order);

#endif
