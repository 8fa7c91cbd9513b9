"""What each part of recfuse brings: a call with the part and without it, in turns, on one GPU.

A row names the part, its files and a published cell, and gives the medians of both as CUDA graphs. A part of
more than 150 lines stays where it brings 5 % on its best cell. Outputs of all variants are compared with
float64 first.

  training             sort/group.cu, small/parts.cuh and the whole small path of the backward pass
  fused_embedding_bag  tables staged in shared memory (staged/)
  embedding_bag        short_bags.cu, a sweep through the parts of a table, rows in flight
  embedding_columns    columns of one value, values translated in the kernel
  ikbo_linear          the paths "aligned", "broadcast", "fused" and "small"
  ikbo_attention       the path "fused"
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from common.calls import time_calls
from common.checks import TOLERANCES, checked, relative_error
from common.report import Report
from common.settings import Setting, check_choices, comma_list, fail, make_parser, positive, start
from common.table import Table, times
from recfuse import _C, timing

WITH = "as it comes"
LEFT_OUT = {"sort/group.cu": 1, "small/": 2, "small/parts.cuh": 4}
"""Parts of the backward pass, as `_C.fused_embedding_bag_backward_leave_out` takes them."""


@dataclass
class Cell:
    """A published cell, with the calls that are compared.

    Attributes:
        part: the file or folder that `runs` differ in; by name of the run, where there are several.
        runs: `WITH` and others, each takes one of `inputs`.
        error_of: how far a run's output is from the right one.
    """

    label: str
    part: str | Mapping[str, str]
    runs: dict[str, Callable[[Any], Any]]
    inputs: Sequence[Any]
    error_of: Callable[[str, Any], float]
    tolerance: float
    first: Any = None
    """Makes what `error_of` takes, by run; None: the run on the first of the inputs."""


def part(setting: Setting, size: int) -> int:
    """A size, divided by `--part`."""
    return max(size // setting.arguments.part, 2)


def release(setting: Setting) -> None:
    """Gives back memory that is no longer in use: modules and graphs hold each other."""
    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()


def training(setting: Setting) -> Iterator[Cell]:
    """Steps in which the backward pass leaves parts out. All variants train the same tables."""
    from training import stages
    from training.gpu import fitting_rows
    from training.lookups import RankedSubject, Subject, make_subject
    from training.sides import OPTIMIZERS, RECFUSE, make_sides
    from training.steps import TOLERANCE

    device, seed = setting.device, setting.arguments.seed

    def without(parts: int, call: Callable[[Any], Any], given: Any) -> Any:
        _C.fused_embedding_bag_backward_leave_out(parts)
        try:
            return call(given)
        finally:
            _C.fused_embedding_bag_backward_leave_out(0)

    class Uniform(RankedSubject):
        def ranks(self, uniform: Tensor, rows: int) -> Tensor:
            return uniform * rows

    def subject_of(name: str, kind: str) -> Subject:
        model, _, size = name.rpartition("-")
        batch = part(setting, int(size))
        if model.startswith("100 x "):  # not published: small/parts.cuh lists these, and no published cell
            return Uniform(model, [int(model.removeprefix("100 x "))] * 100, [1] * 100, batch)
        rows = fitting_rows(part(setting, 8_000_000), kind, [RECFUSE], device)
        return make_subject(f"{model}-{batch}", seed, part(setting, 4_000_000), rows)

    small = "small/parts.cuh", "small/"
    for name, kind, parts in [
        ("A-512", "sgd", small),
        ("D-512", "sgd", small),
        ("A-512", "rowwise_adagrad", small),
        ("D-512", "rowwise_adagrad", small),
        ("100 x 100-2048", "sgd", small),
        ("100 x 10000-8192", "sgd", small),
        ("mlperf-2048", "sgd", ("sort/group.cu",)),
        ("mlperf-16384", "sgd", ("sort/group.cu",)),
        ("dynamicemb-104857", "sgd", ("sort/group.cu",)),
        ("dynamicemb-104857", "adam", ("sort/group.cu",)),
    ]:
        release(setting)
        subject = subject_of(name, kind)
        batches = subject.batches(2, seed + 1, device)
        sides, _ = make_sides(subject, kind, [RECFUSE], device, batches[0].indices.dtype)
        side = sides[RECFUSE]
        right = stages.right_changes(subject, batches[0], OPTIMIZERS[kind])
        bits = {WITH: 0, **{f"without {part}": LEFT_OUT[part] for part in parts}}
        first_step = partial(stages.first_step_error, side, batches[0], right)
        yield Cell(
            f"{subject.name}, {kind}",
            {f"without {part}": part for part in parts},
            {run: partial(without, bit, side.step) for run, bit in bits.items()},
            batches,
            # The first step is undone, but for an optimizer's states: later ones change the rows less.
            lambda name, error, kind=kind: error if kind == "sgd" or name == WITH else 0.0,
            TOLERANCE,
            {run: partial(without, bit, lambda _, f=first_step: f(), None) for run, bit in bits.items()},
        )
        del subject, sides, side, right, first_step, batches


def fused_embedding_bag(setting: Setting) -> Iterator[Cell]:
    """Models by their default schedules, and by those that stage no table."""
    from fused_embedding_bag.candidates import DEFAULT, UNSTAGED, make_runs
    from fused_embedding_bag.setting import FusedSetting, right_output

    models = FusedSetting(setting.parser, setting.arguments)
    size = part(setting, 512)
    for name in "ADF":
        subject = models.subject(name)
        runs, _ = make_runs(subject, [DEFAULT, UNSTAGED])
        batches = subject.batches(size)
        right = right_output(subject, batches[0], torch.float32)
        yield Cell(
            f"{name} {size}",
            "staged/",
            {WITH: runs[DEFAULT], "without staged/": runs[UNSTAGED]},
            batches,
            lambda _, output, right=right: relative_error(output, right),
            TOLERANCES[torch.float32],
        )
        models.release(name)
        del subject, runs, batches, right


def embedding_bag(setting: Setting) -> Iterator[Cell]:
    """Schedules that leave out a kernel, or what a kernel does."""
    from embedding_bag.candidates import bag
    from embedding_bag.setting import BagSetting, error_of_pass
    from embedding_bag.short_bags import Cell as Short
    from embedding_bag.short_bags import TableSetting

    arguments = setting.arguments
    rows = part(setting, 10**6)
    table = TableSetting(setting.parser, arguments, rows, 128)
    for bags, pooling in ((1024, 1), (32768, 1), (131072, 1), (32768, 16), (131072, 16)):
        bags = part(setting, bags)
        request = [(0, table.part(Short(rows, 128, bags, pooling, 1.05)))]
        yield Cell(
            f"{rows:,} x 128, {bags} x {pooling}, alpha 1.05",
            "short_bags.cu",
            {WITH: bag("", table.weights), "without short_bags.cu": bag("station=register", table.weights)},
            [request],
            lambda _, outputs, request=request: error_of_pass(outputs, table.weights, request),
            TOLERANCES[torch.float32],
        )
    arguments.rows, arguments.dims, arguments.batch_size = part(setting, 500_000), [128], part(setting, 2048)
    arguments.num_indices_per_lookup = 150
    tables = BagSetting(setting.parser, arguments, 4, None)
    for hotness in ("high", "medium", "low", "random"):
        work = tables.workload(hotness)
        yield Cell(
            f"{arguments.rows:,} x 128, {arguments.batch_size} x 150, {hotness}",
            {"without parts of a table": "parts of a table (bag.cuh)", "one row in flight": "station.cuh"},
            {
                WITH: bag("", tables.weights),
                "without parts of a table": bag("parts=1", tables.weights),
                "one row in flight": bag("station=none", tables.weights),
            },
            work.requests,
            lambda _, outputs, work=work: error_of_pass(outputs, tables.weights, work.requests[0]),
            TOLERANCES[torch.float32],
        )


def embedding_columns(setting: Setting) -> Iterator[Cell]:
    """Columns that are all jagged, and values that torch translates, column by column."""
    from embedding_columns.forms import RECFUSE, WITHOUT_FUSION, WITHOUT_PRUNING, Runs
    from embedding_columns.measure import right_output
    from embedding_columns.models import Subject, bucketize, model_kinds

    every, size = setting.arguments.part, part(setting, 256)
    for label, kinds in (
        ("1,000 bucketize", [bucketize(part(setting, 1000))]),
        *((name, model_kinds(name, part(setting, 2**23), every)) for name in "EF"),
    ):
        subject = Subject(label, kinds, setting)
        runs, batches = Runs(subject), subject.batches(size)
        right = right_output(subject, batches[0])
        yield Cell(
            f"{label}, {size}",
            {WITHOUT_PRUNING: "columns of one value", WITHOUT_FUSION: "program, lookups.cu"},
            {
                WITH: runs.make(RECFUSE),
                WITHOUT_PRUNING: runs.make(WITHOUT_PRUNING),
                WITHOUT_FUSION: runs.make(WITHOUT_FUSION),
            },
            batches,
            lambda _, output, right=right: relative_error(output, right),
            TOLERANCES[torch.float32],
        )
        del subject, runs, batches, right


def ikbo_linear(setting: Setting) -> Iterator[Cell]:
    """The stages of the paper, and for small batches both kernels."""
    from ikbo_linear.forms import make_runs
    from ikbo_linear.problem import Problem, Shape

    stages = {f"path {name}": f'path "{name}"' for name in ("decomposed", "aligned", "broadcast", "fused")}
    small = {name: stages[name] for name in ("path broadcast", "path fused")} | {"path small": "small.cu"}
    if setting.device.type == "cpu":
        stages, small = ({name: each[name] for name in ("path broadcast",)} for each in (stages, small))
    cells: list[tuple[int, str, dict[str, str]]] = [
        (1024, "float16", stages), (1024, "bfloat16", stages),
        (8, "bfloat16", small), (64, "bfloat16", small),
    ]  # fmt: skip
    for candidates, dtype, paths in cells:
        shape = Shape(candidates=part(setting, candidates))
        problem = Problem(shape, getattr(torch, dtype), setting.device, setting.arguments.seed)
        runs = make_runs(problem, [*paths, "recfuse"])
        yield Cell(
            f"{dtype}, {shape.candidates} candidates",
            paths,
            {WITH: runs["recfuse"], **{name: runs[name] for name in paths}},
            problem.inputs,
            lambda _, output, problem=problem: relative_error(
                output[problem.checked].double(), problem.right
            ),
            3 * TOLERANCES[problem.dtype],
        )
        del problem, runs


def ikbo_attention(setting: Setting) -> Iterator[Cell]:
    """recfuse's kernel, and torch's attention of a user's candidates as one query."""
    from ikbo_attention.forms import make_runs
    from ikbo_attention.problem import Problem, Shape

    cells = ("64+1", 64, 512), ("64+1", 64, 1024), ("64+1", 64, 4096), ("64", 1, 1024)
    for group, queries, kv in cells:
        shape = Shape(part(setting, 2048), group, queries, part(setting, kv))
        problem = Problem(shape, torch.bfloat16, setting.device, setting.arguments.seed)
        runs = make_runs(problem, ["path packed", "recfuse"])
        yield Cell(
            f"bfloat16, {shape}",
            'path "fused"',
            {WITH: runs["recfuse"], "path packed": runs["path packed"]},
            problem.inputs,
            lambda _, output, problem=problem: relative_error(
                problem.sampled(output).double(), problem.right
            ),
            0.05,  # of weights in bfloat16
        )
        del problem, runs


