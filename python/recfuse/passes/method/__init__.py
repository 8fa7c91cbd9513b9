"""A method's own code, read without running it: what one call for all tables may take the place of."""
