"""Models of bags and of ranking in their forms, and the table of a model's forms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

import recfuse
from common.calls import EAGER
from common.checks import relative_error
from common.measure import measure
from common.report import Figure, Row, load_notes
from common.settings import Setting
from common.table import Table, times
from passes import bench
from passes.models import Problem, bags, ranking

PLAIN, COMPILED, PASSED, BY_HAND = "eager", "torch.compile", "recfuse.backend()", "by hand, compiled"
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2}


def measure_forms(
    setting: Setting,
    title: str,
    runs: Mapping[str, Callable[[int], Tensor]],
    batches: int,
    baselines: Sequence[str],
    allowed: float,
) -> tuple[Table, Row]:
    """Times forms of one model in turns, on a GPU as CUDA graphs and called.

    Args:
        runs: take the number of a batch; the first is the reference of outputs.
        baselines: the forms of the ratios.
    """
    right = next(iter(runs.values()))(0)
    row = measure(
        title, runs, range(batches), setting, lambda name, output: relative_error(output, right), allowed,
        eager=setting.on_gpu,
    )  # fmt: skip
    table = Table(title, ["form", "µs (median ± IQR)", *(f"over {name}" for name in baselines)])
    for suffix, called in (("", ""), (EAGER, ", called")) if setting.on_gpu else (("", ""),):
        for name in (name for name in runs if name + suffix in row.result.timings):
            ratios = [times(row.ratio(name + suffix, other + suffix)) for other in baselines]
            table.rows.append([name + called, row.cell(name + suffix), *ratios])
    table.notes += [*row.notes, *load_notes([row.result])]
    return table, row


def figure_of(setting: Setting, problem: Problem) -> Figure:
    """All forms of one model in turns."""
    backend = recfuse.backend()
    forms: dict[str, Callable[..., Tensor]] = {
        PLAIN: problem.model,
        COMPILED: torch.compile(problem.model),
        PASSED: torch.compile(problem.model, backend=backend),
        BY_HAND: torch.compile(problem.by_hand),
    }
    runs = {name: lambda number, form=form: form(*problem.batches[number]) for name, form in forms.items()}
    allowed = TOLERANCE[next(problem.model.parameters()).dtype]
    count = len(problem.batches)
    table, row = measure_forms(setting, problem.title, runs, count, (COMPILED, BY_HAND), allowed)
    kinds = Counter(entry.pattern for entry in backend.reports[-1].swapped)
    swapped = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    table.notes.append(f"Swapped: {swapped or 'nothing'}.")
    return Figure([table], {}, row.record["measured"])


@bench.figure("bags")
@torch.inference_mode()
def figure_bags(setting: Setting) -> Figure:
    """Many tables before one cat."""
    arguments = setting.arguments
    torch.manual_seed(arguments.seed)
    sizes = arguments.tables, arguments.rows, arguments.dim, arguments.batch, arguments.lookups
    return figure_of(setting, bags(*sizes, arguments.num_batches, arguments.device))


@bench.figure("ranking")
@torch.inference_mode()
def figure_ranking(setting: Setting) -> Figure:
    """A user tower, candidates of each user, linear compression and target attention."""
    arguments = setting.arguments
    torch.manual_seed(arguments.seed)
    dtype = torch.float16 if setting.on_gpu else torch.float32
    return figure_of(
        setting, ranking(arguments.users, arguments.ratio, dtype, arguments.num_batches, arguments.device)
    )
