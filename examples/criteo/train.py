"""Trains a DLRM on data in the form of Criteo's click logs, with torch, with recfuse, or with both in turns.

    python examples/criteo/train.py

generates a sample and needs no data. `--train FILE... --test FILE...` reads your files: README.md has the
forms. Both engines begin with the same weights and get the same batches. The last table compares them.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import sample
import torch
from numpy.typing import NDArray
from read import DENSE, TABLES, Batch, read
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm

import recfuse

ENGINES = ("torch", "recfuse")
# eps 1e-8 as in FBGEMM. With torch's 1e-10 the step of a gradient that is only rounding has the full length.
OPTIMIZERS: dict[str, dict[str, Any]] = {"Adagrad": {"eps": 1e-8}, "SGD": {}}
WARM_UP = 5  # steps that are not timed


class DLRM(nn.Module):
    """Bottom MLP, a table a category, dot interaction, top MLP (Naumov et al., 2019).

    It has the names of facebookresearch/dlrm.
    """

    def __init__(self, rows: Sequence[int], dim: int, hidden: int = 64) -> None:
        """`rows` are the rows of the tables."""
        super().__init__()
        vectors = len(rows) + 1
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(count, dim, mode="sum", sparse=True) for count in rows)
        for table in self.emb_l:
            nn.init.uniform_(table.weight, -(table.num_embeddings**-0.5), table.num_embeddings**-0.5)
        self.bot_l = self.mlp(DENSE, hidden, dim)
        self.bot_l.append(nn.ReLU())
        self.top_l = self.mlp(dim + vectors * (vectors - 1) // 2, hidden, hidden, 1)
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, offset=-1), persistent=False)

    @staticmethod
    def mlp(*widths: int) -> nn.Sequential:
        """Returns linear layers with ReLU between them."""
        layers = [layer for sizes in pairwise(widths) for layer in (nn.Linear(*sizes), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    def apply_emb(
        self, lS_o: Tensor, lS_i: Tensor, emb_l: nn.ModuleList, v_W_l: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Returns the pooled rows [batch, dim] of each table; `recfuse.swap` makes one call of this loop."""
        row_weights = [w if w is None else w.gather(0, i) for w, i in zip(v_W_l, lS_i, strict=True)]
        return [
            table(i, o, per_sample_weights=w)
            for table, i, o, w in zip(emb_l, lS_i, lS_o, row_weights, strict=True)
        ]

    def forward(self, dense: Tensor, lS_o: Tensor, lS_i: Tensor) -> Tensor:
        """Returns logits [batch] of dense values [batch, 13], offsets and indices [26, batch]."""
        x = self.bot_l(dense)
        pooled = self.apply_emb(lS_o, lS_i, self.emb_l, [None] * len(self.emb_l))
        vectors = torch.stack([x, *pooled], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return self.top_l(torch.cat([x, products[:, self.pairs[0], self.pairs[1]]], dim=1)).squeeze(1)


class Engine:
    """A model with its optimizers, and the times of its steps."""

    def __init__(self, name: str, model: DLRM, optimizer: str, lr: float) -> None:
        """`name` "recfuse" swaps the tables and updates them inside `backward()`."""
        self.name, self.model = name, model
        self.seconds: list[float] = []
        dense = [*model.bot_l.parameters(), *model.top_l.parameters()]
        options = {"lr": lr, **OPTIMIZERS[optimizer]}
        if name == "recfuse":
            print(recfuse.swap(model))
            tables = getattr(recfuse.optim, optimizer)(recfuse.optim.embedding_parameters(model), **options)
        else:
            tables = getattr(torch.optim, optimizer)(model.emb_l.parameters(), **options)
        self.optimizers = [tables, getattr(torch.optim, optimizer)(dense, **options)]

    def step(self, inputs: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        """Makes a step of training; returns the loss before it."""
        synchronize(labels.device)
        begin = time.perf_counter()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(self.model(*inputs), labels)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        synchronize(labels.device)
        self.seconds.append(time.perf_counter() - begin)
        return loss.detach()


def synchronize(device: torch.device) -> None:
    """Waits for a GPU; its calls return before it has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def to_device(batch: Batch, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor]:
    """Returns the inputs of a model and the labels. Each bag has one lookup."""
    indices = torch.from_numpy(np.ascontiguousarray(batch.indices.T)).to(device)
    offsets = torch.arange(len(batch.labels), device=device).expand(TABLES, -1)
    return (torch.from_numpy(batch.dense).to(device), offsets, indices), torch.from_numpy(batch.labels).to(
        device
    )


def auc(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    """Returns the area under the ROC curve: the chance that a click has a higher score than another sample.

    Equal scores count one half: each has the mean rank of its group. Raises ValueError for scores that are
    not finite, and for samples of one class.
    """
    clicks = int(np.count_nonzero(labels))
    others = len(labels) - clicks
    if not np.isfinite(scores).all():
        raise ValueError("AUC: a score is not finite. Try a smaller --lr.")
    if not clicks or not others:
        raise ValueError(
            f"AUC: found {clicks} clicks and {others} other samples; expected at least one of both"
        )
    _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    mean_ranks = np.cumsum(sizes) - (sizes - 1) / 2
    return float((mean_ranks[group][labels != 0].sum() - clicks * (clicks + 1) / 2) / (clicks * others))


def train(engines: Sequence[Engine], batches: Iterator[Batch], device: torch.device, report: int) -> None:
    """Trains all engines on each batch in turns, and prints their losses every `report` steps."""
    bar = tqdm(batches, desc="training", unit=" steps", delay=2, disable=None)
    for number, batch in enumerate(bar, 1):
        inputs, labels = to_device(batch, device)
        order = engines if number % 2 else engines[::-1]
        losses = {engine.name: engine.step(inputs, labels) for engine in order}
        if number % report == 0:
            texts = [f"{engine.name} {losses[engine.name].item():.4f}" for engine in engines]
            tqdm.write(f"step {number}: loss {', '.join(texts)}", file=sys.stdout)


@torch.inference_mode()
def evaluate(
    engines: Sequence[Engine], batches: Iterator[Batch], device: torch.device
) -> dict[str, tuple[float, float]]:
    """Returns the loss and the AUC of each engine over all batches."""
    labels: list[Tensor] = []
    logits: dict[str, list[Tensor]] = {engine.name: [] for engine in engines}
    for batch in tqdm(batches, desc="testing", unit=" batches", delay=2, disable=None):
        inputs, clicks = to_device(batch, device)
        labels.append(clicks.cpu())
        for engine in engines:
            logits[engine.name].append(engine.model(*inputs).cpu())
    if not labels:
        raise ValueError("no samples to test with")
    expected = torch.cat(labels)
    results = {}
    for name, parts in logits.items():
        scores = torch.cat(parts)
        loss = binary_cross_entropy_with_logits(scores, expected).item()
        results[name] = loss, auc(expected.numpy(), scores.numpy())
    return results


def print_table(engines: Sequence[Engine], results: dict[str, tuple[float, float]]) -> None:
    """Prints loss, AUC and the median time of a step of each engine."""
    print(f"\n{'engine':<10}{'test loss':>10}{'AUC':>9}{'ms a step':>11}   quartiles")
    medians: dict[str, float] = {}
    for engine in engines:
        timed = np.array(engine.seconds[WARM_UP:] or engine.seconds) * 1e3
        low, median, high = np.percentile(timed, [25, 50, 75])
        loss, area = results[engine.name]
        print(f"{engine.name:<10}{loss:>10.4f}{area:>9.4f}{median:>11.2f}   {low:.2f} to {high:.2f}")
        medians[engine.name] = median
    if len(engines) == 2:
        apart, ratio = abs(results["torch"][1] - results["recfuse"][1]), medians["torch"] / medians["recfuse"]
        print(f"recfuse is {ratio:.2f} times as fast as torch; their AUCs differ by {apart:.6f}")


def parse_arguments() -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=[*ENGINES, "both"], default="both")
    parser.add_argument("--train", nargs="+", type=Path, metavar="FILE", help="default: a generated sample")
    parser.add_argument("--test", nargs="+", type=Path, metavar="FILE", help="required with --train")
    parser.add_argument("--samples", type=int, default=50_000, help="of the generated sample")
    parser.add_argument("--form", choices=["tsv", "npy"], default="tsv", help="of the generated sample")
    parser.add_argument("--rows", type=int, default=20_000, help="rows of each table")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, help="most steps; default: all samples once")
    parser.add_argument("--test-steps", type=int, help="most batches to test with; default: all")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="Adagrad")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--report", type=int, default=50, help="steps between two losses")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if (arguments.train is None) != (arguments.test is None):
        parser.error("--train and --test: found a single value; expected both or neither")
    for name in ("samples", "rows", "dim", "batch", "report"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: found {getattr(arguments, name)}; expected a positive integer")
    return arguments


def main() -> None:
    """Trains and tests."""
    arguments = parse_arguments()
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch's Adagrad warns without a choice
    torch.manual_seed(arguments.seed)
    model = DLRM([arguments.rows] * TABLES, arguments.dim).to(arguments.device)
    names = ENGINES if arguments.engine == "both" else (arguments.engine,)
    engines = [Engine(name, copy.deepcopy(model), arguments.optimizer, arguments.lr) for name in names]
    with tempfile.TemporaryDirectory() as folder:
        training, testing = arguments.train, arguments.test
        if training is None:
            print(f"generating {arguments.samples:,} samples", flush=True)
            paths = sample.write(
                Path(folder), arguments.form, arguments.samples, arguments.samples // 5 + 1, arguments.seed
            )
            training, testing = paths[:1], paths[1:]
        rows = [arguments.rows] * TABLES
        batches = islice(read(training, rows, arguments.batch), arguments.steps)
        train(engines, batches, arguments.device, arguments.report)
        if not engines[0].seconds:
            raise ValueError("no samples to train on")
        tests = islice(read(testing, rows, arguments.batch), arguments.test_steps)
        results = evaluate(engines, tests, arguments.device)
    print_table(engines, results)


if __name__ == "__main__":
    main()
