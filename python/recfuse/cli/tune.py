"""`recfuse tune`: runs the tuner for a collection, or for a table that sizes and a trace describe."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from recfuse._codes import DTYPE_NAMES, INTEGER_NAMES, MODES

if TYPE_CHECKING:
    from recfuse.plan import Plan


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    from recfuse.cli import collection
    from recfuse.data.traces import HOTNESS

    parser = commands.add_parser(
        "tune",
        help="find the fastest schedules for a table or a collection, and write a plan",
        description="Measures schedules of one embedding table (--trace), or of a collection on a GPU "
        "(--collection or --workload), on this machine. Prints every decision, and writes the fastest "
        "schedules to a plan: a small JSON file for recfuse.Plan.load(FILE).apply(module) and recfuse "
        "compile --plan FILE.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    trace = (
        "indices of the lookups: a file (one index a line, or a .pt tuple of indices, offsets and lengths; "
    )
    trace += f"may be compressed as .gz), or a synthetic trace: {', '.join(HOTNESS)}"
    which.add_argument("--trace", metavar="FILE|HOTNESS", help=trace)
    collection.add_arguments(parser, which)
    add = parser.add_argument
    add("--table", type=int, metavar="N", help="number of the table in a .pt file with several tables")
    add(
        "--rows",
        type=int,
        help="rows of the table (default: the largest index of the trace plus 1, or 500000)",
    )
    add("--dim", type=int, default=128, help="dim of the table (default: %(default)s)")
    add("--dtype", choices=DTYPE_NAMES, default="float32", help="dtype of the table (default: float32)")
    add("--mode", choices=MODES, default="sum", help="mode of the table (default: sum)")
    index = "dtype of indices and offsets (default: int64)"
    add("--index", choices=INTEGER_NAMES, default="int64", help=index)
    add("--batch", type=int, help="bags of a batch (default: 2048, or the sizes of the workload)")
    add("--pooling", type=int, default=150, help="lookups of a bag (default: %(default)s)")
    batches = "number of batches from the trace or the workload (default: 16); with --collection a file in "
    add("--batches", metavar="N|FILE", help=f"{batches}which torch.save wrote {collection.BATCHES}")
    add("--budget", type=float, metavar="S", help="seconds for tuning (default: 60, for a collection 120)")
    pin = "try to pin hot rows in L2 (default: if the trace is skewed and its rows do not fit in L2)"
    add("--pin", action=argparse.BooleanOptionalAction, help=pin)
    add("--seed", type=int, default=0, help="seed of random lookups (default: 0)")
    predict = (
        "measure only the third of the warps, stations and distances that a model predicts to be fastest"
    )
    add("--predict", action="store_true", help=predict)
    add("--device", help="cpu, cuda or cuda:N (default: cuda if available)")
    add("--out", metavar="FILE", help="file of the plan (default: the plan is only printed)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Tune, print the plan and write it."""
    import torch

    from recfuse import timing
    from recfuse.cli import collection
    from recfuse.tuner import tune

    _check_counts(arguments)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"--device is {device!r}; expected cpu, cuda or cuda:N") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device is {device!r}, but torch {torch.__version__} finds no CUDA device here")
    module, batches = (_table if arguments.trace else collection.problem_of)(arguments, device)
    if arguments.out:  # check before the measurements, which take a minute
        _check_writable(arguments.out)
    options = {"pin": arguments.pin, "seed": arguments.seed, "resume": arguments.resume,
               "predict": arguments.predict}  # fmt: skip
    load = timing.other_load_since()
    plan = tune(module, batches, arguments.budget, **options)
    print(plan)
    if warning := timing.disturbance(load()):
        print(f"recfuse tune: warning: {warning}", file=sys.stderr)
    if arguments.out:
        _save(plan, arguments.out)
        print(f"written to {arguments.out}", file=sys.stderr)
    return 0


def _check_counts(arguments: argparse.Namespace) -> None:
    names = ["rows", "dim", "batch", "pooling"] + ["batches"] * (not arguments.collection)
    for name in names:
        value = getattr(arguments, name)
        if value is not None and (not str(value).lstrip("-").isdecimal() or int(value) < 1):
            raise ValueError(f"--{name} is {value}; expected >= 1")


def _table(arguments: argparse.Namespace, device: str) -> tuple[Any, list[Any]]:
    """Return the table, and batches cut out of the trace."""
    import torch

    from recfuse import nn
    from recfuse.data import traces

    trace, rows = _trace(arguments)
    batch, number = arguments.batch or 2048, int(arguments.batches or 16)
    cuts = [traces.bags(trace, batch, arguments.pooling, at) for at in range(number)]
    integer = getattr(torch, arguments.index)
    batches = [
        tuple(torch.from_numpy(array).to(device, integer) for array in (indices, offsets))
        for indices, offsets in cuts
    ]
    dtype = getattr(torch, arguments.dtype)
    return nn.EmbeddingBag(rows, arguments.dim, mode=arguments.mode, dtype=dtype, device=device), batches


def _trace(arguments: argparse.Namespace) -> tuple[Any, int]:
    """Return the indices of the trace, and the number of rows of the table."""
    from recfuse.data import traces

    if arguments.trace in traces.HOTNESS:
        rows = arguments.rows or 500_000
        return traces.generate(arguments.trace, rows=rows, seed=arguments.seed), rows
    if not os.path.exists(arguments.trace):
        raise ValueError(
            f"--trace is {arguments.trace!r}, which is neither a file nor one of {', '.join(traces.HOTNESS)}"
        )
    trace = traces.read(arguments.trace, arguments.table)
    needed = int(trace.max()) + 1 if len(trace) else 0
    rows = arguments.rows or needed
    if rows < needed:
        raise ValueError(f"--rows is {rows}, but the trace has row {needed - 1}")
    return trace, rows


def _save(plan: Plan, path: str) -> None:
    """Write the plan. If that fails, writes it to a temporary file, so that the measurements
    are not lost.
    """
    try:
        plan.save(path)
    except OSError as error:
        folder = tempfile.mkdtemp(prefix="recfuse_")
        other = os.path.join(folder, "plan.json")
        try:
            plan.save(other)
        except OSError:
            os.rmdir(folder)
            raise error from None
        raise OSError(f"--out is not written ({error}), and the plan is in {other} instead") from error


def _check_writable(path: str) -> None:
    if os.path.isdir(path):
        raise ValueError(f"--out is {path!r}, which is a folder; expected a file")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ValueError(f"--out is {path!r}, and the folder {folder!r} is missing or not writable")
