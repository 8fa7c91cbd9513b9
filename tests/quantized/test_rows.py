"""quantize_rows and dequantize_rows: the bound of the error, bytes, and values that have no code."""

from __future__ import annotations

import pytest
import torch

import recfuse
from recfuse.ops import dequantize_rows, quantize_rows
from support.tables.quantized import exact_values, nibbles

LEVELS = {"int8": 255, "int4": 15}
PIECE = 100_000


def random_rows(rows: int, dim: int, seed: int) -> torch.Tensor:
    """Rows of magnitudes 1e-8 to 6e4 around centres of other magnitudes."""
    generator = torch.Generator().manual_seed(seed)

    def magnitudes() -> torch.Tensor:
        return 10 ** (torch.rand(rows, 1, generator=generator) * 12.7 - 8)

    noise = torch.rand(rows, dim, generator=generator) * 2 - 1
    centre = magnitudes() * torch.randint(-1, 2, (rows, 1), generator=generator)
    return (noise * magnitudes() + centre).clamp(-6e4, 6e4)


def check_bound(weight: torch.Tensor, dtype: str) -> None:
    codes, parameters = quantize_rows(weight, dtype)
    scale = parameters[:, :1].double()
    distance = (weight.double() - exact_values(codes, parameters, weight.shape[1])).abs()
    assert bool((distance <= scale / 2).all())
    assert bool((parameters[:, 1].double() <= weight.double().min(1).values).all())


@pytest.mark.parametrize("dtype", LEVELS)
def test_no_value_moves_by_more_than_half_a_scale(dtype: str) -> None:
    """10^6 rows."""
    for seed in range(10):
        check_bound(random_rows(PIECE, 8, seed), dtype)


@pytest.mark.parametrize("dtype", LEVELS)
@pytest.mark.parametrize("dim", (2, 6, 64, 130))
def test_the_scale_is_the_least_that_reaches(dtype: str, dim: int) -> None:
    weight = random_rows(2000, dim, dim)
    check_bound(weight, dtype)
    _, parameters = quantize_rows(weight, dtype)
    scale, bias = parameters.double().unbind(1)
    less = torch.nextafter(parameters[:, 0], parameters.new_tensor(-1)).double()
    reaches = less * LEVELS[dtype] + bias >= weight.double().max(1).values
    assert not bool((reaches & (scale > 0)).any())
    assert bool((scale * LEVELS[dtype] + bias >= weight.double().max(1).values).all())


@pytest.mark.parametrize("dtype", LEVELS)
def test_constant_rows_are_exact_to_half_precision(dtype: str) -> None:
    values = torch.tensor([0.0, 1.0, -1.0, 0.1, -0.1, 65504.0, -65504.0, 1e-8, 3.14159])
    weight = values[:, None].expand(-1, 8).contiguous()
    codes, parameters = quantize_rows(weight, dtype)
    found = dequantize_rows(codes, parameters, 8)
    assert torch.equal(found.half(), weight.half())
    exact = values.half().float() == values
    assert torch.equal(found[exact], weight[exact])


@pytest.mark.parametrize("dtype", LEVELS)
@pytest.mark.parametrize("floats", (torch.float16, torch.bfloat16))
def test_tables_of_halves(dtype: str, floats: torch.dtype) -> None:
    check_bound(random_rows(3000, 34, 3).to(floats), dtype)


@pytest.mark.parametrize(
    ("dtype", "dim", "percent"),
    (
        ("int8", 8, 0.3),
        ("int8", 64, 0.5),
        ("int8", 128, 0.6),
        ("int4", 8, 5),
        ("int4", 64, 9),
        ("int4", 128, 10),
    ),
)
def test_relative_error_of_normal_rows(dtype: str, dim: int, percent: float) -> None:
    weight = torch.randn(20_000, dim, generator=torch.Generator().manual_seed(dim))
    values = dequantize_rows(*quantize_rows(weight, dtype), dim)
    error = 100 * float((values - weight).norm() / weight.norm())
    assert error == pytest.approx(percent, rel=0.15)


def test_dequantizes_every_dtype() -> None:
    weight = torch.randn(50, 18)
    for dtype in LEVELS:
        codes, parameters = quantize_rows(weight, dtype)
        exact = exact_values(codes, parameters, 18)
        for floats in (torch.float32, torch.float16, torch.bfloat16):
            got = dequantize_rows(codes, parameters, 18, floats)
            assert got.dtype == floats
            torch.testing.assert_close(got.double(), exact.to(floats).double(), atol=1e-6, rtol=1e-2)
        torch.testing.assert_close(
            dequantize_rows(codes, parameters, 18).double(), exact, atol=1e-6, rtol=1e-6
        )


def test_writes_rows_between_other_bytes() -> None:
    """FBGEMM's rows: two halves, then the codes, then bytes that stay."""
    weight = torch.randn(70, 10)
    for dtype, width in (("int8", 10), ("int4", 5)):
        memory = torch.full((70, 32), 77, dtype=torch.uint8)
        parameters = memory[:, :4].view(torch.float16)
        quantize_rows(weight, dtype, codes=memory[:, 4 : 4 + width], parameters=parameters)
        codes, expected = quantize_rows(weight, dtype)
        assert torch.equal(memory[:, 4 : 4 + width], codes) and torch.equal(parameters, expected)
        assert bool((memory[:, 4 + width :] == 77).all())


