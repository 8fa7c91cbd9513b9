"""The tuner of a collection of tables."""
