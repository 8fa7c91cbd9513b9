"""The operators of a step, without running it."""
