"""Collections of quantised tables."""
