"""Shared by the tests of embedding columns in C."""
