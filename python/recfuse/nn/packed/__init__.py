"""What modules with packed tables stand on: a few Parameters, and tables that are ranges of their rows."""
