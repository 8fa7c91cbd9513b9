"""Lookups without pooling by the GPU's code, simulated on the host: bits of torch's embedding, the rows for
gradients, and reports of invalid contents."""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from support.backward.simulated import CPP_COMPILER, simulated
from support.operators.histories import DTYPES, LAYOUTS, Histories, by_torch, draw_histories, output_dtype

pytestmark = pytest.mark.skipif(CPP_COMPILER is None, reason="no C++ compiler")

BLOCK, ROOM, ERROR_WORDS = 256, 16, 18
INTEGERS = {torch.int32: "int", torch.int64: "rf_i64"}
UNWRITTEN = 77


class Feature(ctypes.Structure):
    """rf_embedding_feature."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "padding_idx", "first_row", "first_lookup")),
        ("output_offset", ctypes.c_int64),
        *((name, ctypes.c_uint32) for name in ("pitch", "output_pitch")),
        *((name, ctypes.c_int32) for name in ("dim", "dtype", "vector", "lanes")),
    )


class Arguments(ctypes.Structure):
    """rf_fused_embedding_args."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("indices", "offsets", "output", "fill", "rows")),
        *((name, ctypes.c_int64) for name in ("lookups", "slots", "length", "bags")),
        *((name, ctypes.c_int32) for name in ("n_features", "output_dtype", "check", "sized")),
        *((name, ctypes.c_void_p) for name in ("claimed", "record")),
        ("features", Feature * ROOM),
    )


def lay_out(call: Histories, output: Tensor, fill: Tensor | None) -> list[Feature]:
    """The features as the host lowers them."""
    size, found, lookups, element = output.element_size(), [], 0, 0
    for number, (weight, at, rows, dim, _, padding, column) in enumerate(call.features.tolist()):
        matrix = call.weights[weight]
        address, pitch = matrix.data_ptr() + at * matrix.element_size(), dim * matrix.element_size()
        out_pitch = (dim if call.layout == "jagged" else call.output_dim) * size
        offset = 0 if call.layout == "jagged" else column * size
        first = lookups
        if call.sizes:
            offset = element * size - lookups * out_pitch
            lookups += call.sizes[number]
            element += call.sizes[number] * dim
        bits = address | pitch | output.data_ptr() | offset | out_pitch | 16
        bits |= 0 if fill is None else fill.data_ptr()
        vector = (bits & -bits) if matrix.dtype == output.dtype else 0
        pieces, lanes = pitch // vector if vector else dim, 1
        while lanes < pieces and lanes < 32:
            lanes *= 2
        found.append(
            Feature(
                address, rows, padding, at // max(dim, 1), first, offset, pitch, out_pitch, dim,
                DTYPES.index(matrix.dtype), vector, lanes,
            )
        )  # fmt: skip
    return found


