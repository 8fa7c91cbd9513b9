"""Modules that look up rows of packed tables, without pooling."""
