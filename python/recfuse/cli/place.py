"""`recfuse place`: assigns tables to several GPUs."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

from recfuse.cli.calls import quantity

_UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "": 1.0}
_MOST_BYTES, _MOST_VALUES = 32 << 20, 2_000_000


def memory(text: str) -> float:
    """Return bytes of a text such as "70GB"."""
    return quantity(text, _UNITS, "size", "70GB")


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "place",
        help="assign tables to several GPUs so that the slowest GPU takes the least time",
        description="Reads a JSON file and prints the tables, the memory and the predicted time of each GPU. "
        "The file is a list of objects, one for each table, with name, rows and dim. Optional fields: "
        "pooling (lookups of a bag), itemsize (bytes of a value) and unique (distinct rows of a step). A "
        "plan of recfuse.distributed is read too. Needs no GPU. In Python: "
        "recfuse.perf.placement.place(tables, gpus, memory), and recfuse.distributed.plan(module, ranks, "
        "batches).",
    )
    add = parser.add_argument
    add("tables", metavar="FILE", help="JSON file of the tables")
    add("--gpus", type=int, default=2, help="number of GPUs of one host (default: 2)")
    add(
        "--memory",
        type=memory,
        metavar="SIZE",
        help="memory for tables on each GPU (default: 85 %% of the memory of the GPU)",
    )
    add("--batch", type=int, default=2048, help="samples of a step on each GPU (default: 2048)")
    add("--gpu", help="name of the GPUs (default: the GPU of this machine, or H100 without a GPU)")
    add("--training", action="store_true", help="add the time of the backward pass and of the update")
    calibration = "calibration of the GPU (default: from the cache, or from the package)"
    add("--calibration", metavar="FILE", help=calibration)
    add("--json", metavar="FILE", help="write the placement to this file")
    plan = (
        "write a plan for recfuse.distributed.shard, with copies and cuts by rows and columns, to this file"
    )
    add("--plan", metavar="FILE", help=plan)
    optimizer = "class of recfuse.optim that the plan's step runs (default: SGD with --training)"
    add("--optimizer", metavar="NAME", help=optimizer)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Place the tables and print the placement."""
    from recfuse._files import read_json, write_json
    from recfuse.perf.placement import place
    from recfuse.perf.placing.plan import FORMAT, ShardPlan

    tables = read_json(arguments.tables, "recfuse place", _MOST_BYTES, _MOST_VALUES)
    if isinstance(tables, dict) and tables.get("format") == FORMAT:
        tables = [asdict(each.table) for each in ShardPlan.load(arguments.tables).tables]
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(
            f"{arguments.tables} has another form; expected a list of objects with name, rows and dim"
        )
    if arguments.plan:
        return _write_plan(arguments, tables)
    placement = place(
        tables, arguments.gpus, arguments.memory, batch=arguments.batch, gpu=arguments.gpu,
        training=arguments.training, calibration=arguments.calibration,
    )  # fmt: skip
    print(placement)
    if arguments.json:
        write_json(arguments.json, placement.to_json(), "recfuse place")
        print(f"written to {arguments.json}", file=sys.stderr)
    return 0


def _write_plan(arguments: argparse.Namespace, records: list[dict[str, Any]]) -> int:
    """Writes a plan for sharding and prints its report."""
    from recfuse.perf.choosing import choose
    from recfuse.perf.placing.plan import make_plan
    from recfuse.perf.placing.tables import check_names, table_of

    where = "recfuse place"
    tables = [table_of(record, where) for record in records]
    check_names(tables, where)
    optimizer = arguments.optimizer or ("SGD" if arguments.training else None)
    chosen = choose(arguments.gpu, arguments.calibration)
    plan = make_plan(tables, arguments.gpus, arguments.memory, arguments.batch, optimizer, chosen, where)
    print(plan.report())
    plan.save(arguments.plan)
    print(f"written to {arguments.plan}", file=sys.stderr)
    return 0
