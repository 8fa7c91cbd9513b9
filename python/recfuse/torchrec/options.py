"""Reads the keyword arguments of FBGEMM's table-batched embedding.

Arguments that only concern caches are ignored. An argument without a fused form raises an error that
names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from recfuse import optim
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.optim.base import FusedOptimizer

WHERE = "recfuse.torchrec"
_MOST_NAMES = 4  # of tables in an error
DEVICES = ("cpu", "cuda", "meta")
KERNELS = (EmbeddingComputeKernel.FUSED, EmbeddingComputeKernel.DENSE)
"""TorchRec's compute kernels without a cache."""

DTYPES = {
    SparseType.FP32: torch.float32,
    SparseType.FP16: torch.float16,
    SparseType.BF16: torch.bfloat16,
}
MODES = {PoolingMode.SUM: "sum", PoolingMode.MEAN: "mean"}

# The optimizers of FBGEMM that have a fused form here.
OPTIMIZERS: dict[EmbOptimType, type[FusedOptimizer]] = {
    EmbOptimType.EXACT_SGD: optim.SGD,
    EmbOptimType.EXACT_ADAGRAD: optim.Adagrad,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: optim.RowWiseAdagrad,
    EmbOptimType.ADAM: optim.Adam,
}

# Arguments that only caches, statistics or other optimizers read, and the mode of FBGEMM's bounds check: any
# value is accepted.
_WITHOUT_MEANING = {
    "cache_algorithm", "cache_load_factor", "cache_sets", "cache_reserved_memory", "cache_precision",
    "enforce_hbm", "record_cache_metrics", "gather_uvm_cache_stats", "uvm_non_rowwise_momentum",
    "use_experimental_tbe", "prefetch_pipeline", "multipass_prefetch_config", "uvm_host_mapped",
    "stats_reporter_config", "momentum", "eta", "max_gradient", "res_params", "embedding_shard_info",
    "embedding_table_index_type", "embedding_table_offset_type", "bounds_check_mode",
}  # fmt: skip

# Arguments that would change the results: only the value that switches them off is accepted.
_MUST_BE_FALSE = ("gradient_clipping", "max_norm", "enable_raw_embedding_streaming", "is_qr_tbe")
_MUST_BE_NONE = (
    "ensemble_mode", "emainplace_mode", "counter_based_regularization", "cowclip_regularization",
    "global_weight_decay", "tbe_input_multiplexer_config", "preallocated_host_buffers",
)  # fmt: skip
_MUST_BE_OFF: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_MUST_BE_FALSE, lambda value: not value),
    **dict.fromkeys(_MUST_BE_NONE, lambda value: value is None),
    "optimizer_state_dtypes": lambda value: not value or all(t == SparseType.FP32 for t in value.values()),
    "extra_optimizer_config": lambda value: value is None or not value.use_rowwise_bias_correction,
}


@dataclass
class Options:
    """The arguments of a table-batched embedding that recfuse's kernels use, with FBGEMM's defaults."""

    optimizer: EmbOptimType = EmbOptimType.EXACT_SGD
    learning_rate: float = 0.01
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    weight_decay_mode: WeightDecayMode = WeightDecayMode.NONE
    stochastic_rounding: bool = True
    weights_precision: SparseType = SparseType.FP32
    output_dtype: SparseType = SparseType.FP32
    pooling_mode: PoolingMode = PoolingMode.SUM

    @classmethod
    def of(cls, fused_params: Mapping[str, Any], tables: Sequence[str] = ()) -> Options:
        """Read keyword arguments of FBGEMM's constructor; ``tables``: names of the tables, for errors.

        Raises:
            ValueError: an option without a fused form; the message names an alternative.
            TypeError: an argument that FBGEMM does not have.
        """
        prefix = f"{WHERE}: {named(tables)}" if tables else WHERE
        for name, value in fused_params.items():
            if name in _MUST_BE_OFF and not _MUST_BE_OFF[name](value):
                raise _refused(
                    prefix, name, value, "Leave it out, or use TorchRec's own sharder for these tables"
                )
            if name not in cls.__annotations__ and name not in _MUST_BE_OFF and name not in _WITHOUT_MEANING:
                raise ArgumentTypeError(
                    f"{prefix}: fused_params has {name!r}, which no table-batched embedding takes. Remove it."
                )
        options = cls(**{name: value for name, value in fused_params.items() if name in cls.__annotations__})
        options._check(prefix)
        return options

    def _check(self, prefix: str) -> None:
        if self.optimizer not in OPTIMIZERS:
            names = ", ".join(kind.name for kind in OPTIMIZERS)
            raise _refused(prefix, "optimizer", self.optimizer, f"Use one of {names}")
        for name in ("weights_precision", "output_dtype"):
            if getattr(self, name) not in DTYPES:
                raise _refused(prefix, name, getattr(self, name), "Use FP32, FP16 or BF16")
        if self.pooling_mode not in MODES:
            raise _refused(prefix, "pooling_mode", self.pooling_mode, "Use SUM or MEAN")
        if self.weight_decay and (
            self.optimizer is not EmbOptimType.EXACT_ROWWISE_ADAGRAD
            or self.weight_decay_mode is not WeightDecayMode.L2
        ):
            mode = WeightDecayMode(self.weight_decay_mode).name
            raise _refused(
                prefix,
                "weight_decay",
                f"{self.weight_decay} with {self.optimizer.name} and weight_decay_mode {mode}",
                "Set it to 0, or use EXACT_ROWWISE_ADAGRAD with WeightDecayMode.L2",
            )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tables."""
        return DTYPES[self.weights_precision]

    @property
    def out_dtype(self) -> torch.dtype:
        """Dtype of the pooled output."""
        return DTYPES[self.output_dtype]

    @property
    def mode(self) -> str:
        """The pooling mode, by torch's name."""
        return MODES[self.pooling_mode]


def named(tables: Sequence[str]) -> str:
    """Return the names of tables for an error, or the first names of many tables."""
    names = list(dict.fromkeys(tables))
    others = f" and {len(names) - _MOST_NAMES} others" if len(names) > _MOST_NAMES else ""
    return f"{'tables' if len(names) > 1 else 'table'} {', '.join(names[:_MOST_NAMES])}{others}"


def _refused(prefix: str, name: str, value: Any, instead: str) -> ArgumentValueError:
    shown = getattr(value, "name", value)
    return ArgumentValueError(f"{prefix}: {name} is {shown}, which has no fused form. {instead}.")
