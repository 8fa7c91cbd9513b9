"""Many heterogeneous tables: the benchmark in the folder fused_embedding_bag."""

from fused_embedding_bag import bench

if __name__ == "__main__":
    bench.main()
