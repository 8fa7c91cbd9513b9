/* ikbo_attention on a GPU: the fused kernel's choice and lowering, and the facts that its two paths share. */
#ifndef RECFUSE_CUDA_IKBO_ATTENTION_H
#define RECFUSE_CUDA_IKBO_ATTENTION_H

#include "gpu/launches/launches.h"
#include "families/ikbo_attention/attention_keys_args.h"

/* Sets the error word of launches: that of all calls with these heads, kv_heads and dim. Keys have another
 * address in each call, layers the same shape. Launches raise earlier errors of these calls first. */
void rf__ikbo_attention_errors(const rf_ikbo_attention_params *params, rf__launches *launches);

/* Returns the positions of a call's keys, for kernels; `pitch`: positions between users. */
rf_attention_users rf__attention_users_of(const rf_ikbo_attention_params *params, int64_t pitch);

/* Returns the bytes of kv_lengths and kv_offsets; of these and of cand_to_user. */
int64_t rf__attention_length_bytes(const rf_attention_users *keys);
int64_t rf__attention_map_bytes(const rf_ikbo_attention_params *params);

/* Keys of a block and slots of the two rings, by the columns that the kernel computes with: as many as
 * registers and shared memory allow. */
typedef struct rf__attention_shape {
    int32_t dim, keys, k_slots, v_slots;
} rf__attention_shape;

/* Returns NULL if there is no shape for heads of this many columns. */
const rf__attention_shape *rf__attention_shape_of(int64_t dim);
int32_t rf__attention_shared_bytes(const rf__attention_shape *shape);

/* Returns true if users have queries. */
bool rf__attention_has_self(const rf_ikbo_attention_params *params);
/* Returns true if k and v have one user for tensor maps: they are jagged, or the same for all users. */
bool rf__attention_has_one_user(const rf_ikbo_attention_params *params);
/* Returns the rows that an item gives to one head of keys. */
int64_t rf__attention_item_rows(const rf_ikbo_attention_params *params, const rf_ikbo_queries *queries);
/* Returns an upper bound of the tiles: each user's last tile may be short. */
int64_t rf__attention_tiles(const rf_ikbo_attention_params *params);

/* Lowers a call that rf_ikbo_attention_takes: ikbo_attention_group.cu, then ikbo_attention_fused.cu. */
rf_status rf__ikbo_attention_lower(const rf__gpu *gpu, const rf_ikbo_attention_params *params,
                                   rf__launches *launches);

#endif
