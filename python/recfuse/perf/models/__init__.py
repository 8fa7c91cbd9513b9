"""Models of the cost of operators on a device and its host."""
