"""The base of graph passes: programs of ATen operators, their effects, and the runs of patterns."""
