"""`recfuse.explain`: launches without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import recfuse
from recfuse import _C
from recfuse.nn.columns import Cross, Hash, Identity
from recfuse.perf.explain import known_gpus
from support.ikbo.explained import attention, linear

GPUS = ("H100", "H200", "A100", "L4", "B200")


def bag(lookups: int = 4096, dim: int = 64) -> tuple[recfuse.nn.EmbeddingBag, torch.Tensor, torch.Tensor]:
    table = recfuse.nn.EmbeddingBag(1000, dim, mode="sum")
    return table, torch.randint(1000, (lookups,)), torch.arange(0, lookups, 8)


def columns() -> tuple[recfuse.nn.EmbeddingColumns, dict[str, Any]]:
    module = recfuse.nn.EmbeddingColumns(
        [
            Hash("city", num_embeddings=1000, embedding_dim=8),
            Identity("tags", num_embeddings=5000, embedding_dim=16, pooling="sum"),
            Cross("pair", keys=["city", "tags"], num_embeddings=100, embedding_dim=4),
        ]
    )
    tags = torch.randint(5000, (64,)), torch.arange(0, 65, 2)
    return module, {"city": torch.randint(9, (32,)), "tags": tags}


def collection() -> tuple[recfuse.nn.FusedEmbeddingBagCollection, torch.Tensor, torch.Tensor]:
    bags = [torch.nn.EmbeddingBag(1000, dim, mode="sum") for dim in (8, 64, 128)]
    module = recfuse.nn.FusedEmbeddingBagCollection.from_embedding_bags(bags)
    return module, torch.randint(1000, (3 * 64 * 5,)), torch.arange(0, 3 * 64 * 5 + 1, 5)


# Each operator, and how it is called. A family adds its own.
OPERATORS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "embedding_bag": bag,
    "fused_embedding_bag": collection,
    "embedding_columns": columns,
    "ikbo_linear": linear,
    "ikbo_attention": attention,
}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_is_explained_without_a_gpu(operator: str, gpu: str) -> None:
    launches = recfuse.explain(*OPERATORS[operator](), gpu=gpu)
    assert len(launches) > 0
    assert launches.gpu["name"] == gpu
    for launch in launches:
        assert launch.operator.startswith(operator)
        assert all(size > 0 for size in launch.grid)
        assert launch.read_bytes + launch.written_bytes > 0
        assert launch.bound_seconds > 0
        assert launch.kernel == "fill" or (0 < launch.threads <= 1024 and launch.file)
    assert gpu in str(launches) and "<table>" in launches._repr_html_()


def test_nothing_runs_and_nothing_is_left_on() -> None:
    table, indices, offsets = bag()
    bad = indices + 10**9  # an index that the CPU would refuse
    assert len(recfuse.explain(table, bad, offsets, gpu="H100")) == 1
    with pytest.raises(IndexError):
        table(bad, offsets)
    torch.testing.assert_close(
        table(indices, offsets),
        torch.nn.functional.embedding_bag(indices, table.weight, offsets, mode="sum"),
    )


def test_results_are_zeros() -> None:
    seen = []
    table, indices, offsets = bag()
    recfuse.explain(lambda: seen.append(table(indices, offsets)), gpu="H100")
    assert not seen[0].any()


def test_an_error_ends_the_record() -> None:
    def fail() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        recfuse.explain(fail, gpu="H100")
    assert len(recfuse.explain(*bag(), gpu="H100")) == 1


def test_nested_explanations_are_refused() -> None:
    with pytest.raises(ValueError, match="another explain"):
        recfuse.explain(lambda: recfuse.explain(*bag(), gpu="H100"), gpu="A100")
    assert len(recfuse.explain(*bag(), gpu="H100")) == 1


@pytest.mark.parametrize(
    ("gpu", "text"), [(None, "gpu is None"), ("H900", "H900"), ("", "expected one of A100")]
)
def test_bad_arguments(gpu: str | None, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        recfuse.explain(*bag(), gpu=gpu)


def test_a_call_without_work_has_no_launches() -> None:
    launches = recfuse.explain(
        recfuse.nn.EmbeddingBag(4, 4),
        torch.zeros(0, dtype=torch.long),
        torch.zeros(0, dtype=torch.long),
        gpu="H100",
    )
    assert len(launches) == 0 and "no launches" in str(launches)


def test_architectures_stand_for_their_typical_gpu() -> None:
    assert recfuse.explain(*bag(), gpu="sm_80").gpu["name"] == "A100"
    archs = [gpu["arch"] for gpu in known_gpus()]
    assert archs == sorted(archs, key=archs.index) and {"H100", "H200"} <= {
        gpu["name"] for gpu in known_gpus()
    }


@pytest.mark.parametrize(
    ("given", "name", "arch", "sms", "mib"),
    [
        ("sm_90a:114:50", "H200", "sm_90a", 114, 50),
        ("sm_103", "B200", "sm_103", 148, 126),
        ("sm_87", "A40", "sm_87", 84, 6),
        ("sm_120:170:96", "B200", "sm_120", 170, 96),
    ],
)
def test_other_gpus_are_described_by_the_nearest(
    given: str, name: str, arch: str, sms: int, mib: int
) -> None:
    gpu = recfuse.explain(*bag(), gpu=given).gpu
    assert (gpu["name"], gpu["arch"], gpu["sms"], gpu["l2_bytes"]) == (name, arch, sms, mib << 20)


@pytest.mark.parametrize("gpu", ["sm_75", "sm_", "sm_90x", "sm_90a:0:50", "sm_90a:4", "sm_9:4:5x", "hopper"])
def test_no_gpu_is_an_error_with_the_known_names(gpu: str) -> None:
    with pytest.raises(ValueError, match=f'gpu is "{gpu}"; expected one of A100, .*H100'):
        recfuse.explain(*bag(), gpu=gpu)


def test_compiled_kernels_tell_registers_and_waves(kernel_cache: Path) -> None:
    launches = recfuse.explain(*bag(), gpu="H100", compile=True)
    (launch,) = launches
    assert launch.cached and launch.registers and launch.blocks_per_sm
    assert launch.waves == pytest.approx(launch.grid[0] / launch.blocks_per_sm / launches.gpu["sms"])
    assert _C.kernel_compile("sm_90a", launch.file, launch.kernel, launch.defines, True) is not None
    text = str(launches)
    assert str(launch.registers) in text and "yes" in text


def test_columns_are_one_kernel() -> None:
    (forward,) = recfuse.explain(*columns(), gpu="H100")
    assert forward.kernel == "rf_embedding_columns" and forward.block == (128, 1, 1)
