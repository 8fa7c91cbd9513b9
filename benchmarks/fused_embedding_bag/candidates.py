"""The candidates for many tables on a GPU, by name: recfuse with and without a plan, and its peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import recfuse
from common.batches import Batch
from common.checks import left_out
from common.peers import CUDA_KINDS, fbgemm_usable
from fused_embedding_bag import bench
from fused_embedding_bag.native import never_staged, operator_run, schedules_of
from fused_embedding_bag.runs import compiled_run, fbgemm_run, loop_run, one_warp_run, padded_run
from fused_embedding_bag.setting import Subject
from fused_embedding_bag.streams import Run

BASELINE, COMPILED, PADDED = "torch", "torch.compile", "padded"
V1, V2, NBIT = (f"fbgemm {kind}" for kind in CUDA_KINDS)
ONE_WARP, DEFAULT, TUNED = "one warp a bag", "recfuse", "recfuse tuned"
UNCHECKED, UNSTAGED = "recfuse unchecked", "recfuse unstaged"
HALF_OUTPUTS = ", fp32 out"
NAMES = (BASELINE, COMPILED, PADDED, V1, V2, NBIT, ONE_WARP, DEFAULT, UNSTAGED, TUNED, UNCHECKED)
"""In the order in which they are shown."""
SLOW = (BASELINE, COMPILED, PADDED)
"""Candidates of milliseconds a batch, a large part of it on the host."""


@dataclass
class Tuned:
    """A plan, and the seconds of tuning; None: it was read from a file."""

    plan: Any  # recfuse.CollectionPlan
    seconds: float | None


def collection(subject: Subject, dtype: torch.dtype) -> recfuse.nn.FusedEmbeddingBagCollection:
    """recfuse's module with a copy of the tables."""
    bags = [
        torch.nn.EmbeddingBag.from_pretrained(table, mode="sum", freeze=True)
        for table in subject.tables(dtype)
    ]
    return recfuse.nn.FusedEmbeddingBagCollection.from_embedding_bags(bags)


def default_collection(subject: Subject, dtype: torch.dtype) -> recfuse.nn.FusedEmbeddingBagCollection:
    """Returns the untuned collection, cached for all figures."""
    return _kept(subject, "collection", dtype, lambda: collection(subject, dtype))


def tuned(subject: Subject, dtype: torch.dtype) -> Tuned:
    """Tunes on the tuning batches, or reads the plan from `--plans`, where it also writes it."""

    def make() -> Tuned:
        arguments, path = subject.setting.arguments, None
        if arguments.plans is not None:
            path = arguments.plans / f"{subject.name}-{str(dtype).removeprefix('torch.')}.json"
            if path.exists():
                return Tuned(recfuse.Plan.load(path), None)
        batches = [(batch.indices, batch.offsets) for batch in subject.tuning_batches]
        module, start = default_collection(subject, dtype), time.perf_counter()
        plan = recfuse.tune(module, batches, budget_s=arguments.tune_budget)
        result = Tuned(plan, time.perf_counter() - start)
        if path is not None:
            plan.save(path)
        return result

    return _kept(subject, "plan", dtype, make)


def tuned_collection(subject: Subject, dtype: torch.dtype) -> recfuse.nn.FusedEmbeddingBagCollection:
    """Returns recfuse's module with its plan, cached for all figures."""

    def make() -> recfuse.nn.FusedEmbeddingBagCollection:
        module = collection(subject, dtype)
        tuned(subject, dtype).plan.apply(module)
        return module

    return _kept(subject, "tuned collection", dtype, make)


def _kept(subject: Subject, what: str, dtype: torch.dtype, make: Callable[[], Any]) -> Any:
    if (what, dtype) not in subject.kept:
        subject.kept[what, dtype] = make()
    return subject.kept[what, dtype]


def fused_run(module: torch.nn.Module) -> Run:
    """Returns a call of a module that takes all features at once."""

    @torch.inference_mode()
    def run(batch: Batch) -> Tensor:
        return module(batch.indices, batch.offsets)

    return run


@bench.peer(BASELINE)
def torch_loop(subject: Subject, dtype: torch.dtype) -> Run:
    """torch's modules in a loop."""
    return loop_run(subject.tables(dtype))


@bench.peer(COMPILED)
def torch_compiled(subject: Subject, dtype: torch.dtype) -> Run:
    """The loop under torch.compile."""
    return compiled_run(subject.tables(dtype))


@bench.peer(PADDED)
def torch_padded(subject: Subject, dtype: torch.dtype) -> Run:
    """Padded indices where bags have a bound."""
    return padded_run(subject, dtype)


@bench.peer(*(name + suffix for name in (V1, V2, NBIT) for suffix in ("", HALF_OUTPUTS)))
def fbgemm(name: str, subject: Subject, dtype: torch.dtype) -> Run:
    """FBGEMM's modules; `HALF_OUTPUTS`: half tables with an output of fp32, which is its default."""
    output = torch.float32 if name.endswith(HALF_OUTPUTS) else dtype
    return fbgemm_run(name.removesuffix(HALF_OUTPUTS).split()[1], subject, dtype, output)


@bench.peer(ONE_WARP)
def one_warp(subject: Subject, dtype: torch.dtype) -> Run:
    """A warp a bag."""
    return one_warp_run(subject, dtype)


@bench.peer(DEFAULT)
def by_default(subject: Subject, dtype: torch.dtype) -> Run:
    """recfuse without a plan."""
    return fused_run(default_collection(subject, dtype))


@bench.peer(UNSTAGED)
def unstaged(subject: Subject, dtype: torch.dtype) -> Run:
    """recfuse without a plan, by schedules that stage no table, with its expected lookups of each feature."""
    module, kept = default_collection(subject, dtype), []

    def options(batch: Batch) -> dict[str, Any]:
        if not kept:
            module(batch.indices, batch.offsets)  # calibrates the expected lookups
            kept.append(torch.from_numpy(never_staged(schedules_of(module)[0])))
        return {"schedules": kept[0]}

    return operator_run(module, options)


@bench.peer(TUNED)
def by_plan(subject: Subject, dtype: torch.dtype) -> Run:
    """recfuse with its plan."""
    return fused_run(tuned_collection(subject, dtype))


@bench.peer(UNCHECKED)
def unchecked(subject: Subject, dtype: torch.dtype) -> Run:
    """With its plan and without bounds checks, because FBGEMM's are off."""
    module = tuned_collection(subject, dtype)
    return operator_run(
        module, lambda batch: {"bounds_check": "off", "schedules": module.schedules, "warps": module.warps}
    )


def make_runs(
    subject: Subject, names: Iterable[str], dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Run], list[str]]:
    """Returns candidates by name, and notes on those that are left out, with reasons."""
    runs, limit = {}, subject.setting.arguments.compile
    usable, notes = fbgemm_usable(names, "fbgemm-gpu")
    for name in usable:
        if name == COMPILED and subject.features > limit:
            notes.append(
                f"{subject.name}: torch.compile is left out: {subject.features} features, which compile for "
                f"minutes, and --compile allows {limit}"
            )
            continue
        if name == PADDED:
            bounded = sum(bound is not None for bound in subject.bounds)
            notes.append(
                f"{subject.name}: padded: {bounded} of {subject.features} features have bounded bags; "
                "nn.EmbeddingBag pools the others"
            )
        try:
            runs[name] = _kept(subject, name, dtype, partial(bench.peers[name], subject, dtype))
        except Exception as error:
            notes.append(left_out(subject.name, name, error))
    return runs, notes
