"""Refuses, at construction, pipelines that prefetch into caches for models without a cache."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn
from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist
from torchrec.distributed.train_pipeline.pipeline_stage import SparseDataDistUtil

from recfuse.errors import ArgumentValueError
from recfuse.torchrec.kernels import FusedKernel
from recfuse.torchrec.options import KERNELS, WHERE
from recfuse.torchrec.sharder import kernels_of


def _check(model: nn.Module, pipeline: str) -> None:
    """Raise ValueError if recfuse updates tables of a model and no other table of the model has a cache."""
    kernels = list(kernels_of(model))
    cached = any(
        table.compute_kernel not in KERNELS for kernel in kernels for table in kernel.config.embedding_tables
    )
    if not cached and any(isinstance(kernel, FusedKernel) for kernel in kernels):
        raise ArgumentValueError(
            f"{WHERE}: {pipeline} has nothing to prefetch, since no table of the model has a cache. Use "
            "TrainPipelineSparseDist, or StagedTrainPipeline without prefetch_stream."
        )


def _check_model(kind: type[Any], pipeline: str, argument: str | None = None) -> None:
    """Wrap a constructor so that it checks its model; with ``argument`` only if this argument is passed."""
    begin = kind.__init__
    signature = inspect.signature(begin)

    @functools.wraps(begin)
    def checked(self: Any, *arguments: Any, **named: Any) -> None:
        arguments_by_name = signature.bind(self, *arguments, **named).arguments
        if argument is None or arguments_by_name.get(argument) is not None:
            _check(arguments_by_name["model"], pipeline)
        begin(self, *arguments, **named)

    kind.__init__ = checked


def refuse_prefetching() -> None:
    """Wrap TorchRec's classes that prefetch into caches, so that they check their model; called once."""
    _check_model(PrefetchTrainPipelineSparseDist, "PrefetchTrainPipelineSparseDist")
    _check_model(SparseDataDistUtil, "SparseDataDistUtil with prefetch_stream", "prefetch_stream")
