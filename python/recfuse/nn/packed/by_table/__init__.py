"""Optimizers' states by table, as without packed tables, for tools that save and load them."""
