"""Reads the code of a method without running it, to prove that one call for all tables may replace it."""
