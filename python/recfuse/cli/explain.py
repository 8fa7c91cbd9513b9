"""`recfuse explain`: the kernels of calls that are described by their sizes, on any GPU, without one."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from recfuse._codes import DTYPE_NAMES, INTEGER_NAMES, MODES

if TYPE_CHECKING:
    from recfuse.perf.described import DescribedCall


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    from recfuse.cli import calls

    parser = commands.add_parser(
        "explain",
        help="show the kernels that a call launches on a GPU, without running it",
        description="Prints a table of launches for each described call and each --gpu: grid, threads, "
        "shared memory, registers and occupancy where the kernel is compiled, the bytes that must pass, "
        "FLOPs, and the bound at the GPU's rates. Needs no GPU. "
        "In Python: recfuse.explain(module, *batch, gpu=...).",
    )

    def several(name: str, default: list[Any], help: str | None = None, **options: Any) -> None:
        parser.add_argument(name, nargs="+", default=default, help=help, **options)

    several("--gpu", ["H100"], "GPUs by name, or architectures (default: H100); --gpu list prints the known")
    several("--plan", [], "plans of single tables, as recfuse tune writes them", metavar="FILE")
    several("--dim", [], "a table with rows of so many elements", type=int)
    several("--dtype", ["float32"], "of the table", choices=DTYPE_NAMES)
    several("--mode", ["sum"], choices=MODES)
    several("--index", ["int64"], "of lookups and offsets", choices=INTEGER_NAMES)
    several("--batch", [2048], "bags or samples of a batch (default: 2048)", type=int)
    several("--pooling", [150], "lookups of a bag (default: 150)", type=int)
    parser.add_argument("--rows", type=int, default=500_000, help="of the table (default: %(default)s)")
    parser.add_argument("--schedule", default="", help="of the table (default: the kernel's defaults)")
    parser.add_argument("--weighted", action="store_true", help="with per-sample weights (mode sum)")
    parser.add_argument("--padded", action="store_true", help="with a padding_idx")
    parser.add_argument("--training", action="store_true", help="of columns: the gradients too")
    parser.add_argument("--compile", action="store_true", help="compile kernels that are not in the cache")
    parser.add_argument("--json", metavar="FILE", help="write the launches to a file as well")
    calls.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints a table a call and GPU."""
    from recfuse.cli.calls import described_calls, gpu_of
    from recfuse.perf.explain import known_gpus

    if arguments.gpu == ["list"]:
        for gpu in known_gpus():
            rate = gpu["bytes_per_second"] / 1e12
            sizes = f"{gpu['sms']:4} SMs {gpu['l2_bytes'] >> 20:4} MiB of L2 {rate:.2f} TB/s"
            print(f"{gpu['name']:10} {gpu['arch']:7} {sizes}")
        return 0
    for name, least in (("rows", 1), ("batch", 1), ("pooling", 0), ("dim", 1)):
        given = getattr(arguments, name)
        lowest = min(given, default=least) if isinstance(given, list) else given
        if lowest < least:
            raise ValueError(f"--{name} is {lowest}, must be >= {least}")
    calls = [*_plan_calls(arguments), *_table_calls(arguments), *described_calls(arguments)]
    if not calls:
        raise ValueError(
            "nothing to explain: give --dim, --plan FILE, --columns FILE, --ikbo-linear or --ikbo-attention"
        )
    for gpu in arguments.gpu:
        gpu_of(gpu)
    records = []
    for call, gpu in itertools.product(calls, arguments.gpu):
        launches = call.explain(gpu)
        launches = launches.compile() if arguments.compile else launches
        print(f"{call.name}\n{launches}\n")
        listed = [asdict(launch) for launch in launches]
        records.append({"call": call.name, "gpu": launches.gpu, "launches": listed})
    if arguments.json:
        from recfuse._files import write_json

        write_json(arguments.json, records, "recfuse explain")
        print(f"written to {arguments.json}", file=sys.stderr)
    return 0


def _table_calls(arguments: argparse.Namespace) -> Iterator[DescribedCall]:
    import torch

    from recfuse.perf.described import bag_call

    lists = (getattr(arguments, name) for name in ("dim", "dtype", "mode", "index", "batch", "pooling"))
    for dim, dtype, mode, index, bags, pooling in itertools.product(*lists):
        yield bag_call(
            arguments.rows, dim, dtype=getattr(torch, dtype), mode=mode, integer=getattr(torch, index),
            bags=bags, pooling=pooling, weighted=arguments.weighted and mode == "sum",
            padded=arguments.padded, schedule=arguments.schedule,
        )  # fmt: skip


def _plan_calls(arguments: argparse.Namespace) -> Iterator[DescribedCall]:
    import torch

    from recfuse.perf.described import bag_call
    from recfuse.plan import Plan

    for path in arguments.plan:
        plan = Plan.load(path)
        if not isinstance(plan, Plan):
            raise ValueError(
                f"{path}: the plan is of a collection; expected one of a single table. In Python, apply it "
                "to the collection and call recfuse.explain(collection, *batch, gpu=...)"
            )
        table, bags = plan.table, max(1, round(plan.trace.bags))
        yield bag_call(
            table.rows, table.dim, dtype=getattr(torch, table.dtype), mode=table.mode,
            integer=getattr(torch, table.indices), bags=bags, pooling=round(plan.trace.lookups / bags),
            weighted=table.weighted, padded=table.padded, schedule=plan.schedule,
        )  # fmt: skip
