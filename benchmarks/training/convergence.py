"""The same task learned by torch's optimizers and by recfuse's: the loss of every step.

The task has the shape of Criteo's: 13 dense features, 26 categorical features with few or many rows and
skewed lookups, one each, and a label that is 1 with a probability from a hidden model. Both sides start from
the same values, get the same batches, and train the dense layers by the same torch.optim.SGD; only the tables
differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor
from tqdm import tqdm

import recfuse
from common.batches import MLPERF_ROWS
from common.checks import check_agreement
from common.plots import colours, drawn, finish, machine
from common.report import Figure
from common.settings import Setting
from common.table import Table
from recfuse import timing
from training import bench

DENSE, DIM, BATCH = 13, 16, 256
MOST_ROWS, SKEW = 20_000, 3  # rank = u ** 3 * rows
DENSE_RATE = 0.05
TOLERANCE = 1e-3
"""Of a loss: rounding in another order accumulates over a thousand steps."""
WINDOW = 25  # steps that a point of the plot is the mean of

# torch's optimizer of sparse gradients -> recfuse's, and the arguments of both. With the default eps, Adagrad
# and Adam make a whole step of a gradient of 1e-9, so its rounding leads to another path.
KINDS: dict[str, tuple[str, dict[str, float]]] = {
    "SGD": ("SGD", {"lr": 2.0}),
    "Adagrad": ("Adagrad", {"lr": 0.05, "eps": 1e-6}),
    "SparseAdam": ("Adam", {"lr": 0.003, "eps": 1e-5}),
}


@dataclass
class Sample:
    """A batch."""

    dense: Tensor  # [batch, DENSE]
    indices: Tensor  # [tables, batch] int64
    labels: Tensor  # [batch]


class Task:
    """The hidden model, and batches with labels drawn from it."""

    def __init__(self, seed: int, device: torch.device) -> None:
        """A number for each dense feature and each row; pairs of tables have products."""
        self.rows = [min(rows, MOST_ROWS) for rows in MLPERF_ROWS]
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device = device
        self._slopes = self._normal(DENSE) * 0.3
        self._effects = [self._normal(rows) * 0.4 for rows in self.rows]

    def _normal(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, device=self._device, generator=self._generator)

    def _uniform(self, count: int) -> Tensor:
        return torch.rand(count, device=self._device, generator=self._generator)

    def sample(self) -> Sample:
        """The next batch."""
        dense = self._normal(BATCH, DENSE)
        ranks = [(self._uniform(BATCH) ** SKEW * rows).long() for rows in self.rows]
        effects = torch.stack([each[rank] for each, rank in zip(self._effects, ranks, strict=True)])
        pairs = (effects[::2] * effects[1::2]).sum(0)
        chance = torch.sigmoid(dense @ self._slopes + effects.sum(0) + 2 * pairs - 1)
        return Sample(dense, torch.stack(ranks), (self._uniform(BATCH) < chance).float())


class Model(torch.nn.Module):
    """A small DLRM: dense layers below, dot products of all pairs, dense layers above, a logit."""

    def __init__(self, pool: Callable[[Tensor], Tensor], tables: int) -> None:
        """`pool`: [tables, batch] indices to [batch, tables * DIM]."""
        super().__init__()
        vectors = tables + 1
        self._pool, self._pairs = pool, torch.tril_indices(vectors, vectors, offset=-1)
        self.bottom = torch.nn.Sequential(
            torch.nn.Linear(DENSE, 64), torch.nn.ReLU(), torch.nn.Linear(64, DIM)
        )
        inputs = DIM + self._pairs.shape[1]
        self.top = torch.nn.Sequential(torch.nn.Linear(inputs, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        """Logits [batch]."""
        below = self.bottom(dense)
        vectors = torch.cat([below, self._pool(indices)], 1).view(len(dense), -1, DIM)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self._pairs[0], self._pairs[1]]
        return self.top(torch.cat([below, products], 1)).squeeze(1)


def first_tables(rows: list[int], seed: int, device: torch.device) -> list[Tensor]:
    """Returns the values from which both sides start."""
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(count, DIM, device=device, generator=generator) * 0.1 for count in rows]


def torch_pool(kind: str, tables: list[Tensor]) -> tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer]:
    """Returns a loop of torch's modules, and the optimizer of its tables."""
    bags = [torch.nn.EmbeddingBag.from_pretrained(t, freeze=False, mode="sum", sparse=True) for t in tables]

    def pool(indices: Tensor) -> Tensor:
        return torch.cat([bag(each[:, None]) for bag, each in zip(bags, indices, strict=True)], 1)

    return pool, getattr(torch.optim, kind)([bag.weight for bag in bags], **KINDS[kind][1])


