"""Inserts recfuse's kernels into TorchRec's sharded collections.

A sharded collection creates its lookups, and a lookup creates its kernels with
``GroupedPooledEmbeddingsLookup._create_embedding_kernel``. This module wraps only that method. The wrapper
creates recfuse's kernels inside a call of :class:`EmbeddingBagCollectionSharder`, in the calling thread
alone, or in the whole process after :func:`enable`; otherwise it calls TorchRec's method.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torchrec.distributed import embeddingbag
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig

from recfuse.errors import ArgumentValueError
from recfuse.torchrec.kernels import DenseKernel, FusedKernel, check_kernels
from recfuse.torchrec.options import KERNELS, WHERE

_sharding: contextvars.ContextVar[bool] = contextvars.ContextVar("recfuse_sharding", default=False)
_enabled = False
_create = GroupedPooledEmbeddingsLookup._create_embedding_kernel


@functools.wraps(_create)
def _create_kernel(
    self: GroupedPooledEmbeddingsLookup, config: GroupedEmbeddingConfig, *arguments: Any, **named: Any
) -> nn.Module:
    if not (_enabled or _sharding.get()):
        return _create(self, config, *arguments, **named)
    check_kernels(config)
    options = dict(zip(("device", "pg", "sharding_type", "env"), arguments, strict=False)) | named
    strategy = getattr(options.pop("env", None), "sharding_strategy", None)
    if getattr(strategy, "name", None) == "FULLY_SHARDED":
        raise ArgumentValueError(
            f"{WHERE}: ShardingStrategy.FULLY_SHARDED is not supported. Use DEFAULT or PER_MODULE, or "
            "TorchRec's own sharder."
        )
    if config.compute_kernel == EmbeddingComputeKernel.DENSE:
        return DenseKernel(config, **options)
    return FusedKernel(config, **options)


GroupedPooledEmbeddingsLookup._create_embedding_kernel = _create_kernel  # type: ignore[method-assign]


@contextmanager
def _with_kernels() -> Iterator[None]:
    token = _sharding.set(True)
    try:
        yield
    finally:
        _sharding.reset(token)


class EmbeddingBagCollectionSharder(embeddingbag.EmbeddingBagCollectionSharder):
    """TorchRec's sharder of ``EmbeddingBagCollection`` with recfuse's kernels.

    Pass it to ``DistributedModelParallel(model, sharders=[EmbeddingBagCollectionSharder()], ...)``. Sharding
    types, plans, ``fused_params``, ``apply_optimizer_in_backward``, checkpoints and pipelines are TorchRec's.

    Args:
        fused_params: as TorchRec's: ``optimizer`` (EXACT_SGD, EXACT_ADAGRAD, EXACT_ROWWISE_ADAGRAD, ADAM),
            ``learning_rate``, ``eps``, ``output_dtype``, ...
        qcomm_codecs_registry, sharded_module_order_overwrite: as TorchRec's.

    Raises:
        ValueError: in ``DistributedModelParallel``: a table whose compute kernel needs a cache, an optimizer
            or an option without a fused form; the message names the table or the option.

    Example:
        >>> from fbgemm_gpu.split_embedding_configs import EmbOptimType
        >>> fused_params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
        >>> sharder = recfuse.torchrec.EmbeddingBagCollectionSharder(fused_params=fused_params)
        >>> sharder.compute_kernels("table_wise", "cpu")
        ['fused']

    Note:
        Works on the CPU and on CUDA. Fused optimizers update the rows in the backward pass.

    Source: TorchRec (Ivchenko et al., RecSys 2022), for whose engine this is a kernel.
    """

    def shard(self, *arguments: Any, **named: Any) -> embeddingbag.ShardedEmbeddingBagCollection:
        """Return the sharded collection, as TorchRec's sharder does.

        Args:
            arguments, named: as TorchRec's.
        """
        with _with_kernels():
            return super().shard(*arguments, **named)

    def reshard(self, *arguments: Any, **named: Any) -> embeddingbag.ShardedEmbeddingBagCollection:
        """Move tables of a sharded collection, as TorchRec's sharder does.

        Args:
            arguments, named: as TorchRec's.

        Returns:
            ShardedEmbeddingBagCollection: the collection.
        """
        with _with_kernels():
            return super().reshard(*arguments, **named)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the compute kernels without a cache, from which a planner may choose.

        Args:
            sharding_type: TorchRec's sharding type.
            compute_device_type: "cpu" or "cuda".
        """
        kernels = {kernel.value for kernel in KERNELS}
        return [
            name for name in super().compute_kernels(sharding_type, compute_device_type) if name in kernels
        ]


def enable() -> None:
    """Enable recfuse's kernels in all collections that this process shards from now on, with any sharder.

    This helps scripts that create their sharders internally.

    Example:
        >>> recfuse.torchrec.enable()
        >>> recfuse.torchrec.disable()
    """
    global _enabled
    _enabled = True


def disable() -> None:
    """Revert :func:`enable`, for collections that are sharded from now on.

    Example:
        >>> recfuse.torchrec.disable()
    """
    global _enabled
    _enabled = False


def uses_recfuse(module: nn.Module) -> bool:
    """Return True if all lookups of a model use recfuse's kernels.

    Args:
        module: a sharded collection, or a model with sharded collections.

    Returns:
        bool: True if all lookups use them; False on a rank without tables.

    Example:
        >>> recfuse.torchrec.uses_recfuse(torch.nn.Linear(2, 1))
        False
    """
    kernels = list(kernels_of(module, GroupedPooledEmbeddingsLookup))
    return bool(kernels) and all(isinstance(kernel, (FusedKernel, DenseKernel)) for kernel in kernels)


def kernels_of(module: nn.Module, kind: type[nn.Module] = nn.Module) -> Iterator[Any]:
    """Yield the compute kernels of lookups of a given class, in a sharded collection or a model
    with collections.
    """
    for sharded in module.modules():
        for lookup in getattr(sharded, "_lookups", ()):
            while isinstance(lookup, nn.parallel.DistributedDataParallel):
                lookup = lookup.module
            if isinstance(lookup, kind):
                yield from getattr(lookup, "_emb_modules", ())
