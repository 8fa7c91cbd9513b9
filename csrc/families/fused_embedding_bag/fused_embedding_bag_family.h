/* The entries of this family in the lists of the core: see families.h. */
RF__TORCH_OPERATOR(fused_embedding_bag)
RF__PYTHON_FUNCTION(fused_embedding_bag_candidates)
RF__PYTHON_FUNCTION(fused_embedding_bag_lower)
RF__PYTHON_FUNCTION(fused_embedding_bag_measure)
RF__PYTHON_FUNCTION(fused_embedding_bag_describe)
RF__PYTHON_FUNCTION(fused_embedding_bag_map)
RF__CODES(fused_kind, RF_FUSED_KIND_LIST)
RF__CHECKED_OPERATOR(fused_embedding_bag)
