"""Tuning one table."""
