/* The entries of this family in the lists of the core: see families.h. */
RF__TORCH_OPERATOR(ikbo_linear)
RF__TORCH_OPERATOR(ikbo_linear_chain)
RF__TORCH_OPERATOR(_ikbo_linear_path)
RF__TORCH_OPERATOR(_ikbo_linear_chain_path)
RF__CHECKED_OPERATOR(ikbo_linear)
RF__CHECKED_OPERATOR(ikbo_linear_chain)
RF__CHECKED_ARGUMENT(cand_to_user, "cand_to_user", INDEX, BAG, "items of x_user", "x_user has no items")
RF__CHECKED_ARGUMENT(maps, "maps", INDEX, LIST, "items of the level before", "the level before has no items")
