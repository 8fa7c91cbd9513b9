"""The contribution of each part of recfuse: the ablations of all families, in one result file.

A row names a part and a cell of a page, and has the medians of the call with and without the part, measured
in turns as CUDA graphs. Outputs are first compared with float64. One family: python benchmarks/FAMILY.py
ablation --device cuda.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from common.ablation import NAME
from common.registry import Flag
from common.report import Report
from common.settings import comma_list, positive

FAMILIES = {
    "training": NAME, "ikbo_linear": NAME, "fused_embedding_bag": NAME, "embedding_bag": NAME,
    "ikbo_attention": NAME, "embedding_columns": "ablations",
}  # fmt: skip
"""Folder -> name of the figure."""


def main() -> None:
    """Measures family by family; rewrites the JSON file after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda"], help="default: cuda")
    parser.add_argument("--families", type=comma_list, default=list(FAMILIES), help="default: all")
    parser.add_argument("--rounds", type=positive, default=5, help="samples of each call (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and every sample")
    parser.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    parser.add_argument("--quick", action="store_true", help="a trial run: its figures are not to be quoted")
    arguments = parser.parse_args()
    Flag("--families", comma_list, None, "", allowed=FAMILIES).check(parser, arguments.families)
    report = Report(arguments)
    options = ["--device", arguments.device, "--rounds", str(arguments.rounds)]
    for family in arguments.families:
        bench = import_module(family).bench
        flags = [FAMILIES[family], *options, *(["--quick"] if arguments.quick else [])]
        for _, figure in bench.figures_of(*bench.parse(flags)):
            tables = [replace(table, title=f"{family}: {table.title}") for table in figure.tables]
            report.add(family, tables, figure.record)


if __name__ == "__main__":
    main()