def simulate(call: Histories, seed: int = 0) -> tuple[Tensor, Tensor, list[int]]:
    """Returns output, rows, and the error record: argument, feature, position, bag, value."""
    bags, count, lookups = call.bags, len(call.features), len(call.indices)
    slots = {"jagged": lookups, "joined": lookups // count, "padded": bags * call.length}[call.layout]
    elements = call.output_dim if call.sizes else slots * call.output_dim
    output = torch.full((elements + 8,), UNWRITTEN, dtype=output_dtype(call))
    fill = None if call.fill is None else call.fill.to(output.dtype)
    n_rows = slots if call.layout == "jagged" else slots * count
    rows = torch.full((n_rows + 1,), UNWRITTEN, dtype=torch.int64)
    claimed, record = torch.zeros(1, dtype=torch.int32), torch.zeros(ERROR_WORDS, dtype=torch.int32)
    arguments = Arguments(
        call.indices.data_ptr(), call.offsets.data_ptr(), output.data_ptr(),
        None if fill is None else fill.data_ptr(), rows.data_ptr(), lookups, slots, call.length, bags, count,
        DTYPES.index(output.dtype), 1, bool(call.sizes), claimed.data_ptr(), record.data_ptr(),
        (Feature * ROOM)(*lay_out(call, output, fill)),
    )  # fmt: skip
    kernel = simulated(
        "kernel.cu",
        KERNEL="rf_fused_embedding",
        KERNEL_FILE='"families/fused_embedding/fused_embedding.cu"',
        RF_LAYOUT=LAYOUTS.index(call.layout),
        RF_INDEX=INTEGERS[call.indices.dtype],
        RF_OFFSET=INTEGERS[call.offsets.dtype],
    )
    if slots:
        grid = (ctypes.c_uint * 2)((slots + BLOCK - 1) // BLOCK, 1 if call.layout == "jagged" else count)
        kernel.kernel_run(ctypes.byref(arguments), grid, BLOCK, ctypes.c_uint64(seed))
    assert (output[elements:] == UNWRITTEN).all() and rows[-1] == UNWRITTEN
    shape = {"jagged": (slots, -1), "joined": (slots, -1), "padded": (bags, call.length, -1)}[call.layout]
    found = output[:elements] if call.sizes or not elements else output[:elements].view(shape)
    feature = int(record[3])
    position, bag, value = record[4:10].view(torch.int64).tolist()
    error = [int(record[1]), feature, position, bag, value] if record[0] else []
    return found, rows[:-1], error


def rows_by_hand(call: Histories) -> list[int]:
    """The rows of the slots."""
    ends, indices, bags = call.offsets.tolist(), call.indices.tolist(), call.bags
    found = []
    for f, (_, at, _, dim, _, padding, _) in enumerate(call.features.tolist()):
        row = {index: -1 if index == padding else at // max(dim, 1) + index for index in indices}
        for bag in range(bags):
            own = [row[index] for index in indices[ends[f * bags + bag] : ends[f * bags + bag + 1]]]
            if call.layout == "padded":
                own = (own + [-1] * call.length)[: call.length]
            found += own
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_copies_the_bits_of_torch(layout: str, seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for turn in range(12):
        call = draw_histories(draw, layout)
        found, rows, error = simulate(call, turn)
        expected = by_torch(call)
        assert error == []
        assert torch.equal(found.reshape(-1).float(), expected.reshape(-1).float())
        assert rows.tolist() == rows_by_hand(call)


def bad_argument(name: str) -> int:
    """The number of an argument whose contents kernels check."""
    return {"offsets": 2}[name]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bad_indices_are_reported_and_give_zeros(layout: str) -> None:
    draw = random.Random(layout)
    turns = 0
    while turns < 12:
        call = draw_histories(draw, layout, torch.float32)
        call = replace(call, length=50 if layout == "padded" else 0, fill=None, dtype=None)
        if not len(call.indices):
            continue
        turns += 1
        place = draw.randrange(len(call.indices))
        bag = int((call.offsets[1:] <= place).sum())
        feature, position = bag // call.bags, place - int(call.offsets[bag])
        bad = draw.choice((-1, int(call.features[feature, 2]), 2**31 - 1))
        wrong = replace(call, indices=call.indices.clone())
        wrong.indices[place] = bad
        found, rows, error = simulate(wrong, turns)
        assert error[1:] == [feature, position, bag % call.bags, bad]
        zeros = [torch.cat((weight, torch.zeros(1, weight.shape[1]))) for weight in call.weights]
        # The table of a feature by itself, with a row of zeros in the place of the bad index.
        own = zero_rows(replace(call, weights=zeros), feature, place)
        assert torch.equal(found.reshape(-1), own.reshape(-1))
        assert (rows == -1).sum() >= 1


def zero_rows(call: Histories, feature: int, place: int) -> Tensor:
    """The output if the lookup ``place`` of ``feature`` gave zeros."""
    matrices = [*call.weights]
    features = call.features.clone()
    _, at, rows, dim = features[feature, :4].tolist()
    table = matrices[int(features[feature, 0])][at // dim if dim else 0 :][:rows]
    features[feature, 0], features[feature, 1], features[feature, 2] = len(matrices), 0, rows + 1
    indices = call.indices.clone()
    indices[place] = rows
    matrices.append(torch.cat((table, torch.zeros(1, dim))))
    return by_torch(replace(call, weights=matrices, features=features, indices=indices))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bad_offsets_are_reported_and_nothing_else_is_written(layout: str) -> None:
    draw = random.Random(layout)
    turns = 0
    while turns < 20:
        call = draw_histories(draw, layout, torch.float32)
        if not len(call.indices):
            continue
        turns += 1
        wrong = replace(call, offsets=call.offsets.clone())
        place = draw.randrange(len(call.offsets))
        bad = draw.choice((-1, len(call.indices) + 1, 2**31 - 1))
        if call.layout == "jagged" and not call.sizes and place == len(call.offsets) - 1 and bad >= 0:
            bad = -1
        wrong.offsets[place] = bad
        _, _, error = simulate(wrong, turns)
        assert error and error[0] != 1


def test_histories_of_different_lengths_are_reported() -> None:
    features = torch.tensor([[0, 0, 10, 4, 0, -1, 0], [0, 0, 10, 4, 0, -1, 4]])
    call = Histories([torch.randn(10, 4)], features, torch.arange(6), torch.tensor([0, 1, 3, 5, 6]), "joined")
    _, _, error = simulate(call)
    assert error[1:] == [1, 3, 0, 5] and error[0] != bad_argument("offsets")
    sized = replace(call, layout="jagged", sizes=(2, 4))
    _, _, error = simulate(sized)
    assert error[1:] == [0, 2, 1, 3]


def test_lookups_after_the_last_offset_give_zeros() -> None:
    """A CUDA graph may have room for more lookups than a batch has."""
    features = torch.tensor([[0, 0, 10, 4, 0, -1, 0]])
    call = Histories(
        [torch.randn(10, 4)], features, torch.tensor([1, 2, 99, -5]), torch.tensor([0, 1, 2]), "jagged"
    )
    found, rows, error = simulate(call)
    assert error == [] and torch.equal(found[:2], call.weights[0][1:3])
    assert not found[2:].any() and rows.tolist() == [1, 2, -1, -1]
