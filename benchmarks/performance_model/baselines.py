"""Errors of a roofline, torch's `RuntimeEstimator` and TorchRec's planner on recorded steps."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.runtime_estimator import RuntimeEstimator

from performance_model.recorded import operators_of
from performance_model.targets import RANDOM_SEED, Target, named, named_half, random_targets
from recfuse.perf.choosing import Chosen
from recfuse.perf.models.kinds import form_of, name_of
from recfuse.perf.tracing.operators import Operator

# An H100 SXM, by its data sheet.
_BYTES_A_US = 3.35e6
_FLOPS_A_US = {"float32": 67e6, "half": 989e6}
# Words that a kernel of an inference step moves, by its kind's sizes.
_WORDS: Mapping[str, Any] = {
    "bag": lambda bags, pooling, words, unique: bags * pooling * (words + 2) + bags * words,
    "cat": lambda words, inputs: 2 * words,
    "index": lambda rows, words: 2 * rows * words,
    "pointwise": lambda words: 2 * words,
}


def roofline_us(operators: Sequence[Operator]) -> float:
    """Return the time of an inference step's kernels at the data sheet's rates."""
    return sum(_kernel_us(one.kind, one.sizes) for one in operators if one.kind is not None)


def _kernel_us(kind: str, sizes: Sequence[float]) -> float:
    half = "half" in kind
    if form_of(kind).compute:
        batch, m, k, n = (1.0, *sizes)[-4:]
        words = batch * (m * k + k * n + m * n)
        compute = 2 * batch * m * k * n / _FLOPS_A_US["half" if half else "float32"]
        return max(compute, words * (2 if half else 4) / _BYTES_A_US)
    return _WORDS[name_of(kind)](*sizes) * 4 / _BYTES_A_US  # type: ignore[no-any-return]


def runtime_estimator_us(target: Target) -> float:
    """Return the time of an inference step by the cost model of torch's `RuntimeEstimator`.

    The estimator reads the rates of a GPU; this function replaces them by those of the data sheet.
    """
    rates = "torch.utils._runtime_estimation."
    half = target.sizes.dtype != "float32"
    with (
        patch(rates + "get_device_tflops", lambda dtype: _FLOPS_A_US["half" if half else "float32"] / 1e6),
        patch(rates + "get_gpu_dram_gbps", lambda: _BYTES_A_US / 1e3),
        patch("torch.cuda.is_available", lambda: True),
        contextlib.redirect_stdout(io.StringIO()),
        FakeTensorMode(),
    ):
        model = target.sizes.model()
        batch = target.sizes.batch(target.batch)
        estimator = RuntimeEstimator()
        with torch.no_grad(), estimator("operator-level-cost-model"):
            model(*batch[:3])
    return estimator.total_runtime * 1e3


def planner_us(bags: int, pooling: float, words: int, rows: int) -> float:
    """Return the time of the bags of a table, forward, by the planner of TorchRec with its own constants."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import ParameterConstraints, Topology
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.types import ModuleSharder, ShardingType

    config = EmbeddingBagConfig(name="t", embedding_dim=words, num_embeddings=rows, feature_names=["f"])
    constraints = ParameterConstraints(
        sharding_types=[ShardingType.TABLE_WISE.value],
        compute_kernels=[EmbeddingComputeKernel.FUSED.value],
        pooling_factors=[pooling],
    )
    topology = Topology(world_size=1, compute_device="cuda")
    enumerator = EmbeddingEnumerator(topology, batch_size=bags, constraints={"t": constraints})
    sharder: ModuleSharder[torch.nn.Module] = EmbeddingBagCollectionSharder()  # type: ignore[assignment]
    module = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    (option,) = enumerator.enumerate(module, [sharder])
    return option.shards[0].perf.fwd_compute * 1e3  # type: ignore[union-attr]


def _inference_targets() -> dict[tuple[str, int], Target]:
    """Return the inference steps that a record may have, by model and batch."""
    targets = [*named(), *named_half(), *random_targets(100), *random_targets(100, seed=RANDOM_SEED)]
    return {(one.name, one.batch): one for one in targets if not one.training}


def errors(record: Mapping[str, Any], chosen: Chosen) -> dict[str, list[float]]:
    """Return relative errors of the time of inference kernels, and of bags of held-out sizes."""
    errors_by_group: dict[str, list[float]] = defaultdict(list)
    steps, kernels = _inference_targets(), chosen.calibration.kernels
    for target in record["targets"]:
        if target["optimizer"] is None:
            operators, us = operators_of(target["ops"]), target["active_us"]
            estimates = {
                "recfuse.predict": sum(kernels.time(one, exact=False).us for one in operators),
                "roofline": roofline_us(operators),
                "torch's RuntimeEstimator": runtime_estimator_us(steps[target["model"], target["batch"]]),
            }
            for name, estimate in estimates.items():
                errors_by_group[f"kernels of an inference step: {name}"].append(estimate / us - 1)
    planned = importlib.util.find_spec("torchrec") is not None
    logging.getLogger("torchrec.distributed.planner.types").setLevel(logging.ERROR)
    for *sizes, us, _ in record["held"]["bag"]:
        bags, pooling, words, unique = sizes
        operator = Operator("", "inference", "bag", tuple(sizes))
        predicted = kernels.time(operator, exact=False).us
        errors_by_group["bags, forward: recfuse.predict"].append(predicted / us - 1)
        errors_by_group["bags, forward: roofline"].append(roofline_us([operator]) / us - 1)
        if planned:
            estimate = planner_us(int(bags), pooling, int(words), max(1_000_000, int(unique)))
            errors_by_group["bags, forward: TorchRec's planner"].append(estimate / us - 1)
    return errors_by_group
