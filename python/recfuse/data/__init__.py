"""Batches and their sources: forms of batches, strings, traces, workloads."""

from recfuse.data.strings import StringLists, hash_string_lists, hash_strings

__all__ = ["StringLists", "hash_string_lists", "hash_strings"]
