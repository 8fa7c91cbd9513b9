"""Shared by the benchmarks: settings, checks, timed calls, tables and reports, peers and ceilings."""
