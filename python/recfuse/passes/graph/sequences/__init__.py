"""Histories of graphs: their calls, parts of a KeyedJaggedTensor, and masks of padding."""
