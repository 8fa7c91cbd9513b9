/* The entries of this family in the lists of the core: see families.h. */
RF__TORCH_OPERATOR(ikbo_attention)
RF__TORCH_OPERATOR(ikbo_attention_lse)
RF__TORCH_OPERATOR(ikbo_attention_self)
RF__TORCH_OPERATOR(ikbo_attention_self_lse)
RF__TORCH_OPERATOR(_ikbo_attention_path)
RF__TORCH_OPERATOR(_ikbo_attention_self_path)
RF__CHECKED_OPERATOR(ikbo_attention)
RF__CHECKED_ARGUMENT(attending_to, "cand_to_user", INDEX, BAG, "users of k", "k has no users")
RF__CHECKED_ARGUMENT(kv_lengths, "kv_lengths", RANGE, BAG, "the positions of a user of k", "")
RF__CHECKED_ARGUMENT(kv_offsets, "kv_offsets", RANGE, BAG, "the positions of k, from the offset before on",
                     "")
