"""Processes that tests start."""
