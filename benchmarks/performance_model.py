"""The performance model against measured steps: python benchmarks/performance_model.py --help"""

from performance_model.__main__ import main

if __name__ == "__main__":
    main()
