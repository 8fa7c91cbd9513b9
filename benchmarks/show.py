"""Print the tables of result files as Markdown: python benchmarks/show.py benchmarks/results/*.json"""

from __future__ import annotations

import argparse
from pathlib import Path

from common.results import read_runs
from common.table import Table


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="written by a benchmark's --json")
    for path in parser.parse_args().files:
        try:
            runs = read_runs(path)
        except ValueError as error:
            parser.error(str(error))
        for run in runs:
            print(f"`{run['environment']['command']}`\n")
            for table in run["tables"]:
                print(Table(**table).markdown())


if __name__ == "__main__":
    main()
