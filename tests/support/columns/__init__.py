"""Shared by the tests of embedding columns: random programs and batches, and comparisons."""
