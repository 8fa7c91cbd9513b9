"""The input of a search over a collection (features and batches on one GPU), and the bench that times it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recfuse import _C
from recfuse._codes import DTYPES, FEATURE, INTEGER_NAMES, row_bytes
from recfuse.data.collection import Jagged, jagged_batches, mean_lengths
from recfuse.errors import ArgumentValueError
from recfuse.nn.collection_view import CollectionView, NativeCall, native_call, view_of
from recfuse.nn.mapping import size_of, staged_features
from recfuse.ops import HAS_CUDA_KERNELS, check, fused_embedding_bag
from recfuse.ops.schedules import EXPECTED, FIELDS, expectations
from recfuse.plan.features import CallForm, FeatureTable, tables_of
from recfuse.tuner.compile import Job, compile_launches
from recfuse.tuner.native import address, alignment, float_weights, integer_codes, lookups, stream_of

_BUFFER, _WEIGHT_OFFSET, _DIM, _COLUMN = map(FEATURE.at, ("buffer", "weight_offset", "dim", "output_column"))


@dataclass(frozen=True)
class FusedProblem:
    """Features, and batches of lookups for all of them."""

    buffers: list[Tensor]
    features: NDArray[np.int64]  # [features, 7], in the operator's form
    tables: list[FeatureTable]  # a table per feature
    batches: list[Jagged]
    expected_sixteenths: NDArray[np.int32]  # [features] lookups per bag; -1: always empty
    output_dim: int

    @classmethod
    def of(cls, collection: torch.nn.Module, batches: Iterable[Any]) -> FusedProblem:
        """Build the problem from a collection on a GPU and its calls; raise the errors of
        `recfuse.tune`.
        """
        view = view_of(collection, "recfuse.tune")
        _check_kernel(view)
        tables = tables_of(view)
        lookups = jagged_batches(batches, len(tables), view.device, view.lookups_of, "recfuse.tune")
        forms = [_form(batch) for batch in lookups]
        if wrong := [number for number, form in enumerate(forms) if form != forms[0]]:
            raise ArgumentValueError(
                f"recfuse.tune: batches[{wrong[0]}] has {forms[wrong[0]]}, batches[0] has {forms[0]}; "
                "expected batches of one form, since one kernel serves them"
            )
        if not any(batch.indices.numel() for batch in lookups):
            raise ArgumentValueError("recfuse.tune: all batches are empty; expected lookups to time")
        expected = expectations(mean_lengths(lookups, len(tables)))
        problem = cls(view.weights, view.feature_rows, tables, lookups, expected, view.output_dim)
        features, schedules = torch.from_numpy(problem.features), torch.from_numpy(problem.defaults())
        with torch.no_grad():
            for batch in lookups:
                tensors = batch.indices, batch.offsets, problem.output_dim, batch.weights
                fused_embedding_bag(problem.buffers, features, *tensors, schedules=schedules)
        check(problem.device)  # raises an error for an invalid index or offset of the batches
        return problem

    @property
    def device(self) -> torch.device:
        """The device of the buffers and batches."""
        return self.buffers[0].device

    @property
    def form(self) -> CallForm:
        """The types of the tensors of a call."""
        return _form(self.batches[0])

    @property
    def call(self) -> NativeCall:
        """The first argument of `_C`'s functions. The tensors whose addresses it holds must
        outlive its use.
        """
        return native_call(self.buffers, self.features, self.output_dim)

    @property
    def output_dtype(self) -> torch.dtype:
        """The dtype of the buffers if they agree, else float32."""
        return DTYPES[self.call[2]]

    @property
    def bags(self) -> float:
        """Bags of a feature per batch: the median of the batches."""
        return float(np.median([batch.bags for batch in self.batches]))

    def alignment(self, feature: int) -> tuple[int, int]:
        """Return the alignments of a feature's rows and of its columns in the output: powers of
        two up to 16, in bytes.
        """
        described = self.features[feature]
        buffer = self.buffers[described[_BUFFER]]
        begin, size, column = (int(described[field]) for field in (_WEIGHT_OFFSET, _DIM, _COLUMN))
        row = address("weights", buffer), *(row_bytes(each, buffer.dtype) for each in (begin, size))
        out = (row_bytes(each, self.output_dtype) for each in (column, self.output_dim))
        return alignment(*row), alignment(*out)

    def defaults(self) -> NDArray[np.int32]:
        """Return the default schedules `[features, 5]`, with the expected lookups."""
        rows = np.zeros((len(self.tables), FIELDS), np.int32)
        rows[:, EXPECTED] = self.expected_sixteenths
        return rows

    def some_batches(self, number: int) -> list[int]:
        """Return the numbers of several batches with lookups, from small to large."""
        sizes = np.array([batch.indices.numel() for batch in self.batches])
        order = np.argsort(sizes, kind="stable")[int((sizes == 0).sum()) :]
        steps = np.linspace(0, len(order) - 1, min(number, len(order))).round().astype(int)
        return [int(order[step]) for step in steps]


def _check_kernel(view: CollectionView) -> None:
    device = view.device
    if device.type == "cpu":
        raise NotImplementedError(
            "recfuse.tune: the collection is on the CPU, whose fused kernel has nothing to tune. Move the "
            "collection to the GPU to tune for, by collection.cuda()."
        )
    if device.type != "cuda" or not HAS_CUDA_KERNELS or not view.has_kernel:
        raise NotImplementedError(
            f"recfuse.tune: no fused kernel for this collection on {device}; expected float32, float16 or "
            "bfloat16 tables on one CUDA device"
        )


class FusedBench:
    """The batches of a problem, prepared for repeated pooling."""

    def __init__(self, problem: FusedProblem) -> None:
        """Store addresses, and references to the tensors that own them."""
        self.problem = problem
        bags = max(batch.bags for batch in problem.batches)
        # All batches share one output, because torch's allocator reuses the memory of outputs in a model.
        self._output = torch.empty(
            (bags, problem.output_dim), dtype=problem.output_dtype, device=problem.device
        )
        self._weights = float_weights(problem.batches)
        self.call = problem.call
        self._batches = [
            (
                *lookups(batch),
                address("per_sample_weights", weights),
                address("output", self._output),
                batch.host_offsets.ctypes.data,
            )
            for batch, weights in zip(problem.batches, self._weights, strict=True)
        ]

    def candidates(self, feature: int) -> NDArray[np.int32]:
        """Return the schedules that a feature can run, `[schedules, 5]`."""
        rows = _C.fused_embedding_bag_candidates(self.call, feature)
        return np.array(rows, np.int32).reshape(-1, FIELDS)

    def staged(self) -> list[int]:
        """Return the features whose tables are staged by default, in the batch with the most lookups."""
        largest = max(self.problem.batches, key=lambda batch: batch.indices.numel())
        described = _C.fused_embedding_bag_describe(self.call, self.problem.defaults(), 0)
        size = size_of(self.problem.device)
        return staged_features(_C.fused_embedding_bag_map(described, largest.host_offsets, *size))

    def kernel(self, arch: str, sets: NDArray[np.int32], warps: int, timed: bool) -> Job:
        """Return the job that compiles a single kernel for several sets of schedules, and the kernels of
        batches with staged tables.
        """
        return partial(self._compile, arch, _sets(sets), warps, timed)

    def _compile(self, arch: str, sets: NDArray[np.int32], warps: int, timed: bool) -> dict[str, Any]:
        first = self.problem.batches[0]
        form = *integer_codes(first), first.weights is not None
        launches, _ = _C.fused_embedding_bag_lower(arch, self.call, *form, True, sets, warps, timed)
        return compile_launches(launches)

    def seconds(
        self,
        sets: NDArray[np.int32],
        warps: int,
        rounds: int,
        numbers: Sequence[int],
        timed: bool = False,
    ) -> NDArray[np.float64]:
        """Return seconds per batch `[sets, rounds]` of sets `[sets, features, 5]`, in turns,
        over several batches.
        """
        batches = [self._batches[number] for number in numbers]
        stream = stream_of(self.problem.device)
        return _C.fused_embedding_bag_measure(*stream, self.call, batches, _sets(sets), warps, rounds, timed)

    def cycles(self, sets: NDArray[np.int32], warps: int, numbers: Sequence[int]) -> NDArray[np.float64]:
        """Return the clock cycles `[sets, features]` of each feature's blocks, with all sets
        in one kernel.
        """
        return self.seconds(sets, warps, 1, numbers, True)


def _form(batch: Jagged) -> CallForm:
    indices, offsets = (INTEGER_NAMES[code] for code in integer_codes(batch))
    return CallForm(indices, offsets, batch.weights is not None)


def _sets(sets: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.ascontiguousarray(sets, np.int32)
