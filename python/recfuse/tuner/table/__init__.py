"""The tuner of a single table."""