@pytest.mark.parametrize("bad", (torch.nan, torch.inf, -torch.inf, 65505.0, -7e4))
def test_values_without_a_code_raise(bad: float) -> None:
    weight = torch.randn(40_000, 8)
    weight[31_000, 3] = weight[39_000, 0] = bad
    with pytest.raises(ValueError, match=r"weight\[31000, 3\] is .* expected finite values from -65504"):
        quantize_rows(weight)


def test_results_do_not_depend_on_threads(threads) -> None:
    weight = torch.randn(30_000, 16)
    results = []
    for count in (1, 3):
        threads(count)
        results.append(quantize_rows(weight, "int4"))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_bad_arguments() -> None:
    weight = torch.randn(4, 7)
    with pytest.raises(ValueError, match=r"a row has 7 columns"):
        quantize_rows(weight, "int4")
    with pytest.raises(ValueError, match=r"dtype is 'int2'"):
        quantize_rows(weight, "int2")
    with pytest.raises(TypeError, match="float64"):
        quantize_rows(weight.double())
    with pytest.raises(ValueError, match="dimensions"):
        quantize_rows(weight[0])
    with pytest.raises(ValueError, match="codes has rows of 9 bytes"):
        quantize_rows(weight, codes=torch.empty(4, 9, dtype=torch.uint8))
    codes, parameters = quantize_rows(weight)
    with pytest.raises(ValueError, match="codes is uint8"):
        dequantize_rows(codes, parameters, 9)
    with pytest.raises(ValueError, match="parameters is float16"):
        dequantize_rows(codes, parameters[:3], 7)


def test_bad_results() -> None:
    weight = torch.randn(4, 8)
    for bad in ([1], "codes"):
        with pytest.raises(TypeError, match="codes is"):
            quantize_rows(weight, codes=bad)
    with pytest.raises(ValueError, match="codes has 0 dimensions"):
        quantize_rows(weight, codes=torch.tensor(8, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"parameters is torch\.float32; expected torch\.float16"):
        quantize_rows(weight, parameters=torch.zeros(4, 2))
    codes, parameters = quantize_rows(weight)
    with pytest.raises(ValueError, match="codes has 0 dimensions"):
        dequantize_rows(codes[0, 0], parameters, 8)


@pytest.mark.parametrize("rows", (1, 4))
def test_rows_that_overlap_raise(rows: int) -> None:
    weight = torch.randn(rows, 8)
    before, memory = weight.clone(), torch.zeros(rows, 16, dtype=torch.uint8)
    for first in (0, 2, 6):  # of the parameters, within the codes
        with pytest.raises(ValueError, match="share bytes"):
            quantize_rows(
                weight, codes=memory[:, :8], parameters=memory[:, first : first + 4].view(torch.float16)
            )
    with pytest.raises(ValueError, match="share bytes"):
        quantize_rows(weight, codes=weight.view(torch.uint8)[:, :8])
    with pytest.raises(ValueError, match="share bytes"):
        quantize_rows(weight, parameters=weight.view(torch.float16)[:, -2:])
    assert torch.equal(weight, before)
    apart = quantize_rows(weight)
    for first in (8, 12):
        codes, parameters = quantize_rows(
            weight, codes=memory[:, :8], parameters=memory[:, first : first + 4].view(torch.float16)
        )
        assert torch.equal(codes, apart[0]) and torch.equal(parameters, apart[1])


def test_empty_tables() -> None:
    for rows, dim in ((0, 8), (3, 0)):
        codes, parameters = quantize_rows(torch.zeros(rows, dim))
        assert codes.shape == (rows, dim) and parameters.shape == (rows, 2)
        assert dequantize_rows(codes, parameters, dim).shape == (rows, dim)


@pytest.mark.parametrize("dtype", LEVELS)
@pytest.mark.parametrize("align", (1, 16))
def test_fbgemm_reads_our_bytes(dtype: str, align: int) -> None:
    pytest.importorskip("fbgemm_gpu")
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
        IntNBitTableBatchedEmbeddingBagsCodegen,
    )

    kind = SparseType.INT8 if dtype == "int8" else SparseType.INT4
    rows, dim = 60, 32
    weight = torch.randn(rows, dim)
    module = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("t", rows, dim, kind, EmbeddingLocation.HOST)], device="cpu", row_alignment=align,
        output_dtype=SparseType.FP32,
    )  # fmt: skip
    module.initialize_weights()
    memory, _ = module.split_embedding_weights(split_scale_shifts=False)[0]
    width = dim * (8 if dtype == "int8" else 4) // 8
    codes = memory[:, 4 : 4 + width]
    quantize_rows(weight, dtype, codes=codes, parameters=memory[:, :4].view(torch.float16))
    indices = torch.randint(0, rows, (40,), dtype=torch.int32)
    offsets = torch.arange(0, 41, 4, dtype=torch.int32)
    theirs = module(indices, offsets)
    values = exact_values(codes, memory[:, :4].view(torch.float16), dim)
    expected = values[indices.long()].view(10, 4, dim).sum(1)
    torch.testing.assert_close(theirs.double(), expected, atol=2e-2, rtol=1e-2)
    features = torch.tensor([[0, 0, rows, dim, 0, -1, 0]])
    ours = recfuse.ops.fused_embedding_bag_quantized(
        [codes], [memory[:, :4].view(torch.float16)], features, indices, offsets, dim
    )
    torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-5)


def test_nibbles_are_the_low_half_first() -> None:
    codes, _ = quantize_rows(torch.arange(16.0)[None], "int4")
    assert nibbles(codes).tolist() == [list(range(16))]
