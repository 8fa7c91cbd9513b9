"""Tuning a collection of tables."""
