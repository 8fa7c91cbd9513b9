"""The candidates on a GPU: torch, eager and compiled, FBGEMM's table-batched embeddings, and recfuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import recfuse
from common.checks import TOLERANCES
from common.peers import fbgemm_module, fbgemm_usable
from embedding_bag import bench
from embedding_bag.setting import BagSetting, Pass, Workload, each

BASELINE, TUNED = "torch", "recfuse tuned"
NAMES = (
    "torch", "torch.compile", "fbgemm v1", "fbgemm v2",
    "recfuse", TUNED, "torch fp16", "recfuse fp16", "recfuse bf16",
)  # fmt: skip
_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Candidate:
    """A function that pools tables, and its expected values."""

    run: Pass
    weights: Sequence[Tensor]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of its tables."""
        return self.weights[0].shape[1] * self.weights[0].element_size()

    @property
    def tolerance(self) -> float:
        """Largest error that rounding explains."""
        return TOLERANCES[self.weights[0].dtype]


def bag(schedule: str, weights: Sequence[Tensor]) -> Pass:
    """recfuse's operator with a schedule, "" for the default."""

    def run(table: int, indices: Tensor, offsets: Tensor) -> Tensor:
        return recfuse.embedding_bag(
            indices, weights[table], offsets, mode="sum", include_last_offset=True, schedule=schedule
        )

    return _inference(each(run))


def torch_bag(weights: Sequence[Tensor]) -> Pass:
    """torch's module, unchanged."""
    return _modules([_module(torch.nn.EmbeddingBag, weight) for weight in weights])


def _compiled_bag(weights: Sequence[Tensor]) -> Pass:
    """torch's function under torch.compile: one program, which takes the table as an argument."""

    @torch.compile(dynamic=False)
    def pool(indices: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return torch.nn.functional.embedding_bag(
            indices, weight, offsets, mode="sum", include_last_offset=True
        )

    return _inference(each(lambda table, indices, offsets: pool(indices, weights[table], offsets)))


def _recfuse_bag(weights: Sequence[Tensor]) -> Pass:
    """recfuse's module, untuned."""
    return _modules([_module(recfuse.nn.EmbeddingBag, weight) for weight in weights])


def _module(kind: type[torch.nn.EmbeddingBag], weight: Tensor) -> torch.nn.EmbeddingBag:
    return kind.from_pretrained(weight, mode="sum", include_last_offset=True)


def _modules(modules: Sequence[Callable[..., Tensor]]) -> Pass:
    return _inference(each(lambda table, indices, offsets: modules[table](indices, offsets)))


def _inference(run: Pass) -> Pass:
    return torch.inference_mode()(run)


def tune(setting: BagSetting, hotness: str) -> recfuse.Plan:
    """Tunes on a table whose trace is not among the timed traces."""
    trace = setting.trace(hotness, len(setting.weights))
    arguments = setting.arguments
    size = (arguments.batch_size, arguments.num_indices_per_lookup)
    batches = [setting.part(trace, *size, number) for number in range(arguments.num_batches)]
    module = _module(recfuse.nn.EmbeddingBag, setting.weights[0])
    return recfuse.tune(module, batches, budget_s=arguments.tune_budget)


def tuned_candidate(setting: BagSetting, plan: recfuse.Plan, workload: Workload) -> Candidate:
    """recfuse's modules with a plan; if it pins rows, the hottest rows of each table."""
    modules = [_module(recfuse.nn.EmbeddingBag, weight) for weight in setting.weights]
    for module, trace in zip(modules, workload.traces, strict=True):
        plan.apply(module, trace)
    return Candidate(_modules(modules), setting.weights)


def make_candidates(setting: BagSetting, names: Iterable[str]) -> tuple[dict[str, Candidate], list[str]]:
    """Returns candidates by name (all of `NAMES` except the tuned one), and notes on those that are left
    out."""
    usable, notes = fbgemm_usable(names, "fbgemm-gpu")
    return {name: bench.peers[name](setting.weights) for name in usable}, notes


@bench.peer("torch")
def plain_torch(weights: Sequence[Tensor]) -> Candidate:
    """torch, unchanged."""
    return Candidate(torch_bag(weights), weights)


@bench.peer("torch.compile")
def compiled_torch(weights: Sequence[Tensor]) -> Candidate:
    """torch's function, compiled."""
    return Candidate(_compiled_bag(weights), weights)


@bench.peer("fbgemm v1", "fbgemm v2")
def fbgemm(name: str, weights: Sequence[Tensor]) -> Candidate:
    """FBGEMM's module, a table each."""
    modules = [fbgemm_module(name.split()[1], [weight], torch.int64) for weight in weights]
    run = each(lambda table, indices, offsets: modules[table](indices, offsets))
    return Candidate(torch.no_grad()(run), weights)


@bench.peer("recfuse")
def plain_recfuse(weights: Sequence[Tensor]) -> Candidate:
    """recfuse, untuned."""
    return Candidate(_recfuse_bag(weights), weights)


@bench.peer("torch fp16", "recfuse fp16", "recfuse bf16")
def half(name: str, weights: Sequence[Tensor]) -> Candidate:
    """Tables of half the bytes."""
    library, dtype = name.split()
    halves = [weight.to(_HALF[dtype]) for weight in weights]
    return Candidate((torch_bag if library == "torch" else _recfuse_bag)(halves), halves)
