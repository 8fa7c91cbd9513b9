"""Operators swapped into models."""
