"""The ablation of the linear layer: the stages of the paper, and for small batches both kernels."""

from __future__ import annotations

from collections.abc import Iterator

from common.ablation import WITH, Cell, ablation, sized
from common.checks import TOLERANCES, relative_error
from common.points import DTYPES, ROUNDINGS
from ikbo_linear import bench
from ikbo_linear.forms import PATHS, RECFUSE, make_runs
from ikbo_linear.measure import IkboSetting
from ikbo_linear.problem import Problem, Shape

STAGES = ("path decomposed", "path aligned", "path broadcast", "path fused")
SMALL = ("path broadcast", "path fused", "path small")
CELLS = [
    (1024, "float16", STAGES),
    (1024, "bfloat16", STAGES),
    (8, "bfloat16", SMALL),
    (64, "bfloat16", SMALL),
]


@ablation(bench)
def cells(setting: IkboSetting) -> Iterator[Cell]:
    """The paper's shape and small batches: each path, and the path that is chosen."""
    for candidates, dtype, paths in CELLS:
        shape = Shape(candidates=sized(setting, candidates))
        problem = Problem(shape, DTYPES[dtype], setting.device, setting.arguments.seed)
        runs = make_runs(problem, [*paths, RECFUSE])
        yield Cell(
            f"{dtype}, {shape.candidates} candidates",
            {name: f'all but path "{PATHS[name]}"' for name in paths},
            {WITH: runs[RECFUSE], **{name: runs[name] for name in paths}},
            problem.inputs,
            lambda _, output, problem=problem: relative_error(
                problem.sampled(output).double(), problem.right
            ),
            ROUNDINGS * TOLERANCES[problem.dtype],
        )
        del problem, runs
