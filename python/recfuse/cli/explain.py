"""`recfuse explain`: shows the kernels of calls that are described by their sizes, for any GPU,
without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import asdict
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    from recfuse.cli import calls

    parser = commands.add_parser(
        "explain",
        help="show the kernels that a call launches on a GPU, without running it",
        description="Prints a table of launches for each call that the options describe and each --gpu: "
        "grid, threads, shared memory, least bytes, FLOPs, and the bound at the GPU's rates. Registers and "
        "occupancy follow for kernels that are compiled. Needs no GPU. "
        "In Python: recfuse.explain(module, *batch, gpu=...).",
    )
    gpus = "names of GPUs, or architectures (default: H100); --gpu list prints the known GPUs"
    parser.add_argument("--gpu", nargs="+", default=["H100"], help=gpus)
    parser.add_argument("--compile", action="store_true", help="compile kernels that are not in the cache")
    parser.add_argument("--json", metavar="FILE", help="write the launches to this file")
    calls.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a table per call and GPU."""
    from recfuse.cli import calls
    from recfuse.perf.explain import known_gpus

    if arguments.gpu == ["list"]:
        for gpu in known_gpus():
            rate = gpu["bytes_per_second"] / 1e12
            sizes = f"{gpu['sms']:4} SMs {gpu['l2_bytes'] >> 20:4} MiB of L2 {rate:.2f} TB/s"
            print(f"{gpu['name']:10} {gpu['arch']:7} {sizes}")
        return 0
    calls.check(arguments, "explain")
    for gpu in arguments.gpu:
        calls.gpu_of(gpu)
    from recfuse.cli.described_calls import described_calls
    from recfuse.plan import Plan

    plans = {path: Plan.load(path) for path in arguments.plan}
    records = []
    for call, gpu in itertools.product(described_calls(arguments, plans, any_batch=False), arguments.gpu):
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
