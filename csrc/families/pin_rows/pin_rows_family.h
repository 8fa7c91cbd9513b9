/* The entries of this family in the lists of the core: see families.h. */
RF__TORCH_OPERATOR(pin_rows)
RF__TORCH_OPERATOR(unpin)
