"""One large table: the benchmark in the folder embedding_bag."""

from embedding_bag.__main__ import main

if __name__ == "__main__":
    main()
