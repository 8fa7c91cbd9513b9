/* The entries of this family in the lists of the core: see families.h. */
RF__TORCH_OPERATOR(pin_rows)
RF__TORCH_OPERATOR(unpin)
RF__CHECKED_OPERATOR(pin_rows)
RF__CHECKED_ARGUMENT(rows, "rows", INDEX, BAG, "rows of its table", "its table has no rows")
