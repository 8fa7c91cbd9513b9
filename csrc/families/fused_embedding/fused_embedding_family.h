/* The entries of this family in the lists of the core: see families.h. */
RF__TORCH_OPERATOR(fused_embedding)
RF__TORCH_OPERATOR(_fused_embedding_rows)
RF__CODES(history_layout, RF_HISTORY_LAYOUT_LIST)
RF__CHECKED_OPERATOR(fused_embedding)
RF__CHECKED_ARGUMENT(history, "history", INDEX, BAG, "rows of its table", "its table has no rows")
RF__CHECKED_ARGUMENT(history_offsets, "offsets", RANGE, BAG,
                     "since it repeats another offset, or the sizes on the host", "")