FAMILIES: dict[str, Callable[[Setting], Iterator[Cell]]] = {
    "training": training,
    "ikbo_linear": ikbo_linear,
    "fused_embedding_bag": fused_embedding_bag,
    "embedding_bag": embedding_bag,
    "ikbo_attention": ikbo_attention,
    "embedding_columns": embedding_columns,
}


def measure(cell: Cell, setting: Setting) -> tuple[timing.Comparison, dict[str, float], list[str]]:
    """Times the runs in turns, after their outputs were found right."""
    first = cell.first or {name: partial(run, cell.inputs[0]) for name, run in cell.runs.items()}
    with torch.enable_grad():
        errors, notes = checked(setting.parser, cell.label, first, cell.error_of, lambda name: cell.tolerance)
    if WITH not in errors:
        fail(setting.parser, f"{cell.label}: recfuse does not run: {notes}")
    runs = {name: cell.runs[name] for name in errors}
    result, failures = time_calls(
        runs, cell.inputs, setting.device, rounds=setting.arguments.rounds, eager=False
    )
    return result, errors, [*notes, *(f"{cell.label}, {name}: {why}" for name, why in failures.items())]


def rows_of(cell: Cell, result: timing.Comparison) -> list[list[str]]:
    """A row for each part: µs with it, without it, and what it brings."""
    rows = []
    for name in cell.runs:
        if name == WITH or not {name, WITH} <= set(result.timings):
            continue
        part = cell.part if isinstance(cell.part, str) else cell.part[name]
        us = [f"{result[each].median * 1e6:.1f} ± {result[each].iqr * 1e6:.1f}" for each in (WITH, name)]
        rows.append([part, cell.label, us[0], name, us[1], times(result.ratio(WITH, name))])
    return rows


