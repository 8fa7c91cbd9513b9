"""`recfuse.explain` of the IKBO operators: which path a described GPU takes, and its launches by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import recfuse
from recfuse import _C
from support.ikbo.explained import attention, linear

FUSED = ["rf_ikbo_attention_group", "rf_ikbo_attention"]
AROUND = ["rf_attention_prepare", "rf_attention_pack", "rf_attention_cut", "rf_attention_unpack"]


def kernels(call: tuple[Any, ...], gpu: str, **options: Any) -> list[str]:
    function, *tensors = call
    return [one.kernel for one in recfuse.explain(lambda: function(*tensors, **options), gpu=gpu)]


def test_many_items_are_one_kernel_of_a_h100() -> None:
    pack, fused = recfuse.explain(*linear(20, 5000, 433, (500, 300), 256), gpu="H100")
    assert (pack.kernel, fused.kernel) == ("rf_ikbo_pack", "rf_ikbo_linear")
    # 433 rows are two blocks of 224; 4 strips; 500 rows of k are 16 slots of 32, 300 are 10.
    assert pack.grid == (4 * 64 * 448 // 256, 2, 1) and pack.block == (256, 1, 1)
    assert pack.read_bytes == 433 * 800 * 2
    packed, sums = 448 * (16 + 10) * 32 * 2, 4 * 448 * 64 * 4
    assert pack.written_bytes == packed + sums + 4  # the sums of the bias-only item; a counter
    assert fused.grid == (132, 1, 1) and fused.block == (512, 1, 1) and fused.cluster == (2, 1, 1)
    assert "-DRF_ROWS=224 -DRF_RANKS=2 -DRF_SLOTS=5" in fused.defines and fused.shared_bytes == 229376
    assert fused.tensor_flops == 2 * 433 * 256 * (20 * 500 + 5000 * 300)
    assert fused.flops == 433 * 256 * 5000
    out = 5000 * 433 * 256 * 2
    assert fused.written_bytes == out + 20 * sums
    assert fused.read_bytes == packed + (20 * 500 + 5000 * 300) * 256 * 2 + 20 * sums + 5000 * 8


def test_few_candidates_use_the_small_kernel() -> None:
    launches = recfuse.explain(*linear(1, 4, 64, (64, 64), 64), gpu="H100")
    (small,) = launches  # joined, with weights in place: nothing is packed
    assert small.kernel == "rf_ikbo_small" and small.grid == (4, 1, 1) and small.threads == 256
    assert "-DRF_RANKS=0" in small.defines and launches.workspace_bytes == 0
    assert small.tensor_flops == 2 * 64 * 64 * 4 * (64 + 64)


@pytest.mark.parametrize("gpu", ["A100", "L4", "B200"])
def test_other_gpus_add_to_products_of_torch(gpu: str) -> None:
    (add,) = recfuse.explain(*linear(20, 300, 433, (100, 64), 64), gpu=gpu)
    items = 300 * 433 * 64
    assert add.kernel == "rf_broadcast_add" and add.grid == (-(-items // 8 // 1024), 1, 1)
    assert add.written_bytes == items * 2
    assert add.read_bytes == (20 * 433 * 64 + items) * 2 + 300 * 8
    assert add.flops == items and add.tensor_flops == 0
    (add,) = recfuse.explain(*linear(20, 300, 433, (100, 61), 64), gpu=gpu)
    assert "-DRF_TAIL=1" in add.defines and add.flops == items * (1 + 2 * 5)


def test_each_path_has_its_kernels() -> None:
    assert kernels(linear(), "H100", path="decomposed") == ["rf_broadcast_add"] * 2
    assert kernels(linear(), "H100", path="small")[-1] == "rf_ikbo_small"
    assert kernels(attention(), "H100") == FUSED
    assert kernels(attention(), "H100", path="packed") == AROUND
    assert kernels(attention(), "A100") == AROUND
    assert kernels(attention(dtype=torch.float32), "H100") == ["rf_attention_prepare", *AROUND[1:]]
    # k, v and q are padded to a multiple of 8.
    padded = kernels(attention(dim=20), "A100")
    assert padded == ["rf_attention_prepare", *["rf_attention_pack"] * 3, *AROUND[2:]]
    with pytest.raises(NotImplementedError, match=r"compute capability 9\.0"):
        kernels(linear(), "A100", path="fused")
    with pytest.raises(NotImplementedError, match=r"compute capability 9\.0"):
        kernels(attention(), "A100", path="fused")
    with pytest.raises(NotImplementedError, match="not on the CPU"):
        kernels(linear(), "H100", path="concatenated")


def test_attention_of_chained_users() -> None:
    weights = [torch.zeros(64, 40, dtype=torch.float16) for _ in range(3)]
    inputs = [torch.zeros(count, 40, 64, dtype=torch.float16) for count in (2, 50, 3000)]
    maps = [torch.randint(2, (50,)), torch.randint(50, (3000,))]
    call = recfuse.ikbo_linear_chain, weights, inputs, maps
    assert kernels(call, "A100") == ["rf_broadcast_add"] * 2
    assert kernels(call, "H100") == ["rf_ikbo_pack", "rf_ikbo_linear"]
    own = torch.zeros(20, 3, 2, 64, dtype=torch.bfloat16)
    assert kernels(attention(), "H100", q_user=own, return_lse=True) == FUSED
    assert kernels(attention(), "A100", q_user=own) == [*AROUND, "rf_attention_cut", "rf_attention_unpack"]


def test_attention_by_hand() -> None:
    group, fused = recfuse.explain(*attention(20, 200, 3, 100, 2, 64), gpu="H100")
    assert group.grid == (1, 1, 1) and group.block == (1024, 1, 1)
    assert group.read_bytes == 200 * 8
    rows = 200 * 3 * 2
    assert fused.threads == 384 and fused.grid == ((200 * 3 // 128 + 20 + 1) * 2, 1, 1)
    assert "-DRF_DIM=64 -DRF_KEYS=128" in fused.defines
    assert fused.tensor_flops == 4 * rows * 100 * 64
    assert fused.read_bytes == (rows + 2 * 20 * 100 * 2) * 64 * 2
    assert fused.written_bytes == rows * 64 * 2


@pytest.mark.parametrize(("gpu", "dtype"), [("H100", torch.bfloat16), ("A100", torch.float32)])
def test_training_launches_the_forward_kernels(gpu: str, dtype: torch.dtype) -> None:
    """Gradients are torch's own kernels."""
    for call in linear(2, 30, 64, (8, 8), 8, dtype), attention(2, 30, 1, 10, 2, 8, dtype):
        for one in call[1:-1]:
            one.requires_grad_()
        training = recfuse.explain(*call, gpu=gpu, training=True)
        without = recfuse.explain(*call, gpu=gpu)
        assert [one.kernel for one in training] == [one.kernel for one in without]


def test_results_of_all_paths_are_zeros() -> None:
    """torch's products are not computed, because nothing reads the results of an explained call."""
    seen: list[torch.Tensor] = []
    for gpu in "H100", "A100":
        for function, *tensors in linear(), attention():
            ones = [one.fill_(1) for one in tensors[:-1]]
            recfuse.explain(lambda f=function, t=(*ones, tensors[-1]): seen.append(f(*t)), gpu=gpu)
    assert len(seen) == 4 and not any(one.any() for one in seen)


def test_kernels_are_compiled_ahead(kernel_cache: Path) -> None:
    for call in linear(2, 30, 64, (8, 8), 64), attention(2, 30, 1, 10, 2, 64):
        before = set(kernel_cache.rglob("*.cubin"))
        launches = recfuse.explain(*call, gpu="H100")
        assert not any(one.cached for one in launches)
        compiled = launches.compile()
        assert all(one.cached and one.registers for one in compiled)
        assert len(set(kernel_cache.rglob("*.cubin")) - before) == len(launches.kernels())
        for one in compiled:
            assert _C.kernel_compile("sm_90a", one.file, one.kernel, one.defines, True) is not None
