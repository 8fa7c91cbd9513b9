"""The operators of quantised tables."""