def recfuse_pool(kind: str, tables: list[Tensor]) -> tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer]:
    """recfuse's collection, and recfuse's optimizer."""
    name, options = KINDS[kind]
    bags = [torch.nn.EmbeddingBag.from_pretrained(t, freeze=False, mode="sum", sparse=True) for t in tables]
    fused = recfuse.nn.FusedEmbeddingBagCollection.from_embedding_bags(bags)

    def pool(indices: Tensor) -> Tensor:
        flat = indices.flatten()
        return fused(flat, torch.arange(len(flat) + 1, device=flat.device))

    return pool, getattr(recfuse.optim, name)(fused, **options)


def learn(side: str, kind: str, steps: int, seed: int, device: torch.device) -> list[float]:
    """Returns the loss of each step."""
    task = Task(seed, device)
    make = {"torch": torch_pool, "recfuse": recfuse_pool}[side]
    pool, optimizer = make(kind, first_tables(task.rows, seed + 1, device))
    torch.manual_seed(seed + 2)
    model = Model(pool, len(task.rows)).to(device)
    dense = torch.optim.SGD(model.parameters(), lr=DENSE_RATE)
    losses = []
    for _ in tqdm(range(steps), desc=f"{side}, {kind}", leave=False):
        batch = task.sample()
        optimizer.zero_grad()
        dense.zero_grad()
        logits = model(batch.dense, batch.indices)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()
        optimizer.step()
        dense.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


@bench.figure("convergence", default=False)
def figure_convergence(setting: Setting) -> Figure:
    """Every kind of optimizer on both sides; ends the program where losses differ."""
    arguments = setting.arguments
    run = partial(learn, steps=arguments.steps, seed=arguments.seed, device=setting.device)
    losses = {kind: {side: run(side, kind) for side in ("torch", "recfuse")} for kind in KINDS}
    table = Table(
        f"Log loss over {arguments.steps:,} steps",
        ["optimizer of the tables", "first tenth", "last tenth, torch.optim", "last tenth, recfuse.optim",
         "largest difference of a step"],
    )  # fmt: skip
    tenth, differences = max(1, arguments.steps // 10), []
    for kind, curve in losses.items():
        pairs = zip(curve["torch"], curve["recfuse"], strict=True)
        apart = [abs(one - other) for one, other in pairs]
        # max would lose a NaN.
        differences.append(max(apart) if all(each == each for each in apart) else float("nan"))
        cells = [mean(curve["torch"][:tenth]), *(mean(each[-tenth:]) for each in curve.values())]
        table.rows.append([kind, *(f"{cell:.4f}" for cell in cells), f"{differences[-1]:.1e}"])
    if arguments.plots is not None:
        plot(arguments.plots / "training_losses.png", losses, machine(timing.environment(arguments.device)))
    check_agreement(setting.parser, differences, TOLERANCE)
    rounded = {
        kind: {side: [round(loss, 7) for loss in each] for side, each in curve.items()}
        for kind, curve in losses.items()
    }
    return Figure([table], {}, rounded)


def plot(path: Path, losses: dict[str, dict[str, list[float]]], note: str) -> None:
    """Draws a panel per kind: both curves at the top, their difference at the bottom."""
    with drawn(path, [losses, note]) as plt:
        size = {"figsize": (4 * len(losses), 5.2), "height_ratios": (3, 1), "sharex": True, "squeeze": False}
        figure, axes = plt.subplots(2, len(losses), sharey="row", layout="constrained", **size)
        colour = colours({"torch": None, "recfuse": None})
        for (kind, curve), above, below in zip(losses.items(), *axes, strict=True):
            ticks = range(WINDOW, len(curve["torch"]) + 1)
            for side, style in (("torch", {"linewidth": 5}), ("recfuse", {"linewidth": 1.3})):
                smooth = [mean(curve[side][end - WINDOW : end]) for end in ticks]
                above.plot(list(ticks), smooth, label=f"{side}.optim", color=colour[side], **style)
            apart = [abs(one - other) for one, other in zip(curve["torch"], curve["recfuse"], strict=True)]
            below.plot(range(1, len(apart) + 1), apart, color="black", linewidth=0.8)
            above.set_title(kind)
            below.set(xlabel="step", yscale="symlog" if not any(apart) else "log")
        axes[0][0].set_ylabel(f"log loss, mean of {WINDOW} steps")
        axes[1][0].set_ylabel("difference")
        title = "Log loss with recfuse.optim, baseline: torch.optim on nn.EmbeddingBag(sparse=True)"
        finish(figure, title, note)
