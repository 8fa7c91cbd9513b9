"""What the tests of embedding columns share: random programs and batches, and how to compare."""
