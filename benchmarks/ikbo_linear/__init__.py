"""A linear layer over user and candidate features: the user's part once, or once a candidate."""
