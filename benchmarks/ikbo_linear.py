"""A linear layer over users and candidates: the benchmark in the folder ikbo_linear."""

from ikbo_linear import bench

if __name__ == "__main__":
    bench.main()
