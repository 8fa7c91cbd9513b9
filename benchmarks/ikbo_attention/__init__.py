"""Attention of candidates over the keys and values of their user, against its peers."""
