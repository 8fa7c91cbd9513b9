"""Records the operators of a step, without running it."""
