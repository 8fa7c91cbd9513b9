"""Tables, batches and timing for the GPU benchmark of many heterogeneous tables.

A *subject* is the object of a measurement: the tables of a model of RecFlex, or equal tables, and their
lookups.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cached_property
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from common.batches import Batch, model_batches
from common.settings import Setting
from fused_embedding_bag import bench
from recfuse.data import workloads

# Seeds of batches, different from those of the batches of one size and from each other.
_TUNING_SEEDS, _TEST_SEEDS = 1_000_000, 2_000_000


class Subject:
    """Tables, and batches for them. Results are cached."""

    index_dtype = torch.int32

    def __init__(
        self,
        name: str,
        rows: Sequence[int],
        dims: Sequence[int],
        bounds: Sequence[int | None],
        setting: FusedSetting,
    ) -> None:
        """Creates the tables, [rows, dim] each. `bounds`: most lookups of a bag by feature; None:
        unbounded."""
        self.name, self.rows, self.dims, self.bounds = name, list(rows), list(dims), list(bounds)
        self.setting, self.device = setting, setting.device
        generator = torch.Generator(self.device).manual_seed(setting.arguments.seed)
        self._tables = {
            torch.float32: [
                torch.randn(count, dim, device=self.device, generator=generator)
                for count, dim in zip(rows, dims, strict=True)
            ]
        }
        self._batches: dict[int, list[Batch]] = {}
        self.kept: dict[tuple[str, torch.dtype], Any] = {}  # cached candidates and plans

    def tables(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """The tables in a type."""
        if dtype not in self._tables:
            self._tables[dtype] = [table.to(dtype) for table in self._tables[torch.float32]]
        return self._tables[dtype]

    @property
    def features(self) -> int:
        """A feature per table."""
        return len(self.rows)

    @property
    def output_dim(self) -> int:
        """Columns of the output."""
        return sum(self.dims)

    def make(self, sizes: Sequence[int], first_seed: int) -> list[Batch]:
        """Batches of these sizes, the first of them from `first_seed`."""
        raise NotImplementedError

    def batches(self, size: int) -> list[Batch]:
        """`--num-batches` batches of one size."""
        if size not in self._batches:
            seed, count = self.setting.arguments.seed, self.setting.arguments.num_batches
            self._batches[size] = self.make([size] * count, seed + 1)
        return self._batches[size]

    @cached_property
    def tuning_batches(self) -> list[Batch]:
        """Batches of the published sizes, for the tuner."""
        arguments = self.setting.arguments
        sizes = workloads.batch_sizes(arguments.tuning_batches, arguments.seed).tolist()
        return self.make(sizes, arguments.seed + _TUNING_SEEDS)

    @cached_property
    def test_batches(self) -> list[Batch]:
        """Other batches of the published sizes."""
        arguments = self.setting.arguments
        sizes = workloads.batch_sizes(arguments.test_batches, arguments.seed + 1).tolist()
        return self.make(sizes, arguments.seed + _TEST_SEEDS)


class ModelSubject(Subject):
    """A model of RecFlex, or a variant of it."""

    def __init__(self, name: str, setting: FusedSetting) -> None:
        """`name`: as `recfuse.workloads.model` takes it."""
        self.model = workloads.model(name, seed=setting.arguments.seed)
        bounds = [_bound(self.model.groups[number]) for number in self.model.group_of]
        super().__init__(name, self.model.rows, self.model.dims, bounds, setting)

    def make(self, sizes: Sequence[int], first_seed: int) -> list[Batch]:
        """Generated with a thread for each core."""
        seeds = range(first_seed, first_seed + len(sizes))
        return model_batches(self.model, sizes, seeds, self.device)


def _bound(group: workloads.Group) -> int | None:
    """Most lookups of a bag."""
    if group.deviation == 0:
        return int(group.mean)
    return int(group.maximum) if isfinite(group.maximum) else None


@bench.setting
class FusedSetting(Setting):
    """The subjects of a run so far, and their limits."""

    def __init__(self, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
        """`arguments`: the benchmark's."""
        super().__init__(parser, arguments)
        self._subjects: dict[str, ModelSubject] = {}

    @cached_property
    def ceilings(self) -> Any:
        """Limits of subjects."""
        from fused_embedding_bag.limits import Ceilings

        return Ceilings(self.copy_speed)

    def subject(self, name: str) -> ModelSubject:
        """Returns the subject of a model."""
        if name not in self._subjects:
            self._subjects[name] = ModelSubject(name, self)
        return self._subjects[name]

    def drop(self, name: str) -> None:
        """Releases a subject's memory and all of its caches."""
        self._subjects.pop(name, None)
        self.release()


def right_output(subject: Subject, batch: Batch, dtype: torch.dtype) -> Tensor:
    """Returns the output in float64 [size, output_dim], summed by torch."""
    pooled = [
        torch.nn.functional.embedding_bag(rows, table.double(), starts, mode="sum")
        for table, (rows, starts) in zip(subject.tables(dtype), batch.parts, strict=True)
    ]
    return torch.cat(pooled, dim=1)
