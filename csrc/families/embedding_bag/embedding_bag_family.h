/* The entries of this family in the lists of the core: see families.h. */
RF__TORCH_OPERATOR(embedding_bag)
RF__TORCH_OPERATOR(_embedding_bag)
RF__TORCH_OPERATOR(_embedding_bag_gradient)
RF__PYTHON_FUNCTION(embedding_bag_lower)
RF__PYTHON_FUNCTION(embedding_bag_measure)
RF__CODES(station, RF_STATION_LIST)
RF__CHECKED_OPERATOR(embedding_bag)
