"""Columns of graphs: their recognition, and the call for many columns."""
