"""librecfuse.so leaks neither arguments nor results: tensors, lists, strings, optionals."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from support.library_cases import (
    LAYOUTS,
    ONE_TABLE_ERRORS,
    OPS,
    TWO_TABLES_ERRORS,
    Inputs,
    freed,
    one_table,
    two_tables,
)

MALLINFO_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")
MALLINFO_FIELDS += ("fordblks", "keepcost")


class Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in MALLINFO_FIELDS)


def allocated_bytes() -> int:
    """Bytes that malloc has given out and not got back, by the main thread's arena and mmap."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pytest.skip("this C library has no mallinfo2")
    mallinfo.restype = Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def tensors_in(arguments: Inputs) -> list[torch.Tensor]:
    """All tensors among the arguments, those in lists too."""
    values = [
        item for value in arguments.values() for item in (value if isinstance(value, list) else [value])
    ]
    return [value for value in values if isinstance(value, torch.Tensor)]


def assert_no_leak(
    call: Callable[..., Any], arguments: Inputs, fails: bool, bytes_per_call: int = 16
) -> None:
    """Calls often; each argument's reference count and malloc's total must return to their values.

    The smallest possible leak, the 8-byte box of an optional, takes 32 bytes of malloc.
    """

    def once() -> None:
        try:
            call(**arguments)
            assert not fails
        except RuntimeError:
            assert fails

    tensors, calls, rounds = tensors_in(arguments), 300, 3
    once()
    counts, growth = [tensor._use_count() for tensor in tensors], []
    for _ in range(rounds):
        before = allocated_bytes()
        for _ in range(calls):
            once()
        gc.collect()  # torch's traces of errors are cycles
        growth.append(allocated_bytes() - before)
    assert [tensor._use_count() for tensor in tensors] == counts
    # A leak shows in every round; occasional initialisation by Python and torch does not.
    assert min(growth) < calls * bytes_per_call


