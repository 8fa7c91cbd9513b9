"""The performance model against measured steps: the benchmark in the folder performance_model."""

from performance_model import bench

if __name__ == "__main__":
    bench.main()
