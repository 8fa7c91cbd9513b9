"""Measures a device, so that steps on it can be predicted."""
