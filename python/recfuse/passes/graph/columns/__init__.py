"""Columns of graphs: how they are found, and the call for many of them."""
