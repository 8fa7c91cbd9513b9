"""Models outside of all calibrations: three named models, and random models."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from recfuse.perf.calibrating.probes import Batch, Dlrm, DlrmModel, Step

# Rows of the tables of Criteo's Kaggle data.
KAGGLE = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10,
    5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
NAMED = {
    "default": Dlrm((512, 512, 64), (1_000_000,) * 8, 64, (1024, 1024, 1024, 1), pooling=100),
    "ddp": Dlrm((128, 128, 128, 128), (80_000,) * 8, 128, (512, 512, 512, 256, 1), pooling=10),
    "mlperf": Dlrm((13, 512, 256, 128), KAGGLE, 128, (1024, 1024, 512, 256, 1), skew=5.0),
}
RANDOM_SEED = 2025  # of the random models of a new record
BATCHES = (512, 1024, 2048, 4096)
_MOST_LOOKUPS = 24_000_000  # per batch
_MOST_WORDS = 1 << 30  # of all tables


@dataclass(frozen=True)
class Target:
    """A step to predict and to measure."""

    name: str
    sizes: Dlrm
    batch: int
    optimizer: str | None = None

    @property
    def training(self) -> bool:
        """True if the step trains."""
        return self.optimizer is not None


class AdamOfBoth:
    """`torch.optim.SparseAdam` for the tables and `torch.optim.Adam` for the other Parameters."""

    def __init__(self, model: DlrmModel) -> None:
        """Creates both optimizers."""
        tables = list(model.emb_l.parameters())
        numbers = {id(one) for one in tables}
        rest = [one for one in model.parameters() if id(one) not in numbers]
        self.optimizers = torch.optim.SparseAdam(tables, lr=1e-3), torch.optim.Adam(rest, lr=1e-3)

    def zero_grad(self) -> None:
        """Removes all gradients."""
        for one in self.optimizers:
            one.zero_grad()

    def step(self) -> None:
        """Updates all Parameters."""
        for one in self.optimizers:
            one.step()


def step_of(target: Target, model: DlrmModel, batches: Iterable[Batch]) -> Step:
    """Returns the step of a target."""
    if target.optimizer != "sparse_adam":
        return Step(model, batches, target.optimizer)
    step = Step(model, batches)
    step.optimizer = AdamOfBoth(model)  # type: ignore[assignment]
    return step


def cut(sizes: Dlrm, most_rows: int) -> Dlrm:
    """Returns sizes with at most that many rows per table."""
    return replace(sizes, rows=tuple(min(rows, most_rows) for rows in sizes.rows))


def named(most_rows: int | None = None, batches: tuple[int, ...] = BATCHES) -> list[Target]:
    """Returns the paper's models, inference and training, with at most `most_rows` rows per table."""
    targets = []
    for name, sizes in NAMED.items():
        cut_sizes = sizes if most_rows is None else cut(sizes, most_rows)
        for batch in batches:
            targets += [Target(name, cut_sizes, batch), Target(name, cut_sizes, batch, "sgd")]
    return targets


def named_half(batches: tuple[int, ...] = (2048,)) -> list[Target]:
    """Returns the paper's models in bfloat16."""
    return [
        Target(f"{name} bfloat16", replace(sizes, dtype="bfloat16"), batch, optimizer)
        for name, sizes in NAMED.items() for batch in batches for optimizer in (None, "sgd")
    ]  # fmt: skip


def random_targets(count: int, tiny: bool = False, seed: int = 2024) -> list[Target]:
    """Return random DLRMs: 1 to 200 tables, dims 8 to 256, 1 to 200 lookups, skewed or not, fp32 and bf16."""
    rng, targets = random.Random(seed), []
    begin = "random" if seed == 2024 else f"random{seed}_"
    while len(targets) < 2 * count:
        tables = round(2 ** rng.uniform(0, 3 if tiny else 7.6))
        dim = rng.choice((8, 16) if tiny else (8, 16, 32, 64, 128, 256))
        rows = tuple(round(10 ** rng.uniform(1, 3 if tiny else 6)) for _ in range(tables))
        pooling = rng.choice((1, 2) if tiny else (1, 1, 2, 5, 20, 80, 200))
        batch = round(2 ** rng.uniform(4, 6) if tiny else 2 ** rng.uniform(7, 14))
        width = rng.choice((16, 32) if tiny else (64, 128, 256, 512, 1024))
        bottom = (rng.choice((13, 64, 200)), *[width] * rng.randint(0, 2), dim)
        top = (*[rng.choice((width, 2 * width)) for _ in range(rng.randint(1, 3))], 1)
        number = len(targets) // 2
        optimizer = ("sgd", "sgd", "sgd", "adam", "adagrad")[number % 5]
        sparse = optimizer != "adam"
        if seed != 2024 and optimizer == "adam" and number % 2:
            optimizer, sparse = "sparse_adam", True
        sizes = Dlrm(
            bottom, rows, dim, top, pooling, rng.choice((1.0, 1.0, 3.0, 5.0)),
            dtype="bfloat16" if number % 3 == 2 else "float32", sparse=sparse,
        )  # fmt: skip
        lookups, words = batch * pooling * tables, dim * sum(rows)
        interaction = batch * (tables + 1) ** 2
        if (
            lookups * dim > _MOST_LOOKUPS * 32
            or lookups > _MOST_LOOKUPS
            or words > _MOST_WORDS
            or interaction > 1 << 28
        ):
            continue
        name = f"{begin}{number}"
        targets += [Target(name, sizes, batch), Target(name, sizes, batch, optimizer)]
    return targets
