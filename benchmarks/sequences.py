"""Histories without pooling: the benchmark in the folder sequences."""

from sequences import bench

if __name__ == "__main__":
    bench.main()
