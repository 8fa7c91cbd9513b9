"""Short bags by the GPU's code, simulated on the host: blocks of threads in random order, against the
reference; and their reports of invalid contents."""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from support.backward.simulated import CPP_COMPILER, simulated
from support.reference import assert_close_to_reference, tolerance
from support.reference import embedding_bag as reference

pytestmark = pytest.mark.skipif(CPP_COMPILER is None, reason="no C++ compiler")

WARPS = 2
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = {torch.int32: "int", torch.int64: "rf_i64"}
ERROR_WORDS, INDICES, OFFSETS = 18, 1, 2  # words of an error record, and the numbers of arguments in it


@dataclass(frozen=True)
class Variant:
    """The options of the kernel."""

    dim: int
    bags: int
    dtype: torch.dtype = torch.float32
    mode: str = "sum"
    padding: int = -1
    index: torch.dtype = torch.int64
    offset: torch.dtype = torch.int64

    def kernel(self) -> ctypes.CDLL:
        """It, for the host."""
        row = self.dim * self.dtype.itemsize
        defines: dict[str, Any] = {
            "DTYPE": DTYPES.index(self.dtype), "DIM": self.dim, "STRIDE": self.dim,
            "ALIGN": (row | 16) & -(row | 16),
            "INDEX": INTEGERS[self.index], "OFFSET": INTEGERS[self.offset], "ROW": "int",
            "POOLING": ("sum", "mean").index(self.mode), "PADDED": int(self.padding >= 0), "CHECK": 1,
            "BAGS": self.bags, "BLOCK": 32 * WARPS, "MIN_BLOCKS": 1,
        }  # fmt: skip
        named = {f"RF_{name}": value for name, value in defines.items()}
        return simulated(
            "kernel.cu", KERNEL="rf_short_bags", KERNEL_FILE='"families/embedding_bag/short_bags.cu"', **named
        )


