"""Compares many random programs of columns with their reference, more than the tests do.

``PYTHONPATH=python:tests python tests/columns/many_programs.py 100000``. Program n has seed n, so that a
failing program can be repeated.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from random import Random

import torch
from tqdm import tqdm

from support.columns.compare import check_case
from support.columns.random_programs import random_case


def main() -> None:
    """Runs them, and prints how they ended; raises at the first that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first")
    parser.add_argument("--gradients", type=int, default=4, help="of every so many also the gradients")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ends: Counter[str] = Counter()
    for seed in tqdm(range(arguments.first, arguments.first + arguments.count), mininterval=10):
        draw = Random(seed)
        try:
            ends[check_case(random_case(draw), draw, seed % arguments.gradients == 0)] += 1
        except Exception as error:
            raise SystemExit(f"program {seed}: {type(error).__name__}: {error}") from error
    print(dict(ends))


if __name__ == "__main__":
    main()
