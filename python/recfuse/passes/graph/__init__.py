"""What graph passes stand on: programs of ATen operators, what may be moved in them, and how they are run."""
