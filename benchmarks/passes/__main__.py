"""Graph passes: plain models eager, compiled, compiled with recfuse.backend(), and written by hand.

"bags": many tables of torch.nn.EmbeddingBag before one cat. "ranking": a user tower, candidates of each user,
linear compression and target attention; nothing in it says recfuse. "E" and "F": RECom's models, column by
column, against recfuse.nn.EmbeddingColumns. All candidates hold the same weights, run in turns on the same
batches, in inference mode, and their outputs are compared; on a GPU as CUDA graphs and as called.

"pass": seconds of recfuse.backend() alone, for a graph of many columns of several kinds and any batch;
torch.compile's own time is apart.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import recfuse
from common.checks import check_agreement, relative_error
from common.report import Report
from common.settings import check_choices, comma_list, make_parser, positive, start
from common.table import Table
from passes.columns import measure_columns
from passes.measure import measure_forms
from passes.models import Problem, bags, ranking
from recfuse import timing

EAGER, COMPILED, PASSED, BY_HAND = "eager", "torch.compile", "recfuse.backend()", "by hand, compiled"
FIGURES = ("bags", "ranking", "E", "F", "pass")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2}
# Flags whose defaults depend on the device.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"tables": 100, "rows": 100_000, "batch": 256, "users": 4, "large_rows": 2**18},
    "cuda": {"tables": 1000, "rows": 500_000, "batch": 512, "users": 32, "large_rows": 2**23},
}


def parse_arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line, checked."""
    parser = make_parser(__doc__, rounds=21)
    add = parser.add_argument
    add("--figures", type=comma_list, default=list(FIGURES), help=f"of {', '.join(FIGURES)} (default: all)")
    add("--tables", type=positive, help="of bags (default: 100; on a GPU 1000)")
    add("--rows", type=positive, help="of each table (default: 100000; on a GPU 500000)")
    add("--dim", type=positive, default=16, help="of each table (default: 16)")
    add("--batch", type=positive, help="samples of bags (default: 256; on a GPU 512)")
    add("--lookups", type=positive, default=8, help="of each bag (default: 8)")
    add("--users", type=positive, help="of ranking (default: 4; on a GPU 32)")
    add("--ratio", type=positive, default=70, help="candidates of each (default: 70)")
    add("--columns", type=positive, default=1000, help="of the graph whose pass is timed (default: 1000)")
    add("--samples", type=positive, default=256, help="of E and F (default: 256)")
    add("--part", type=positive, default=1, help="every n-th column of E and F (default: 1, all)")
    add("--large-rows", type=positive, help="of their large tables (default: 2^18; on a GPU 2^23)")
    add("--num-batches", type=positive, default=4, help="batches to rotate through (default: 4)")
    arguments = parser.parse_args()
    start(parser, arguments)
    check_choices(parser, {"--figures": (arguments.figures, FIGURES)})
    for name, value in DEFAULTS[arguments.device].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return parser, arguments


def measure(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, problem: Problem
) -> tuple[Table, timing.Comparison]:
    """All forms of one model in turns."""
    backend = recfuse.backend()
    forms: dict[str, Callable[..., Tensor]] = {
        EAGER: problem.model,
        COMPILED: torch.compile(problem.model),
        PASSED: torch.compile(problem.model, backend=backend),
        BY_HAND: torch.compile(problem.by_hand),
    }
    right = problem.model(*problem.batches[0])
    errors = [relative_error(form(*problem.batches[0]), right) for form in forms.values()]
    check_agreement(parser, errors, TOLERANCE[right.dtype])
    runs = {name: lambda number, form=form: form(*problem.batches[number]) for name, form in forms.items()}
    table, result = measure_forms(arguments, problem.title, runs, len(problem.batches), (COMPILED, BY_HAND))
    swapped = backend.reports[-1].swapped
    kinds = {entry.pattern: 0 for entry in swapped}
    for entry in swapped:
        kinds[entry.pattern] += 1
    table.notes.append(
        f"Swapped: {', '.join(f'{count} {kind}' for kind, count in kinds.items()) or 'nothing'}."
    )
    return table, result


