"""Patterns of graphs. Each file defines a `PATTERN`, by which it is found; there is no other list."""
