"""Embedding columns: bucketize, hash and look up hundreds of features, in one call or a call each."""
