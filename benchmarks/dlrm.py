"""A whole DLRM: the benchmark in the folder dlrm."""

from dlrm import bench

if __name__ == "__main__":
    bench.main()
