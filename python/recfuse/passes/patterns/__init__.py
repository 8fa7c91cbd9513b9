"""Patterns of graphs, a file each. A file here is found by its `PATTERN`; nothing else lists it."""
