"""Many heterogeneous tables: the benchmark in the folder fused_embedding_bag."""

from fused_embedding_bag.__main__ import main

if __name__ == "__main__":
    main()
