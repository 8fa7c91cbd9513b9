"""Batches and where they come from: forms of batches, traces, workloads."""
