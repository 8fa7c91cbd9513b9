"""A linear layer over user and candidate features: the benchmark in the folder ikbo_linear."""

from ikbo_linear.__main__ import main

if __name__ == "__main__":
    main()
