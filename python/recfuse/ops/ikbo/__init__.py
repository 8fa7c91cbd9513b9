"""Common code of the IKBO operators, and their gradients."""
