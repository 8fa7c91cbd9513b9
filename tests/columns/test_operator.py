"""The operators called without modules: layouts of tensors, and refusals."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import recfuse
from recfuse import _C
from recfuse.ops.embedding_columns import embedding_columns, embedding_columns_lookups

BATCH, ROWS, DIM = 6, 7, 4
BUCKETIZE, MODULO = 6, 5
ONE = int(np.float32(1).view(np.int32))


def column(left: int, at: int, **more: int) -> list[int]:
    """A column of sums over the table at row 0."""
    fields = dict(left=left, right=-1, buckets=0, seed=0, buffer=0, offset=0, rows=ROWS, dim=DIM, pooling=0)
    fields |= dict(weighted=0, invalid=-2, empty=-1, fill=0, first=0, n=DIM, scale=ONE, output=at)
    return [*(fields | more).values()]


def program(**more: int) -> Tensor:
    """Buckets of dense[0][:, 1], and the sum over bags of the second feature of values[0]."""
    sources = [[0, 1, 1, 0, 1], [1, 1, 0, 1, 1]]
    steps = [[BUCKETIZE, 0, 3], [MODULO, ROWS, 0]]
    columns = [column(0, 0), column(1, DIM, **more)]
    boundaries = np.array([-1, 0, 1], dtype=np.float32)
    arrays = (np.array(columns), np.array(sources), np.array(steps), boundaries, np.zeros(0, np.int64))
    return torch.from_numpy(_C.embedding_columns_program(*arrays))


def call() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    offsets = torch.cat(
        [torch.zeros(1, dtype=torch.int64), torch.randint(4, (2 * BATCH,), generator=generator).cumsum(0)]
    )
    return dict(
        weights=[torch.randn(ROWS, DIM, generator=generator)],
        program=program(),
        dense=[torch.randn(BATCH, 3, generator=generator)],
        values=[torch.randint(-50, 50, (int(offsets[-1]),), generator=generator)],
        offsets=[offsets],
        value_weights=[],
        batch=BATCH,
        output_dim=2 * DIM,
    )


def expected(given: dict[str, Any]) -> Tensor:
    (table,), (dense,), (values,), (offsets,) = (
        given[name] for name in ("weights", "dense", "values", "offsets")
    )
    boundaries = torch.tensor([-1.0, 0, 1])
    offsets = offsets.long()
    right = torch.nn.functional.embedding_bag(
        values[offsets[BATCH] :].remainder(ROWS),
        table,
        offsets[BATCH:] - offsets[BATCH],
        mode="sum",
        include_last_offset=True,
    )
    return torch.cat([table[torch.bucketize(dense[:, 1].contiguous(), boundaries)], right], 1)


def test_layouts_of_dense_inputs():
    given = call()
    want = expected(given)
    dense = given["dense"][0]
    wide = torch.full((2 * BATCH, 9), torch.nan)
    for view in (dense, dense.t().contiguous().t(), wide[::2, 1:7:2], wide[:BATCH, 2:5]):
        given["dense"] = [view.copy_(dense) if view is not dense else view]
        torch.testing.assert_close(embedding_columns(**given), want)
    given["dense"] = [dense[:1].expand(BATCH, 3)]
    torch.testing.assert_close(embedding_columns(**given), expected(given))


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_types_of_jagged_inputs(dtype):
    given = call()
    want = expected(given)
    given["values"] = [given["values"][0].to(dtype)]
    given["offsets"] = [given["offsets"][0].to(dtype)]
    torch.testing.assert_close(embedding_columns(**given), want)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_the_output_has_the_type_of_the_weights(dtype):
    given = call()
    given["weights"] = [given["weights"][0].to(dtype)]
    out = embedding_columns(**given)
    assert out.dtype == dtype
    want = expected(given | {"weights": [given["weights"][0].float()]})
    torch.testing.assert_close(out, want.to(dtype))
    out = embedding_columns(**given | {"weights": [given["weights"][0], torch.zeros(1)]})
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, want)


def test_no_samples_and_no_columns():
    given = call()
    given |= dict(batch=0, dense=[torch.zeros(0, 3)], values=[torch.zeros(0)], offsets=[torch.tensor([0])])
    given["values"] = [torch.zeros(0, dtype=torch.int64)]
    assert embedding_columns(**given).shape == (0, 2 * DIM)
    none = [np.zeros((0, fields), np.int64) for fields in (17, 5, 3)]
    empty = _C.embedding_columns_program(*none, np.zeros(0, np.float32), np.zeros(0, np.int64))
    out = embedding_columns([], torch.from_numpy(empty), [], [], [], [], 3, 0)
    assert out.shape == (3, 0) and out.dtype == torch.float32
    indices, offsets, factors = embedding_columns_lookups(torch.from_numpy(empty), [], [], [], [], 3)
    assert indices.numel() == factors.numel() == 0 and offsets.tolist() == [0]


def test_lookups_are_a_fused_call():
    given = call()
    inputs = [given[name] for name in ("program", "dense", "values", "offsets", "value_weights", "batch")]
    indices, offsets, factors = embedding_columns_lookups(*inputs)
    features = torch.tensor([[0, 0, ROWS, DIM, 0, -1, 0], [0, 0, ROWS, DIM, 0, -1, DIM]])
    out = recfuse.fused_embedding_bag(given["weights"], features, indices, offsets, 2 * DIM)
    torch.testing.assert_close(out, expected(given))
    assert factors.numel() == 0
    lengths = given["offsets"][0][BATCH:].diff().clamp(min=1).float()
    _, offsets, factors = embedding_columns_lookups(program(pooling=1), *inputs[1:])
    want = torch.cat([torch.ones(BATCH), (1 / lengths).repeat_interleave(offsets.diff()[BATCH:])])
    torch.testing.assert_close(factors, want)


def replaced(name: str, value: Any) -> Any:
    return lambda given: given.__setitem__(name, value)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "an index": (
        replaced("program", program(rows=2)),
        IndexError,
        r"columns: column 1: the index is \d, of value \d of sample \d; expected 0 to 1, less than the 2",
    ),
    "a table": (
        replaced("program", program(offset=1)),
        ValueError,
        "column 1: its table is 7 x 4 at element 1; expected a table within buffer 0, which has 28",
    ),
    "weights": (replaced("program", program(weighted=1)), ValueError, "it is weighted, and input 1 has no"),
    "words": (replaced("program", program()[:-1]), ValueError, "is no whole program of this version"),
    "program type": (replaced("program", program().int()), TypeError, "program is int32"),
    "output_dim": (
        replaced("output_dim", 7),
        ValueError,
        "output_dim is 7; expected the 8 columns of the program",
    ),
    "negative": (replaced("output_dim", -1), ValueError, "output_dim is -1; expected >= 0"),
    "batch": (replaced("batch", 3), ValueError, r"dense is float32 \[6, 3\]; expected \[3\] or \[3, "),
    "negative batch": (replaced("batch", -1), ValueError, "batch is -1; expected >= 0"),
    "dense type": (replaced("dense", [torch.zeros(BATCH, 3).double()]), TypeError, "dense is float64"),
    "dense dims": (replaced("dense", [torch.zeros(BATCH, 3, 1)]), ValueError, r"\[6, 3, 1\]; expected \[6\]"),
    "dense width": (
        replaced("dense", [torch.zeros(BATCH)]),
        ValueError,
        "column 0: its source takes values 1 to 1 of each sample of input 0, which has 1",
    ),
    "no dense": (replaced("dense", []), ValueError, "column 0: its source is dense, and input 0 is jagged"),
    "lists": (replaced("offsets", []), ValueError, "values has 1 tensors, offsets 0"),
    "offsets type": (replaced("offsets", [torch.zeros(13)]), TypeError, "offsets is float32"),
    "offsets": (
        replaced("offsets", [torch.zeros(12, dtype=torch.int64)]),
        ValueError,
        r"offsets has 12 elements; expected features \* batch \+ 1 with a batch of 6 \(tensor 0 of",
    ),
    "bad offsets": (
        lambda given: given["offsets"][0].__setitem__(8, 99),
        ValueError,
        r"column 1: offsets\[8\] of input 1 is 99; expected",
    ),
    "strides": (
        lambda given: given.__setitem__("values", [given["values"][0].repeat(2)[::2]]),
        ValueError,
        "values has stride 2; expected a contiguous tensor",
    ),
    "weights' strides": (
        replaced("weights", [torch.zeros(DIM, ROWS).t()]),
        ValueError,
        "has stride 1; expected a contiguous tensor",
    ),
    "weights' type": (replaced("weights", [torch.zeros(28).double()]), TypeError, "weights is float64"),
    "value_weights": (
        replaced("value_weights", [torch.zeros(1)]),
        ValueError,
        r"value_weights is float32 \[1\]; expected float32 \[\d+\], a weight for each value, or an empty",
    ),
    "bounds_check": (replaced("bounds_check", "maybe"), ValueError, 'bounds_check is "maybe"'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_raise_clear_errors(name):
    change, error, text = REFUSED[name]
    given = call()
    change(given)
    with pytest.raises(error, match=text):
        embedding_columns(**given)


def test_checks_of_torch():
    given = call()
    torch.library.opcheck(torch.ops.recfuse.embedding_columns.default, tuple(given.values()))
    inputs = [given[name] for name in ("program", "dense", "values", "offsets", "value_weights", "batch")]
    torch.library.opcheck(torch.ops.recfuse._embedding_columns_lookups.default, tuple(inputs))


def test_a_program_that_changes_is_checked_again():
    """Calls remember valid programs: any other word, or another form of inputs, is checked again."""
    given = call()
    embedding_columns(**given)
    good, refused = given["program"].clone(), 0
    columns_at, steps_at, n_steps = (int(good[word]) for word in (4, 8, 7))
    for word in range(columns_at, steps_at + 3 * n_steps):
        given["program"].copy_(good)
        given["program"][word] = 0x7FFF_FFFF_7FFF_FFFF
        try:
            embedding_columns(**given)
        except (ValueError, TypeError, IndexError, NotImplementedError):
            refused += 1
    assert refused > (steps_at - columns_at) // 2
    given["program"].copy_(good)
    torch.testing.assert_close(embedding_columns(**given), expected(given))
    with pytest.raises(ValueError, match="expected a table within buffer 0, which has 27"):
        embedding_columns(**{**given, "weights": [given["weights"][0].flatten()[:27]]})


def test_room_for_tensors_is_the_librarys():
    operator = importlib.import_module("recfuse.ops.embedding_columns")
    header = (Path(__file__).resolve().parents[2] / "include/recfuse/embedding_columns.h").read_text()
    found = dict(re.findall(r"RF_COLUMN_(\w+_BYTES) = (\d+)", header))
    assert found == {name: str(getattr(operator, name)) for name in found} and len(found) == 4
    assert operator.fits_a_gpu(2015, 0, 1) and not operator.fits_a_gpu(2015, 0, 2)
    assert operator.fits_a_gpu(0, 671, 5) and not operator.fits_a_gpu(0, 672, 1)
    assert operator.fits_a_gpu(1000, 20, 1000) and not operator.fits_a_gpu(1000, 200, 1000)
