"""The tuner: :func:`recfuse.tune` measures schedules of a table, or of a collection, on your batches.

Sources. For one table: Jain et al., MICRO 2024, section VII (a static profiling framework), whose steps are
functions of ``steps``: they determine a possible gain, the number of warps, the station and distance of
prefetches, and the rows to pin. For a collection: Pan et al., RecFlex, SC 2024, section IV-A (two stages
under interference); ``collection``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any, cast

import torch

from recfuse._arguments import integer, real
from recfuse.data.table import hotness
from recfuse.errors import ArgumentTypeError, ArgumentValueError, a_type
from recfuse.nn.collection_view import is_collection
from recfuse.plan import CollectionPlan, Plan
from recfuse.plan.device import describe_device
from recfuse.tuner.log import now
from recfuse.tuner.table.problem import Problem

__all__ = ["tune"]

_BUDGET_S, _COLLECTION_BUDGET_S = 60.0, 120.0


def tune(
    module: torch.nn.Module,
    batches: Iterable[Any],
    budget_s: float | None = None,
    *,
    progress: bool | None = None,
    pin: bool | None = None,
    seed: int = 0,
    predict: bool = False,
    resume: str | os.PathLike[str] | None = None,
) -> Plan | CollectionPlan:
    """Find the fastest schedule of one table, or of each feature of a collection, by measurement.

    For one table on CUDA it tries warps an SM, stations, prefetch distances, threads, block sizes, and rows
    pinned in L2; on the CPU the prefetch distance. For a collection on CUDA it measures, at each number of
    warps an SM, schedules of all features while they run together, then whole kernels. The plan contains
    every decision. A schedule must be more than 1 % faster than the defaults in a last run of both in turns.

    Batches are timed in turns, so that caches hold the rows of other batches. Give several batches as they
    really occur: a single batch finds its rows in L2 each time.

    Args:
        module: a :class:`recfuse.nn.EmbeddingBag` or ``torch.nn.EmbeddingBag``, or on CUDA a
            :class:`recfuse.nn.FusedEmbeddingBagCollection` or ``FusedEmbeddingBagList``. It is not changed:
            see :meth:`recfuse.Plan.apply`.
        batches: the arguments of its calls. For a table a tensor ``[bags, n]``, or a tuple ``(input,
            offsets)`` or ``(input, offsets, per_sample_weights)``. For a collection a tuple ``(indices,
            offsets)`` or ``(indices, offsets, per_sample_weights)``, feature by feature, or a
            KeyedJaggedTensor; for a swapped TorchRec collection a KeyedJaggedTensor or TensorDict; for a
            ``FusedEmbeddingBagList`` a tuple ``(offsets, indices)`` or ``(offsets, indices, row_weights)``,
            as its ``pool`` takes them.
        budget_s: about how many seconds to spend. The defaults are always measured. Default: 60, for a
            collection 120.
        progress: show progress bars. Default: on a terminal.
        pin: try to pin rows. True: on any GPU. False: never. Default: if lookups are skewed and their rows do
            not fit in L2 anyway. Not for a collection.
        seed: seed of the order of candidates, or of their mixture.
        predict: on CUDA, compile and measure only the warps, stations and distances that a model ranks in the
            first third. Not for a collection. Default: False, all are measured.
        resume: for a collection, a file of finished measurements. A call with the same collection, batches,
            seed and device continues from it.

    Returns:
        Plan or CollectionPlan: the plan. ``print`` it, ``plan.apply(module)``, ``plan.save(path)``.

    Raises:
        TypeError: a bad argument.
        ValueError: a bad argument.
        IndexError: an index of a batch outside the table.
        NotImplementedError: no kernel for this table, no way to compile it, or a collection on the CPU, whose
            kernel needs no tuning.

    Example:
        >>> table = recfuse.nn.EmbeddingBag(1000, 16, mode="sum")
        >>> batches = [torch.randint(1000, (64, 5)) for _ in range(3)]
        >>> plan = recfuse.tune(table, batches, budget_s=0.1)
        >>> plan.apply(table)

    Note:
        Tables are tuned on the CPU and on CUDA, collections on CUDA. A plan does not change gradients.

    Source: Jain et al., MICRO 2024, section VII; Pan et al., RecFlex, SC 2024, section IV-A.
    """
    collection = is_collection(module)
    if not collection and not isinstance(module, torch.nn.EmbeddingBag):
        raise ArgumentTypeError(
            f"recfuse.tune: module is {a_type(module)}; expected a recfuse.nn.EmbeddingBag, a "
            "torch.nn.EmbeddingBag, or a recfuse.nn.FusedEmbeddingBagCollection"
        )
    if budget_s is None:
        budget_s = _COLLECTION_BUDGET_S if collection else _BUDGET_S
    budget_s = real("recfuse.tune: budget_s", budget_s)
    seed = integer("recfuse.tune: seed", seed, 0, 2**63 - 1)
    if not budget_s >= 0:
        raise ArgumentValueError(f"recfuse.tune: budget_s is {budget_s}; expected >= 0")
    if collection:
        from recfuse.tuner.collection.search import tune_collection

        if pin:
            raise ArgumentValueError("recfuse.tune: pin is True; expected None or False for a collection")
        if predict:
            raise ArgumentValueError("recfuse.tune: predict is True; expected False for a collection")
        return tune_collection(module, batches, budget_s, progress=progress, seed=seed, resume=resume)
    if resume is not None:
        raise ArgumentValueError(f"recfuse.tune: resume is {resume!r}; expected None for a single table")
    start = time.monotonic()
    problem = Problem.of(cast(torch.nn.EmbeddingBag, module), batches)
    if problem.weight.is_cuda:
        from recfuse.tuner.table.gpu import search
    else:
        from recfuse.tuner.table.cpu import search
    trace = hotness(problem.batches)
    plan = search(problem, trace, start + budget_s, progress=progress, pin=pin, seed=seed, predict=predict)
    return Plan(
        **vars(plan),
        table=problem.table,
        trace=trace,
        device=describe_device(problem.weight.device),
        seconds=time.monotonic() - start,
        created=now(),
    )
