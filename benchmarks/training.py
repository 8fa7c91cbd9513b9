"""Training steps: the benchmark in the folder training."""

from training.__main__ import main

if __name__ == "__main__":
    main()
