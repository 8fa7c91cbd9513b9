/* The entries of this family in the lists of the core: see families.h. */
RF__TORCH_OPERATOR(ikbo_attention)
RF__TORCH_OPERATOR(ikbo_attention_lse)
RF__TORCH_OPERATOR(ikbo_attention_self)
RF__TORCH_OPERATOR(ikbo_attention_self_lse)
RF__TORCH_OPERATOR(_ikbo_attention_path)
RF__TORCH_OPERATOR(_ikbo_attention_self_path)
