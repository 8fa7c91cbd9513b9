"""A whole DLRM: the benchmark in the folder dlrm."""

from dlrm.__main__ import main

if __name__ == "__main__":
    main()
