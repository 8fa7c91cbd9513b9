"""Attention of candidates to their user's history: the benchmark in the folder ikbo_attention."""

from ikbo_attention.__main__ import main

if __name__ == "__main__":
    main()
