"""Each operator with one invalid tensor: None, on meta, with a storage that shrank, with strides that
expand or overlap. Nothing is read outside of memory, and no output is uninitialised."""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from recfuse.errors import BY_NAME, InternalError
from support.cases import for_each
from support.library_cases import freed
from support.operators import READ_NOTHING, calls, run, tensors_of, with_tensor, with_tensors

UNREAD = "states", "numbers", "anchors"
"""Arguments for a backward pass, which calls under no_grad() do not have."""
IN_PYTHON = (
    "_features_of",
    "_used_features",
    "_used_table",
    "_ikbo_attention_backward",
    "_embedding_bag_updated",
    "_fused_embedding_bag_updated",
)
"""Private operators computed in Python, for which torch's functions detect errors."""
PLACES = [(name, place) for name, call in calls().items() for place, _ in tensors_of(call)]
SEEDS = int(os.environ.get("HOSTILE_TENSORS", "300"))
NAMED = (*BY_NAME.values(), NotImplementedError, TypeError)


def spoiled(name: str, place: tuple[str, int | None], change: Any) -> tuple[dict[str, Any], Tensor]:
    call = calls()[name]
    tensor = dict(tensors_of(call))[place].clone()
    return call, change(tensor)


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_every_operator_has_a_call():
    names = {name.removeprefix("recfuse::") for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("recfuse::")}  # fmt: skip
    assert names - READ_NOTHING - {"_embedding_columns_at"} == set(calls())


@for_each(PLACES)
def test_a_meta_tensor_is_refused_or_makes_all_outputs_meta(case):
    name, place = case
    call, meta = spoiled(name, place, lambda tensor: tensor.to("meta"))
    try:
        found = run(name, with_tensor(call, place, meta))
    except (ValueError, NotImplementedError) as error:
        if not isinstance(error, NotImplementedError):  # torch's, of an operator without a fake
            assert "Move all tensors to one device." in str(error) and "recfuse._" not in str(error)
    else:
        assert all(one.is_meta for one in found) or place[0] in UNREAD


@for_each(PLACES)
def test_none_is_no_internal_error(case):
    name, place = case
    call, _ = spoiled(name, place, torch.clone)
    try:
        found = run(name, with_tensor(call, place, None))
    except Exception as error:
        private = (AttributeError,) if name.startswith("_") else ()  # of operators in Python
        assert isinstance(error, (TypeError, ValueError, *private)) and not isinstance(error, InternalError)
    else:
        assert found is not None


@for_each(itertools.product([one for one in PLACES if not one[0].endswith("_updated")], (0, 1)))
def test_a_storage_that_shrank_is_refused(case):
    (name, place), elements = case
    call, cut = spoiled(name, place, lambda tensor: freed(tensor, elements))
    with pytest.raises(ValueError, match=rf"{place[0].removeprefix('host_')}\S* has no memory"):
        run(name, with_tensor(call, place, cut))


@for_each(itertools.product(PLACES, ("expanded", "overlapping", "strided", "reversed strides")))
def test_strides_change_nothing_or_are_refused(case):
    (name, place), layout = case

    def change(tensor: Tensor) -> Tensor:
        if layout == "expanded":
            return tensor[:1].expand(tensor.shape)
        if layout == "overlapping":
            return tensor.as_strided(tensor.shape, (1,) * tensor.dim())
        if layout == "strided":
            return tensor.repeat_interleave(2, -1)[..., ::2]
        return tensor.permute(*range(tensor.dim())[::-1]).contiguous().permute(*range(tensor.dim())[::-1])

    call, given = spoiled(name, place, change)
    expected = found = None
    try:
        expected = run(name, with_tensor(call, place, given.contiguous().clone()))
    except NAMED as error:
        expected = type(error)
    try:
        found = run(name, with_tensor(call, place, given))
    except NAMED as error:
        assert not isinstance(error, InternalError)
        assert expected is type(error) or "contiguous" in str(error)
    else:
        same(found, expected)


def mutated(source: random.Random, tensor: Tensor, operator: str) -> Tensor | None:
    """Returns None, or a tensor of another device, dtype, shape or contents, or with too little memory."""
    kinds = "none", "meta", "dtype", "dims", "size", "view", "contents", "shrunk"
    # torch's own functions read a storage that shrank.
    kind = source.choice(kinds[:-1] if operator in IN_PYTHON else kinds)
    if kind == "none":
        return None
    if kind == "meta":
        return tensor.to("meta")
    if kind == "dtype":
        return tensor.to(source.choice((torch.float16, torch.float64, torch.int32, torch.complex64)))
    if kind == "dims":
        return source.choice((tensor[None], tensor[..., None], tensor.reshape(-1), tensor.flatten()[0]))
    if kind == "size":
        size = [source.choice((0, 1, one, one + 1)) for one in tensor.shape]
        return torch.zeros(size, dtype=tensor.dtype)
    if kind == "contents":
        if tensor.is_floating_point():
            value = source.choice((float("nan"), float("inf"), 0.0, 1e38))
            return torch.full_like(tensor, value, dtype=torch.float64).to(tensor.dtype)
        given = tensor.clone()
        given.view(-1)[source.randrange(tensor.numel())] = source.choice(
            (-(2**63), -1, 2**31, 2**63 - 1, 2**40)
        )
        return given
    size = [source.choice((one, one, 0, 2 * one, 300)) for one in tensor.shape]
    strides = [source.choice((0, 0, 1, 2, 3)) for _ in size]
    extent = 1 + sum((one - 1) * stride for one, stride in zip(size, strides, strict=True) if one)
    offset = source.randrange(3)
    memory = torch.zeros(extent + offset, dtype=tensor.dtype)
    view = memory.as_strided(size, strides, offset)
    return freed(view, source.randrange(extent + offset + 1)) if kind == "shrunk" else view


@pytest.mark.parametrize("part", range(4))
def test_random_tensors_raise_errors_with_names_or_give_results(part):
    """A call a seed. HOSTILE_TENSORS=100000 has more, best with a library of SANITIZE=1."""
    for seed in range(part, SEEDS, 4):
        source = random.Random(seed)
        name, place = source.choice(PLACES)
        call = calls()[name]
        tensors = dict(tensors_of(call))
        changed = {place: mutated(source, tensors[place], name)}
        if source.random() < 0.3:
            other = source.choice([*tensors])
            changed[other] = mutated(source, tensors[other], name)
        call = with_tensors(call, changed)
        try:
            run(name, call)
        except Exception as error:
            assert not isinstance(error, InternalError), (seed, name, error)
            if name not in IN_PYTHON:
                of_torch = isinstance(error, TypeError) and None in changed.values()
                named = of_torch or "recfuse" in str(error)
                assert isinstance(error, NAMED) and named, (seed, name, error)
