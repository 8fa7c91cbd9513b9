"""Training steps: the benchmark in the folder training."""

from training import bench

if __name__ == "__main__":
    bench.main()
