"""One large table: the benchmark in the folder embedding_bag."""

from embedding_bag import bench

if __name__ == "__main__":
    bench.main()