@pytest.mark.parametrize("name", [*LAYOUTS, *ONE_TABLE_ERRORS])
def test_no_leak(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    changes = LAYOUTS[name] if name in LAYOUTS else ONE_TABLE_ERRORS[name][0]
    assert_no_leak(OPS.embedding_bag, one_table(**changes), fails=name in ONE_TABLE_ERRORS)


PLAIN_CALLS: dict[str, Inputs] = {
    "": {},
    "ends": {"offsets": torch.tensor([0, 30, 60, 80]), "include_last_offset": True},
    "strided": {"offsets": torch.tensor([0, 0, 30, 30, 60, 60])[::2], "indices": torch.arange(160)[::2] % 50},
    "pooling": {"pooling": 3},
    "dtype": {"indices": torch.zeros(80)},
}


@pytest.mark.parametrize("name", PLAIN_CALLS)
def test_no_leak_plain(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    given: Inputs = {"indices": torch.arange(80) % 50, "offsets": torch.tensor([0, 30, 60]), "pooling": 1}
    given |= {"include_last_offset": False, "padding_idx": 7, **PLAIN_CALLS[name]}
    fails = name in ("pooling", "dtype")
    assert_no_leak(OPS._embedding_bag, {"weight": torch.randn(50, 16), **given}, fails)
    form = {"rows": 50, "dim": 16, "dtype": 0}
    assert_no_leak(OPS._embedding_bag_gradient, {"grad": torch.randn(3, 16), **given, **form}, fails)


IKBO_CALLS: dict[str, Inputs] = {
    "broadcast": {},
    "decomposed": {"path": "decomposed", "bias": torch.zeros(7), "activation": "silu"},
    "rows": {"x_user": torch.zeros(4, 5), "x_cand": torch.zeros(9, 3)},
    "strided": {"cand_to_user": torch.zeros(18).long()[::2], "bias": torch.zeros(14)[::2]},
    "map's length": {"cand_to_user": torch.zeros(8).long()},
    "index": {"cand_to_user": torch.full((9,), 4)},
    "path": {"path": "fused"},
}


@pytest.mark.parametrize("name", IKBO_CALLS)
def test_no_leak_ikbo(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    given: Inputs = {"w_user": torch.zeros(7, 5), "w_cand": torch.zeros(7, 3), "x_user": torch.zeros(4, 5, 6)}
    given |= {"x_cand": torch.zeros(9, 3, 6), "cand_to_user": torch.zeros(9).long(), **IKBO_CALLS[name]}
    fails = name in ("map's length", "index", "path")
    assert_no_leak(OPS.ikbo_linear, given, fails)
    if len(given) == 5:  # no options
        lists: Inputs = {"weights": [given["w_user"], given["w_cand"]], "maps": [given["cand_to_user"]]}
        assert_no_leak(OPS.ikbo_linear_chain, {**lists, "inputs": [given["x_user"], given["x_cand"]]}, fails)


ATTENTION_CALLS: dict[str, Inputs] = {
    "dense": {"scale": 0.5},
    "lengths": {"kv_lengths": torch.tensor([3, 0, 5])},
    "jagged": {"k": torch.ones(9, 2, 8), "v": torch.ones(9, 2, 8), "kv_offsets": torch.tensor([0, 4, 4, 9])},
    "strided": {"q": torch.ones(7, 2, 4, 16)[..., ::2], "v": torch.ones(3, 5, 2, 16)[..., ::2]},
    "index": {"cand_to_user": torch.full((7,), 3)},
    "scale": {"scale": -1.0},
    "path": {"path": "fused"},
}


@pytest.mark.parametrize("name", ATTENTION_CALLS)
@pytest.mark.parametrize("operator", ["ikbo_attention_lse", "ikbo_attention_self_lse"])
def test_no_leak_ikbo_attention(operator: str, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    given: Inputs = {"q": torch.ones(7, 2, 4, 8), "k": torch.ones(3, 5, 2, 8), "v": torch.ones(3, 5, 2, 8)}
    given |= {"cand_to_user": torch.tensor([2, 0, 1, 0, 2, 2, 1]), **ATTENTION_CALLS[name]}
    if operator == "ikbo_attention_self_lse":
        given["q_user"] = torch.ones(3, 1, 4, 8)
    assert_no_leak(getattr(OPS, operator), given, fails=name in ("index", "scale", "path"))


@pytest.mark.parametrize("name", ["", *TWO_TABLES_ERRORS])
def test_no_leak_fused(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    changes = TWO_TABLES_ERRORS[name][0] if name else {}
    assert_no_leak(OPS.fused_embedding_bag, two_tables(**changes), fails=bool(name))


def test_no_leak_with_every_optional() -> None:
    sums = two_tables()["features"].clone()
    sums[:, 4] = 0
    weights = [torch.randn(200), torch.randn(240).half(), torch.randn(0).bfloat16()]
    sums[1, :2] = torch.tensor([1, 0])
    arguments = two_tables(features=sums, weights=weights, per_sample_weights=torch.rand(80).half()[::2])
    assert_no_leak(OPS.fused_embedding_bag, arguments, fails=False)


def gradient_inputs(operator: str, **changes: Any) -> Inputs:
    """Arguments of a gradient operator: two groups, three features of 4 bags, a maximum among them;
    without those that the operator does not accept."""
    torch.manual_seed(3)
    features = torch.tensor([[0, 0, 50, 4, 0, -1, 0], [1, 0, 30, 8, 2, -1, 4], [0, 40, 40, 4, 1, 2, 12]])
    if operator.endswith("sample_weights_backward"):
        features[:, 4] = 0
    indices = torch.randint(0, 30, (40,))
    offsets = torch.tensor([0, 3, 3, 7, 10, 14, 17, 20, 25, 30, 32, 35, 40])
    weights = [torch.randn(50, 4), torch.randn(30, 8).half()]
    call = {"features": features, "indices": indices, "offsets": offsets}
    grad = {"grad": torch.randn(4, 16)}
    if operator == "winners":
        return {"weights": weights, **call, "output_dim": 16, **changes}
    if operator == "sample_weights_backward":
        return {**grad, "weights": weights, **call, **changes}
    if operator == "quantized_sample_weights_backward":
        weights[0] = torch.randint(0, 256, (50, 4), dtype=torch.uint8)
        parameters = [torch.rand(50, 2).half(), torch.empty(0, 2)]
        return {**grad, "weights": weights, "parameters": parameters, **call, **changes}
    sparse = operator.startswith("sparse")
    winners = None if sparse else OPS.fused_embedding_bag_winners(weights, **call, output_dim=16)
    if operator == "update":
        states = {"weights": weights, "states": [torch.ones(50, 4), torch.ones(30, 8)], "optimizer": 1}
        states |= {"numbers": torch.zeros(8), "after": [torch.ones(3)]}
        return {**grad, **states, **call, "per_sample_weights": None, "winners": winners, **changes}
    if operator == "sparse_gradients":
        features[1, 4] = 0
        groups = {"groups": [1, 0], "row_counts": [30, 50], "dims": [8, 4], "dtypes": [1, 0]}
        return {**grad, **call, **groups, "per_sample_weights": None, "winners": None, **changes}
    group = {"group": 0, "rows": 50, "dim": 4, "dtype": 0} if sparse else {}
    group = group or {"group": 1, "rows": 30, "dim": 8, "dtype": 1}
    return {**grad, **call, **group, "per_sample_weights": None, "winners": winners, **changes}


GRADIENTS = (
    "backward",
    "sparse_backward",
    "sparse_gradients",
    "winners",
    "sample_weights_backward",
    "quantized_sample_weights_backward",
    "update",
)
GRADIENT_ERRORS: dict[str, Inputs] = {
    "features": {"features": torch.zeros(3, 6).long()},
    "features freed": {"features": freed(torch.zeros(3, 7).long())},
    "indices": {"indices": torch.zeros(40)},
    "indices freed": {"indices": freed(torch.zeros(40).long())},
    "offsets": {"offsets": torch.zeros(12).long()},
    "grad dims": {"grad": torch.randn(64)},
    "grad rows": {"grad": torch.randn(5, 16)},
    "grad columns": {"grad": torch.randn(4, 15)},
    "grad dtype": {"grad": torch.zeros(4, 16).int()},
    "grad freed": {"grad": freed(torch.randn(4, 16))},
    "rows": {"rows": -1},
    "dtype": {"dtype": 3},
    "sample weights": {"per_sample_weights": torch.rand(39)},
    "winners": {"winners": torch.zeros(4, 16)},
    "winners size": {"winners": torch.zeros(4, 15).long()},
    "weights dtype": {"weights": [torch.randn(50, 4), torch.zeros(30, 8).int()]},
    "weights freed": {"weights": [torch.randn(50, 4), freed(torch.randn(30, 8))]},
    "parameters": {"parameters": [torch.rand(49, 2).half(), torch.empty(0, 2)]},
    "parameters dtype": {"parameters": [torch.rand(50, 2).double(), torch.empty(0, 2)]},
    "parameters freed": {"parameters": [freed(torch.rand(50, 2).half()), torch.empty(0, 2)]},
    "weights number": {"weights": [torch.randn(50, 4)]},
    "output_dim": {"output_dim": 15},
    "states": {"states": [torch.ones(50, 4), torch.ones(30, 7)]},
    "states number": {"states": [torch.ones(50, 4)]},
    "states freed": {"states": [torch.ones(50, 4), freed(torch.ones(30, 8))]},
    "numbers": {"numbers": torch.zeros(7)},
    "optimizer": {"optimizer": 4},
    "a list": {"dims": [8]},
    "an item": {"dtypes": [1, 3]},
}
GRADIENT_LAYOUTS: dict[str, Inputs] = {
    "contiguous": {},
    "all strided": {
        "grad": torch.randn(16, 4).t(),
        "features": gradient_inputs("sample_weights_backward")["features"].t().contiguous().t(),
        "indices": torch.randint(0, 30, (80,), dtype=torch.int32)[::2],
        "offsets": torch.arange(0, 39, 3).repeat_interleave(2)[::2],
        "winners": torch.full((16, 4), -1).t(),
        "per_sample_weights": torch.rand(80).half()[::2],
    },
}


def gradient_case(operator: str, changes: Inputs) -> Inputs | None:
    """Returns arguments with those changes that the operator accepts; None: it accepts none of them."""
    arguments = gradient_inputs(operator)
    own = {name: value for name, value in changes.items() if name in arguments}
    return {**arguments, **own} if own or not changes else None


CASES = [
    pytest.param(operator, name, arguments, id=f"{operator}, {name}")
    for operator in GRADIENTS
    for name, changes in {**GRADIENT_LAYOUTS, **GRADIENT_ERRORS}.items()
    if (arguments := gradient_case(operator, changes)) is not None
]


@pytest.mark.long
@pytest.mark.parametrize("operator, name, arguments", CASES)
def test_no_leak_of_gradients(
    operator: str, name: str, arguments: Inputs, capfd: pytest.CaptureFixture[str]
) -> None:
    call = getattr(OPS, f"fused_embedding_bag_{operator}")
    assert_no_leak(call, arguments, fails=name in GRADIENT_ERRORS)


@pytest.mark.parametrize("fails", (False, True))
def test_no_leak_of_an_update_of_rows(fails: bool, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = {"weight": torch.randn(9, 4), "states": [torch.ones(9)], "rows": torch.tensor([2, 5])}
    arguments |= {"sums": torch.randn(4, 4 + fails)[::2], "numbers": torch.zeros(8), "optimizer": 2}
    assert_no_leak(OPS.rows_update, arguments, fails)


@pytest.mark.parametrize("operator", [OPS.cpu_isa, OPS.library_version])
def test_no_leak_of_strings(operator: Any) -> None:
    """libtorch before 2.15 does not free the string that a kernel returns (48 bytes), and the kernel must
    not either, because 2.15 does. So no frequent operator returns a string."""
    bytes_per_call = 16 if torch.__version__ >= TorchVersion("2.15") else 64
    assert_no_leak(operator, {}, fails=False, bytes_per_call=bytes_per_call)
