"""Shared by the tests of packed tables."""
