"""Operators swapped into models: ``swap`` and ``unswap``, and a file a pattern that they look for."""
