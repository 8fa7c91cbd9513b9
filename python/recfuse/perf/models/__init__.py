"""What operators cost a device and its host."""
