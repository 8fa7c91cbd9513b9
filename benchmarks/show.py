"""Print the tables of result files as Markdown: python benchmarks/show.py benchmarks/results/*.json"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from common.table import Table


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="written by a benchmark's --json")
    for path in parser.parse_args().files:
        try:
            record = json.loads(path.read_text())
            tables = [Table(**table) for table in record["tables"]]
            environment = record["environment"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"{path}: not a result file of these benchmarks ({error})")
        print(f"`{environment['command']}`\n")
        for table in tables:
            print(table.markdown())


if __name__ == "__main__":
    main()
