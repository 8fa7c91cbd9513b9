"""Graph passes: the benchmark in the folder passes."""

from passes.__main__ import main

if __name__ == "__main__":
    main()