class Arguments(ctypes.Structure):
    """rf_embedding_bag_args."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "indices", "offsets", "sample_weights", "output")),
        *((name, ctypes.c_int64) for name in ("rows", "lookups", "bags", "n_offsets", "output_pitch")),
        *((name, ctypes.c_int64) for name in ("padding_idx", "mean_lookups", "part_shift")),
        *((name, ctypes.c_void_p) for name in ("claimed", "record")),
    )


def pooled(
    variant: Variant, weight: Tensor, indices: Tensor, offsets: Tensor | None, bags: int, seed: int = 0,
    mean: int | None = None,
) -> tuple[Tensor, list[int]]:  # fmt: skip
    """Returns the kernel's output, and its error record: argument, position, bag, value.

    ``mean``: the lookups of a bag that the kernel receives.
    """
    mean = indices.numel() // max(bags, 1) if mean is None else mean
    indices = indices.to(variant.index)
    offsets = None if offsets is None else offsets.to(variant.offset)
    lookups = indices.numel()
    output = torch.full((bags + 1, variant.dim), 77.0, dtype=variant.dtype)
    claimed, record = torch.zeros(1, dtype=torch.int32), torch.zeros(ERROR_WORDS, dtype=torch.int32)
    arguments = Arguments(
        weight.data_ptr(), indices.data_ptr(), None if offsets is None else offsets.data_ptr(), None,
        output.data_ptr(), len(weight), lookups, bags, 0 if offsets is None else len(offsets),
        variant.dim * variant.dtype.itemsize, variant.padding, mean, 0,
        claimed.data_ptr(), record.data_ptr(),
    )  # fmt: skip
    per_block = variant.bags * WARPS
    slices = 1 + (variant.dim * variant.dtype.itemsize - 1) // 1024
    grid = (ctypes.c_uint * 2)((bags + per_block - 1) // per_block, slices)
    variant.kernel().kernel_run(ctypes.byref(arguments), grid, 32 * WARPS, ctypes.c_uint64(seed))
    assert (output[bags] == 77).all()
    found = [int(record[1]), *record[4:10].view(torch.int64).tolist()]
    return output[:bags], found if record[0] else []


VARIANTS = (
    Variant(128, 8),
    Variant(128, 2, torch.bfloat16, "mean", 5),
    Variant(32, 32, offset=torch.int32),
    Variant(32, 16, torch.float16, "mean", index=torch.int32),
    Variant(16, 16, padding=5, index=torch.int32),
    Variant(8, 32, torch.float32, "mean", 5, offset=torch.int32),
    Variant(4, 32),
    Variant(1, 32, torch.float16, padding=5),
    Variant(50, 8, torch.float16),
    Variant(132, 4, padding=5),
    Variant(300, 2, torch.float32, "mean"),
)
LENGTHS = {
    "one": [1] * 70,
    "none or one": [1, 0, 0, 1, 1] * 13,
    "none": [0] * 40,
    "two": [2] * 45,
    "few": [3, 0, 1, 7, 2, 0, 0, 5] * 8,
    "mixed": [0, 1, 40, 0, 9, 33, 1, 1, 100, 0, 8, 16, 0],
    "last": [0] * 33 + [50],
    "first": [65] + [0] * 64,
}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_agrees_with_the_reference(variant: Variant) -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, variant.dim).to(variant.dtype)
    weight[variant.padding] = torch.nan if variant.padding >= 0 else 1.0
    padding = variant.padding if variant.padding >= 0 else None
    for number, lengths in enumerate(LENGTHS.values()):
        sizes = torch.tensor(lengths)
        offsets = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
        indices = torch.randint(40, (int(offsets[-1]),))
        if padding is not None:
            indices[::3] = padding
        found, error = pooled(variant, weight, indices, offsets, len(lengths), number)
        assert error == []
        kept = weight.nan_to_num(0.0)
        expected = reference(indices, kept, offsets, variant.mode, None, True, padding)
        magnitude = reference(indices, kept.abs(), offsets, variant.mode, None, True, padding)
        assert_close_to_reference(found, expected, tolerance(magnitude, max(lengths), variant.dtype))
        again, _ = pooled(variant, weight, indices, offsets[:-1], len(lengths), number + 99)
        assert torch.equal(again, found)
        if len(set(lengths)) == 1:
            even, _ = pooled(variant, weight, indices, None, len(lengths), number)
            assert torch.equal(even, found)


def test_nothing_is_read_beyond_the_lookups_of_few_and_long_bags() -> None:
    """A warp has room for more bags than exist: the begins of the others would exceed 32 bits."""
    weight, indices, offsets = torch.randn(40, 4), torch.randint(40, (9,)), torch.tensor([0, 9])
    found, _ = pooled(Variant(4, 32), weight, indices, offsets, 1, mean=2**28)
    torch.testing.assert_close(found, weight[indices].sum(0, keepdim=True))


@pytest.mark.parametrize("variant", (Variant(128, 8), Variant(32, 32), Variant(4, 32)), ids=str)
def test_bad_contents_are_reported_and_left_out(variant: Variant) -> None:
    draw, weight = random.Random(0), torch.randn(40, variant.dim)
    for turn in range(40):
        lengths = [draw.choice((0, 1, 1, 1, 2, 9)) if turn % 2 else 1 for _ in range(70)]
        sizes = torch.tensor(lengths)
        offsets = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
        indices = torch.randint(40, (int(offsets[-1]),))
        place, bad = draw.randrange(len(indices)), draw.choice((40, -1, 2**40, -(2**63)))
        indices[place] = bad
        bag = int((offsets[1:] <= place).sum())
        found, error = pooled(variant, weight, indices, offsets, len(lengths), turn)
        assert error == [INDICES, place, bag, bad]
        rows = torch.cat((weight, torch.zeros(1, variant.dim)))
        clean = torch.where((indices < 0) | (indices >= 40), 40, indices)
        assert_close_to_reference(found, reference(clean, rows, offsets, "sum", None, True), 1e-4)


@pytest.mark.parametrize("variant", (Variant(128, 8), Variant(32, 32), Variant(4, 32)), ids=str)
def test_bags_with_bad_offsets_are_empty(variant: Variant) -> None:
    draw, weight = random.Random(1), torch.randn(40, variant.dim)
    for turn in range(40):
        sizes = torch.tensor([draw.choice((0, 1, 1, 2, 5)) for _ in range(70)])
        offsets = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
        indices = torch.randint(40, (int(offsets[-1]),))
        place = draw.randrange(71)
        offsets[place] = draw.choice((-1, 2**40, len(indices) + 1, int(offsets[place]) + 9))
        bad = {
            bag
            for bag in range(70)
            if not 0 <= offsets[bag] <= offsets[bag + 1] <= len(indices) or (bag == 0 and offsets[0] != 0)
        }
        found, error = pooled(variant, weight, indices, offsets, 70, turn)
        assert bool(error) == bool(bad) and (not bad or (error[0] == OFFSETS and error[2] in bad))
        for bag in range(70):
            rows = indices[offsets[bag] : offsets[bag + 1]] if bag not in bad else indices[:0]
            torch.testing.assert_close(found[bag], weight[rows].sum(0), rtol=1e-5, atol=1e-5)
