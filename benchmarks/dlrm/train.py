"""Training steps of the whole DLRM, with nn.EmbeddingBag and after recfuse.swap: forward, backward, SGD.

Three copies of one model, each with its own torch.optim.SGD over all parameters: unchanged; after
recfuse.swap, which moves the optimizer to the packed tables; and after a swap that fuses the optimizer of the
tables into the backward pass. On a GPU the last also runs as a CUDA graph of the whole step; the others
synchronise with the device.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import recfuse
from common.checks import check_agreement
from common.report import Figure, load_notes
from common.settings import Setting
from common.table import Table, milliseconds, times
from common.verdict import verdict
from dlrm import bench, cpu, gpu
from dlrm.model import AGAINST, BASELINE, CANDIDATE, DLRM, MiniBatch, swap_note
from recfuse import timing

LEARNING_RATE = 1.0
UNFUSED, GRAPH = f"{CANDIDATE}, torch.optim", f"{CANDIDATE} graph"
CHECKED_STEPS = 3
TOLERANCE = 1e-5
"""Of the losses of the first steps: each loss depends on the updates of the previous steps."""


class Trained:
    """A model and its optimizer; a call makes a step and returns the seconds of its stages."""

    def __init__(self, model: DLRM, device: str, swap: dict[str, Any] | None = None) -> None:
        """`swap`: arguments of recfuse.swap in addition to the optimizer; None: not swapped."""
        self._model, self._device = model.train(), device
        self._optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        self.report = None
        if swap is not None:
            self.report = recfuse.swap(model, optimizers=[self._optimizer], **swap)

    def step(self, batch: MiniBatch, labels: Tensor, stages: timing.Stages) -> Tensor:
        """Makes a step; returns the loss [] before it."""
        with stages("forward"):
            self._optimizer.zero_grad()
            output = self._model(batch.dense_x, batch.lS_o, batch.lS_i)
            loss = torch.nn.functional.binary_cross_entropy(output, labels)
        with stages("backward"):
            loss.backward()
        with stages("optimizer"):
            self._optimizer.step()
        return loss.detach()

    def __call__(self, batch: MiniBatch, labels: Tensor) -> timing.Stages:
        """Makes a timed step."""
        stages = timing.Stages(self._device)
        self.step(batch, labels, stages)
        return stages

    def graphed(self, batch: MiniBatch, labels: Tensor) -> Callable[[], Any]:
        """Returns a step on this batch as a CUDA graph, without marks between stages, which a graph cannot
        contain."""
        return timing.graphed(lambda: self.step(batch, labels, timing.Stages("cpu")), self._device)


def make_sides(arguments: argparse.Namespace) -> dict[str, Trained]:
    """Three copies of a model, by name."""
    torch.manual_seed(arguments.seed)
    model = gpu.make_model(arguments)
    for bag in model.emb_l:  # with weights near 1 the sigmoid saturates and the gradient vanishes
        torch.nn.init.uniform_(bag.weight, -0.1, 0.1)
    swaps: dict[str, dict[str, Any] | None] = {
        BASELINE: None,
        UNFUSED: {},
        CANDIDATE: {"fuse_optimizers": True},
    }
    return {name: Trained(copy.deepcopy(model), arguments.device, swap) for name, swap in swaps.items()}


def make_inputs(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, level: str
) -> list[tuple[MiniBatch, Tensor]]:
    """Mini-batches and labels [batch, outputs]."""
    if isinstance(arguments.trace, str):
        batches = cpu.make_batches(parser, arguments, arguments.arch_embedding_size)
    else:
        batches = gpu.make_batches(arguments, level)
    generator = torch.Generator().manual_seed(arguments.seed)
    shape = arguments.mini_batch_size, arguments.arch_mlp_top[-1]
    labels = [torch.randint(2, shape, generator=generator).float() for _ in batches]
    return [(batch, each.to(arguments.device)) for batch, each in zip(batches, labels, strict=True)]


def first_losses(side: Trained, inputs: Sequence[tuple[MiniBatch, Tensor]]) -> Tensor:
    """Returns the losses of a few steps."""
    chosen = [inputs[number % len(inputs)] for number in range(CHECKED_STEPS)]
    return torch.stack([side.step(*each, timing.Stages("cpu")) for each in chosen])


def measure(
    arguments: argparse.Namespace,
    level: str,
    sides: dict[str, Trained],
    inputs: Sequence[tuple[MiniBatch, Tensor]],
) -> tuple[timing.Comparison, float]:
    """Times all sides in turns; also returns the difference of their first losses."""
    losses = {name: first_losses(side, inputs) for name, side in sides.items()}
    apart = torch.stack([(loss - losses[BASELINE]).abs() for loss in losses.values()]).max().item()
    timed: dict[str, Callable[[int], Any]] = {
        name: lambda number, side=side: side(*inputs[number]) for name, side in sides.items()
    }
    if not isinstance(arguments.trace, str):
        try:
            graphs = [sides[CANDIDATE].graphed(*each) for each in inputs]
            timed[GRAPH] = lambda number: graphs[number]()
        except RuntimeError as error:
            print(f"No graph of a step: {str(error).partition(chr(10))[0]}")
    result = timing.compare(
        timed, inputs=[(number,) for number in range(len(inputs))], rounds=arguments.num_batches,
        device=arguments.device, label=f"DLRM training {level}",
    )  # fmt: skip
    return result, apart


def tabulate(arguments: argparse.Namespace, results: dict[str, timing.Comparison]) -> Table:
    """Tabulates stages and whole steps of each trace."""
    rows = arguments.arch_embedding_size
    threads = f", {torch.get_num_threads()} threads" if arguments.device == "cpu" else ""
    names = list(next(iter(results.values())).timings)
    table = Table(
        f"A training step of DLRM, {len(rows)} tables x {max(rows):,} x "
        f"{arguments.arch_sparse_feature_size}, batch {arguments.mini_batch_size} x "
        f"{arguments.num_indices_per_lookup}, SGD{threads}",
        ["trace, stage: ms (median ± IQR)", *names, f"{CANDIDATE} faster"],
    )
    for level, result in results.items():
        label = Path(level).name
        for stage, baseline in result[BASELINE].stages.items():
            parts = [result[name].stages.get(stage) for name in names]
            cells = ["-" if part is None else milliseconds(part) for part in parts]
            ratio = baseline.median / result[CANDIDATE].stages[stage].median
            table.rows.append([f"{label}, {stage}", *cells, times(ratio)])
        cells = [milliseconds(result[name]) for name in names]
        table.rows.append([f"{label}, step", *cells, times(result.ratio(CANDIDATE, BASELINE))])
    return table


@bench.figure("train", default=False)
def figure_train(setting: Setting) -> Iterator[Figure]:
    """Training steps at each trace."""
    parser, arguments = setting.parser, setting.arguments
    levels = [arguments.trace] if isinstance(arguments.trace, str) else arguments.trace
    results, differences, notes = {}, {}, []
    for level in levels:
        sides = make_sides(arguments)
        inputs = make_inputs(parser, arguments, level)
        results[level], differences[level] = measure(arguments, level, sides, inputs)
        notes = [swap_note(side.report) for name, side in sides.items() if name == CANDIDATE and side.report]
        del sides
        yield from gpu.measured(results, differences)
        check_agreement(parser, [differences[level]], TOLERANCE)
    table = tabulate(arguments, results)
    table.notes = [
        f"Largest difference of the losses of the first {CHECKED_STEPS} steps: "
        f"{max(differences.values()):.1e}.",
        *notes,
        *load_notes(results.values()),
    ]
    yield Figure([table], {}, differences, name="differences")
    print(verdict(results, CANDIDATE, BASELINE, f"{AGAINST}, training", list(differences.values())))
