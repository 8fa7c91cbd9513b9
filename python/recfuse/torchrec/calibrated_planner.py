"""TorchRec's planner with estimates of recfuse's kernels, at rates that were measured on the GPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator.annotations import backward_compute, forward_compute
from torchrec.distributed.planner.estimator.estimator import EmbeddingPerfEstimatorV2
from torchrec.distributed.planner.estimator.types import HardwarePerfConfig, ShardPerfContext
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ParameterConstraints, ShardEstimator, ShardingOption
from torchrec.distributed.types import ShardingType

from recfuse.errors import ArgumentValueError
from recfuse.perf.calibration import Calibration
from recfuse.perf.choosing import choose
from recfuse.perf.models.bags import Bags, States
from recfuse.torchrec.options import KERNELS, OPTIMIZERS, WHERE, Options
from recfuse.torchrec.plan_times import PlanTimes

_KERNELS = tuple(kernel.value for kernel in KERNELS)
_STREAM, _STREAM_BYTES = "pointwise_2", 12  # reads two float32 words, writes a word
_US_PER_MS = 1e3


def planner(
    topology: Topology,
    batch_size: int,
    calibration: Calibration | str | os.PathLike[str] | None = None,
    *,
    constraints: dict[str, ParameterConstraints] | None = None,
    **options: Any,
) -> EmbeddingShardingPlanner:
    """Return TorchRec's planner with estimates of recfuse's kernels.

    The times of lookup and of backward pass with update differ from TorchRec's estimates, each at its own
    rates. The rating of a plan adds the launches and the host's work for each sharding type, so that plans of
    few sharding types are preferred. Exchanges, with the topology's bandwidths, memory, proposals and
    partition are TorchRec's. Tables that recfuse does not pool (sequences, kernels with a cache) keep
    TorchRec's estimates.

    Args:
        topology: TorchRec's, with ``compute_device="cuda"``.
        batch_size: samples of a step on each GPU.
        calibration: a calibration, or its file. Default: the calibration of the GPU of this machine, or of
            the H100.
        constraints: TorchRec's, by table; they hold the pooling factors.
        options: other arguments of ``EmbeddingShardingPlanner``, except ``enumerator``.

    Returns:
        EmbeddingShardingPlanner: the planner.

    Raises:
        ValueError: no calibration of the device; the message names the available calibrations.

    Example:
        >>> from torchrec.distributed.planner import Topology
        >>> topology = Topology(world_size=8, compute_device="cuda", hbm_cap=70 << 30)
        >>> planner = recfuse.torchrec.planner(topology, batch_size=4096)
        >>> plan = planner.collective_plan(model, [sharder])  # doctest: +SKIP
    """
    calibrated = CalibratedEstimator(topology, constraints, calibration=calibration)
    estimators: list[ShardEstimator] = [
        calibrated,
        EmbeddingStorageEstimator(topology=topology, constraints=constraints),
    ]
    enumerator = EmbeddingEnumerator(topology, batch_size, constraints, estimators)
    options.setdefault("performance_model", PlanTimes(topology, calibrated.calibration.bags))
    return EmbeddingShardingPlanner(
        topology=topology, batch_size=batch_size, enumerator=enumerator, constraints=constraints, **options
    )


class CalibratedEstimator(ShardEstimator):
    """Estimates for tables that recfuse pools and updates; TorchRec estimates the others."""

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        is_inference: bool = False,
        calibration: Calibration | str | os.PathLike[str] | None = None,
    ) -> None:
        """Choose the calibration; see :func:`planner`."""
        self._arguments = (topology, constraints, is_inference)
        self.calibration = _chosen(topology, calibration)
        self._others = EmbeddingPerfEstimator(*self._arguments)

    def estimate(  # type: ignore[override]
        self, sharding_options: list[ShardingOption], *sharders: Any, **named: Any
    ) -> None:
        """Set the times of all shards of the options; other arguments are TorchRec's sharders by name."""
        unpooled: list[ShardingOption] = []
        pooled: dict[States, list[ShardingOption]] = {}
        for option in sharding_options:
            if option.is_pooled and option.compute_kernel in _KERNELS:
                pooled.setdefault(_states_of(option, (*sharders, *named.values())), []).append(option)
            else:
                unpooled.append(option)
        for states, members in pooled.items():
            config = KernelRates(self.calibration, states)
            EmbeddingPerfEstimatorV2(*self._arguments, config).estimate(members, *sharders, **named)
        if unpooled:
            self._others.estimate(unpooled, *sharders, **named)


