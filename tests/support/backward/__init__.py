"""Shared by the tests of gradients and updates on a GPU."""
