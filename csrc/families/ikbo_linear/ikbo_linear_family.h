/* The entries of this family in the lists of the core: see families.h. */
RF__TORCH_OPERATOR(ikbo_linear)
RF__TORCH_OPERATOR(ikbo_linear_chain)
RF__TORCH_OPERATOR(_ikbo_linear_path)
RF__TORCH_OPERATOR(_ikbo_linear_chain_path)
