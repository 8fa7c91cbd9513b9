"""What tuning found, as small readable files."""
