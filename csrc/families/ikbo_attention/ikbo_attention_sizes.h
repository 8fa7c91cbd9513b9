/* What the contents of ikbo_attention's arguments say, read on the host: csrc/families/ikbo_attention/ikbo_attention_cpu.c. */
#ifndef RECFUSE_IKBO_ATTENTION_H
#define RECFUSE_IKBO_ATTENTION_H

#include "recfuse.h"

/* Checks cand_to_user, kv_lengths and kv_offsets, whether check_bounds is on or not: what is computed by them here reads
 * memory by them. RF_ERR_INDEX, RF_ERR_VALUE. */
rf_status rf__ikbo_attention_check_contents(const rf_ikbo_attention_params *params);

/* A user's keys: position `first` of it, or of all of them where they are jagged, and how many. */
typedef struct rf__ikbo_keys {
    int64_t first, count;
} rf__ikbo_keys;
rf__ikbo_keys rf__ikbo_attention_keys(const rf_ikbo_attention_params *params, int64_t user);

/* Groups candidates by user, in their order: those of user u are order[starts[u]] to order[starts[u + 1] - 1]. starts:
 * [n_users + 1], order: [candidates.count]; contents are good. */
void rf__ikbo_attention_group(const rf_ikbo_attention_params *params, int64_t *starts, int64_t *order);

#endif