def parse_arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line, checked."""
    parser = make_parser(__doc__, rounds=9)
    names = ",".join(FAMILIES)
    parser.add_argument("--families", type=comma_list, default=list(FAMILIES), help=f"default: {names}")
    parser.add_argument("--cells", default="", metavar="TEXT", help="only cells whose names have this")
    parser.add_argument("--part", type=positive, default=1, help="divide all sizes by this: a trial run")
    arguments = parser.parse_args()
    start(parser, arguments)
    arguments.num_batches, arguments.compile = 2, 0  # as families' own command lines have them
    check_choices(parser, {"--families": (arguments.families, FAMILIES)})
    return parser, arguments


def main() -> None:
    """Measure; the JSON file is written anew after each family."""
    parser, arguments = parse_arguments()
    report, setting = Report(arguments), Setting(parser, arguments)
    for family in arguments.families:
        table = Table(
            f"{family}: µs as a CUDA graph (median ± IQR of {arguments.rounds})",
            ["part", "cell", WITH, "other", "µs of it", "the part brings"],
        )
        record: dict[str, Any] = {}
        for cell in tqdm(FAMILIES[family](setting), desc=family, leave=False):
            if arguments.cells not in cell.label:
                continue
            result, errors, notes = measure(cell, setting)
            rows = rows_of(cell, result)
            for row in rows:  # at once: a run that is cut short has shown them
                tqdm.write(" | ".join(row), file=sys.stderr)
            table.rows += rows
            table.notes += notes
            record[cell.label] = {
                "us": {name: taken.median * 1e6 for name, taken in result.timings.items()},
                "relative_error": errors,
                "measured": result.to_json(environment=False),
            }
        report.add(family, [table], record)


if __name__ == "__main__":
    main()
