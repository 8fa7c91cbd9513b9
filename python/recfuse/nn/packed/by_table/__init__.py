"""Optimizers' states by table, where tools save and load them: as without packed tables."""
