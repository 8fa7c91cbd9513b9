"""Attention of candidates to their user's history: the benchmark in the folder ikbo_attention."""

from ikbo_attention import bench

if __name__ == "__main__":
    bench.main()
