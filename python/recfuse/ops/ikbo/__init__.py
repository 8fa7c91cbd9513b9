"""What the IKBO operators share, and their gradients."""
