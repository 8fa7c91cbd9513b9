"""Tuning feature by feature, each in its own launch: the peer of the two-stage strategy.

Source: Pan et al., RecFlex, SC 2024, section II-C, solution 1 (separate and combine).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from recfuse.data.collection import Jagged
from recfuse.ops.schedules import CHOSEN, EXPECTED
from recfuse.plan.device import architecture
from recfuse.tuner.collection.candidates import FeatureClass, classes_of
from recfuse.tuner.collection.problem import FusedBench, FusedProblem
from recfuse.tuner.compile import compile_all

_ROUNDS = 5
_BATCHES = 4
_COLUMN = 6  # of a feature's first column, in a row of `features`


def tune_separately(
    collection: torch.nn.Module,
    batches: Iterable[Any],
    *,
    features: Sequence[int] | None = None,
    progress: bool | None = None,
    seed: int = 0,
) -> Tensor:
    """Returns for each feature the schedule that is fastest in a launch of its own.

    Args:
        collection: a :class:`recfuse.nn.FusedEmbeddingBagCollection` on a CUDA device.
        batches: as for :func:`recfuse.tune`.
        features: numbers of the features to tune; the others keep the default. None: all.
        progress: show bars; None: on a terminal.
        seed: of the order of the candidates.

    Returns:
        Schedules, int32 ``[features, 5]`` on the CPU, in the form of the operator.

    Raises:
        As :func:`recfuse.tune`.
    """
    problem = FusedProblem.of(collection, batches)
    chosen = problem.defaults()
    selected = set(range(len(problem.tables)) if features is None else features)
    with torch.cuda.device(problem.device), torch.no_grad():
        arch = architecture(problem.device)
        for feature_class in classes_of(problem, FusedBench(problem)):
            members = [member for member, feature in enumerate(feature_class.features) if feature in selected]
            runnable = _compiled(problem, feature_class, members, arch, progress)
            hidden = None if progress is None else not progress
            for member in tqdm(members, desc=feature_class.name, disable=hidden, leave=False):
                usable = [number for number in feature_class.allowed[member] if number in runnable]
                feature = feature_class.features[member]
                chosen[feature, CHOSEN] = feature_class.candidates[
                    _fastest(problem, feature_class, feature, usable, seed), CHOSEN
                ]
    return torch.from_numpy(chosen)


def _compiled(
    problem: FusedProblem, feature_class: FeatureClass, members: list[int], arch: str, progress: bool | None
) -> set[int]:
    """Returns the candidates of a class whose kernels compile, and always the default."""
    if not members:
        return {0}
    bench = FusedBench(alone(problem, feature_class.features[members[0]]))
    jobs = {}
    for number in sorted({number for member in members for number in feature_class.allowed[member]}):
        row = feature_class.candidates[number].copy()
        row[EXPECTED] = bench.problem.expected_sixteenths[0]
        jobs[number] = bench.kernel(arch, row[None, None], 0, False)
    results = compile_all(jobs, progress=progress)
    return {0, *(number for number, result in results.items() if not isinstance(result, Exception))}


def _fastest(
    problem: FusedProblem, feature_class: FeatureClass, feature: int, numbers: list[int], seed: int
) -> int:
    """Returns the number of the candidate with the least median time; candidates in turns."""
    single = alone(problem, feature)
    bench = FusedBench(single)
    order = random.Random(seed).sample(numbers, len(numbers))
    sets = feature_class.candidates[order][:, None, :].copy()
    sets[:, 0, EXPECTED] = single.expected_sixteenths[0]
    times = np.median(bench.seconds(sets, 0, _ROUNDS, single.some_batches(_BATCHES)), axis=1)
    return order[int(np.argmin(times))]


def alone(problem: FusedProblem, feature: int) -> FusedProblem:
    """Returns a problem with one of the features, and its own output."""
    batches = []
    for batch in problem.batches:
        part = slice(feature * batch.bags, (feature + 1) * batch.bags + 1)
        host = batch.host_offsets[part]
        start, end = int(host[0]), int(host[-1])
        batches.append(
            Jagged(
                batch.indices[start:end],
                batch.offsets[part] - start,
                None if batch.weights is None else batch.weights[start:end],
                np.ascontiguousarray(host - start),
                batch.bags,
            )
        )
    feature_class = problem.features[feature : feature + 1].copy()
    feature_class[0, _COLUMN] = 0
    return replace(
        problem,
        features=feature_class,
        tables=[problem.tables[feature]],
        batches=batches,
        expected_sixteenths=problem.expected_sixteenths[feature : feature + 1],
        output_dim=problem.tables[feature].dim,
    )