class KernelRates(HardwarePerfConfig):
    """Predicted times of shards with recfuse's kernels; TorchRec's estimator adds the exchanges."""

    name = "recfuse"

    def __init__(self, calibration: Calibration, states: States) -> None:
        """Create rates for tables whose optimizer has these states."""
        self.model, self.states = calibration.bags, states
        rate = bytes_per_ms(calibration)  # for TorchRec's own copies
        self.kernel_device_bandwidths = {("cuda", kernel): rate for kernel in _KERNELS}

    @forward_compute
    def forward_ms(self, shard: ShardPerfContext) -> float:
        """Milliseconds of lookup and pooling."""
        return self.model.forward(bags_of(shard)) / _US_PER_MS

    @backward_compute
    def backward_ms(self, shard: ShardPerfContext) -> float:
        """Milliseconds of the backward pass with the update; for a data-parallel table, with the
        gradient instead.
        """
        replicated = shard.sharding_type == ShardingType.DATA_PARALLEL.value
        return self.model.backward(bags_of(shard), None if replicated else self.states) / _US_PER_MS


def bags_of(shard: ShardPerfContext) -> Bags:
    """Return the lookups of a rank in a shard.

    A rank looks up the samples of all ranks in the rows of its shard. In a data-parallel table it looks
    up only its own samples.
    """
    replicated = shard.sharding_type == ShardingType.DATA_PARALLEL.value
    ranks = 1 if replicated else shard.world_size
    part = shard.hash_size / max(shard.hash_size_for_clamping, 1)  # share of the table's rows
    bags = sum(size * count for size, count in zip(shard.batch_sizes, shard.num_poolings, strict=True))
    return Bags(
        bags * ranks,
        shard.batch_inputs * ranks * part,
        shard.hash_size,
        shard.emb_dim,
        itemsize=shard.table_data_type_size,
        output_itemsize=shard.output_data_type_size,
        weighted=shard.is_weighted,
    )


def bytes_per_ms(calibration: Calibration) -> float:
    """Return the measured memory rate of the largest elementwise operator, in bytes per ms.

    Raises:
        ValueError: the calibration has no such point.
    """
    points = calibration.points.get(_STREAM)
    if not points:
        raise ArgumentValueError(
            f"{WHERE}.planner: {calibration!r} has no points of {_STREAM}. Calibrate again with "
            "recfuse predict --calibrate."
        )
    words, us, _ = max(points)
    return words * _STREAM_BYTES / us * _US_PER_MS


def _chosen(topology: Topology, calibration: Calibration | str | os.PathLike[str] | None) -> Calibration:
    if topology.compute_device not in ("cuda", "cpu"):
        raise ArgumentValueError(
            f"{WHERE}.planner: the topology's compute_device is {topology.compute_device}, where recfuse has "
            'no kernels; expected "cuda" or "cpu"'
        )
    try:
        chosen = choose(None if topology.compute_device == "cuda" else "cpu", calibration)
        result = chosen.calibration
        if topology.compute_device == "cuda" and result.is_cpu:
            raise ArgumentValueError(
                'the calibration is of the CPU; expected a calibration of a GPU with compute_device "cuda"'
            )
        _ = result.bags.forward_rates, result.bags.backward_rates
    except ArgumentValueError as error:
        raise ArgumentValueError(f"{WHERE}.planner: {error}") from error
    bytes_per_ms(result)  # raises for a calibration without its points
    if result.source:
        warnings.warn(f"{WHERE}.planner: {'; '.join(chosen.notes)}", stacklevel=3)
    return result


def _states_of(option: ShardingOption, sharders: Iterable[Any]) -> States:
    """Return the states of a table's optimizer: the optimizer of its Parameter, else of its
    sharder, else SGD.
    """
    key = f"{type(option.module[1]).__module__}.{type(option.module[1]).__name__}"
    fused: Mapping[str, Any] = {}
    for by_name in sharders:
        fused = getattr(by_name.get(key), "fused_params", None) or fused
    optimizer = OPTIMIZERS.get(fused.get("optimizer", Options.optimizer))
    names = [kind.__name__ for kind in getattr(option.tensor, "_optimizer_classes", ())]
    for kind in OPTIMIZERS.values():
        optimizer = kind if kind.__name__ in names else optimizer
    if optimizer is None:  # sharding raises an error with the optimizer's name
        return States()
    count = len(optimizer._kind.states)
    return States(of_row=count) if optimizer._kind.by_row else States(of_element=count)
