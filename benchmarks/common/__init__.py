"""What the benchmarks share: settings, checks, timed calls, tables and reports, peers and ceilings."""