class Columns(nn.Module):
    """Columns of three kinds: bucketized floats, remainders, integers that are clamped."""

    def __init__(self, columns: int) -> None:
        """Small tables: what counts is the graph."""
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(11 + number % 7, 4) for number in range(columns))
        self.requires_grad_(False)

    def forward(self, floats: Tensor, integers: Tensor) -> Tensor:
        """[batch, columns] each to [batch, 4 * columns]."""
        found = []
        for number, table in enumerate(self.tables):
            rows = table.num_embeddings
            if number % 3 == 0:
                boundaries = torch.tensor([0.1 * step for step in range(rows - 1)])
                index = torch.bucketize(floats[:, number].clamp(0, 1), boundaries)
            elif number % 3 == 1:
                index = (integers[:, number] % rows).clamp(0, rows - 1)
            else:
                index = integers[:, number].clamp(0, rows - 1)
            found.append(table(index))
        return torch.cat(found, 1)


def measure_pass(columns: int) -> tuple[Table, dict[str, float]]:
    """Seconds of the pass over a graph that torch.compile has captured, and over an exported program."""
    model = Columns(columns).eval()

    def batch_of(samples: int) -> tuple[Tensor, Tensor]:
        return torch.rand(samples, columns), torch.randint(0, 10**6, (samples, columns))

    spent: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begin, processor = time.perf_counter(), time.process_time()
        found = work()
        spent[name] = time.perf_counter() - begin
        spent[f"{name}, processor"] = time.process_time() - processor
        return found

    backend = recfuse.backend("eager")
    torch.compiler.reset()

    def compile_with(module: Any, inputs: Any) -> Any:
        return timed("recfuse.backend()", lambda: backend(module, inputs))

    with torch.no_grad():
        compiled = torch.compile(model, backend=compile_with, fullgraph=True, dynamic=True)
        timed("torch.compile, with it", lambda: compiled(*batch_of(32)))
        for samples in (256, 2048):
            compiled(*batch_of(samples))
        batch = torch.export.Dim("batch", min=2)
        options: Any = {"dynamic_shapes": ({0: batch}, {0: batch}), "strict": False}
        program = timed("torch.export", lambda: torch.export.export(model, batch_of(64), **options))
        timed("recfuse.swap(program)", lambda: recfuse.swap(program))
    table = Table(f"pass over {columns} columns", ["what", "seconds", "of the processor"])
    for name in [name for name in spent if not name.endswith(", processor")]:
        table.rows.append([name, f"{spent[name]:.1f}", f"{spent[f'{name}, processor']:.1f}"])
    swapped = len(backend.reports[-1].found("columns"))
    table.notes.append(
        f"Columns swapped: {swapped}. Graphs for batches of 32, 256 and 2,048: {len(backend.reports)}."
    )
    return table, {**spent, "graphs": len(backend.reports)}


def main() -> None:
    """Run the benchmark."""
    parser, arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    sizes = arguments.tables, arguments.rows, arguments.dim, arguments.batch, arguments.lookups
    rest = arguments.num_batches, arguments.device
    dtype = torch.float16 if arguments.device == "cuda" else torch.float32
    problems = {
        "bags": lambda: bags(*sizes, *rest),
        "ranking": lambda: ranking(arguments.users, arguments.ratio, dtype, *rest),
    }
    report = Report(arguments)
    with torch.inference_mode():
        for name in (name for name in arguments.figures if name != "pass"):
            if name in problems:
                table, result = measure(parser, arguments, problems[name]())
                report.add(name, [table], result.to_json(environment=False))
            else:
                found, results = measure_columns(parser, arguments, name)
                record = {part: result.to_json(environment=False) for part, result in results.items()}
                report.add(name, found, record)
    if "pass" in arguments.figures:
        table, spent = measure_pass(arguments.columns)
        report.add("pass", [table], spent)


if __name__ == "__main__":
    main()
