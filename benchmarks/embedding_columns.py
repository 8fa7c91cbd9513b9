"""Embedding columns, from raw values to pooled rows: the benchmark in the folder embedding_columns."""

from embedding_columns import bench

if __name__ == "__main__":
    bench.main()
