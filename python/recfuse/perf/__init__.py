"""Predicts launches, time and memory of calls on a GPU, without running them."""
