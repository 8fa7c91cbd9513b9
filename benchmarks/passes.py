"""Graph passes on plain models: the benchmark in the folder passes."""

from passes import bench

if __name__ == "__main__":
    bench.main()
