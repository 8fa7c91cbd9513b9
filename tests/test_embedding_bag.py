"""embedding_bag: against the reference, against torch's own, and on bad arguments."""

from __future__ import annotations

import itertools
import os
import platform
import sys

import pytest
import torch
import torch.nn.functional as F

import recfuse
from support.inputs import odd, poisoned, ragged
from support.processes.fresh import run_python
from support.reference import DTYPES, assert_close_to_reference, tolerance
from support.reference import embedding_bag as reference

MODES = ("sum", "mean", "max")
WIDE_DIMS = (*range(6), 7, 8, 12, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 200, 256, 300)


def check(indices, weight, offsets=None, **options):
    """Runs recfuse and the reference and compares."""
    got = recfuse.embedding_bag(indices, weight, offsets, **options)
    want = reference(indices, weight, offsets, **options)
    sizes = {**options}
    if sizes.get("per_sample_weights") is not None:
        sizes["per_sample_weights"] = sizes["per_sample_weights"].abs()
    magnitude = reference(indices, weight.abs(), offsets, **sizes)
    assert got.dtype == weight.dtype
    assert got.is_contiguous()
    assert_close_to_reference(got, want, tolerance(magnitude, indices.numel(), weight.dtype))
    return got


@pytest.mark.parametrize("wrong", (torch.nan, torch.inf, -torch.inf, 1.01))
def test_the_comparison_detects_errors(wrong):
    good = torch.ones(2, 3)
    for got, want in ((wrong, 1.0), (1.0, wrong)):
        ours, theirs = good.clone(), good.double()
        ours[1, 2], theirs[1, 2] = got, want
        with pytest.raises(AssertionError, match=r"1 of 6 elements are wrong; worst at \[1, 2\]"):
            assert_close_to_reference(ours, theirs, 1e-3)
    ours[1, 2] = wrong
    assert_close_to_reference(ours, ours.double(), 0.0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("integer", (torch.int32, torch.int64))
def test_agrees_with_the_reference(mode, dtype, integer):
    for dim in (1, 8, 20, 64):
        weight = torch.randn(50, dim).to(dtype)
        indices, offsets = ragged(50, 17, 9, integer)
        check(indices, weight, offsets, mode=mode, include_last_offset=True)
        check(indices, weight, offsets[:-1], mode=mode)
        check(indices, weight, offsets[:-1], mode=mode, padding_idx=3)
        if mode == "sum":
            factors = torch.randn(indices.numel()).to(dtype)
            check(indices, weight, offsets[:-1], mode=mode, per_sample_weights=factors)
            check(indices, weight, offsets[:-1], mode=mode, per_sample_weights=factors, padding_idx=-1)


@pytest.mark.parametrize("dim", WIDE_DIMS)
def test_every_kind_of_dim(dim):
    indices, offsets = ragged(20, 9, 6)
    for dtype, mode in itertools.product(DTYPES, MODES):
        check(indices, torch.randn(20, dim).to(dtype), offsets[:-1], mode=mode)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_reads_nothing_around_its_rows(dtype, mode):
    for dim, gap, lead in ((1, 1, 1), (7, 3, 5), (16, 1, 3), (33, 2, 7), (64, 16, 1)):
        weight = poisoned(torch.randn(30, dim).to(dtype), gap, lead)
        indices, offsets = ragged(30, 11, 8)
        check(odd(indices), weight, odd(offsets), mode=mode, include_last_offset=True)
        check(odd(indices), odd(weight), odd(offsets), mode=mode, include_last_offset=True)
        check(indices, weight.t().contiguous().t(), offsets, mode=mode, include_last_offset=True)


def test_strided_indices_offsets_and_factors():
    indices, offsets = ragged(30, 11, 8)
    spread = [torch.stack((one, one + 10**6), 1)[:, 0] for one in (indices, offsets)]
    factors = torch.randn(indices.numel(), 2)[:, 1]
    check(
        *[spread[0], torch.randn(30, 12), spread[1]],
        mode="sum",
        per_sample_weights=factors,
        include_last_offset=True,
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_adversarial_bags(mode, dtype):
    weight = torch.randn(40, 24).to(dtype)
    last = torch.tensor([0, 0, 0, 3000, 3000])
    check(torch.full((3000,), 39), weight, last, mode=mode, include_last_offset=True)  # one row, one bag
    check(torch.randint(0, 40, (3000,)), weight, last, mode=mode, include_last_offset=True)
    check(torch.arange(40).flip(0), weight, torch.arange(41), mode=mode, include_last_offset=True)  # one-hot
    empty = torch.zeros(0, dtype=torch.int64)
    assert torch.equal(
        check(empty, weight, torch.zeros(5, dtype=torch.int64), mode=mode), torch.zeros(5, 24).to(dtype)
    )
    assert check(empty, weight, empty, mode=mode).shape == (0, 24)
    assert check(empty, weight[:0], torch.zeros(2, dtype=torch.int64), mode=mode).shape == (2, 24)
    assert recfuse.embedding_bag(torch.arange(3), weight, empty, mode=mode).shape == (0, 24)


def test_two_dimensional_input():
    weight = torch.randn(30, 6)
    table = torch.randint(0, 30, (5, 4))
    for mode in MODES:
        check(table, weight, mode=mode)
        check(table.t(), weight, mode=mode)
        assert torch.equal(
            recfuse.embedding_bag(table, weight, mode=mode),
            recfuse.embedding_bag(table.int(), weight, mode=mode),
        )
    check(table, weight, mode="sum", per_sample_weights=torch.rand(5, 4))
    assert torch.equal(recfuse.embedding_bag(table[:, :0], weight), torch.zeros(5, 6))
    assert recfuse.embedding_bag(table[:0], weight).shape == (0, 6)
    with pytest.raises(IndexError, match=r"input\[5\] is 30; expected \[0, 30\)"):
        recfuse.embedding_bag(torch.tensor([[1, 2, 3], [4, 5, 30]]), weight, max_norm=1.0)


def test_the_operator_without_offsets():
    """Its indices have a row a bag; so has a program that was compiled or exported."""
    weight, table = torch.randn(30, 6), torch.randint(0, 30, (50, 4))
    operator = torch.ops.recfuse.embedding_bag
    for mode in MODES:
        torch.library.opcheck(operator.default, (weight, table, None, mode))
        ends = torch.arange(0, 201, 4)
        want = operator(weight, table.reshape(-1), ends, mode, None, True)
        assert torch.equal(operator(weight, table, None, mode), want)
    with pytest.raises(RuntimeError, match="indices has 1 dimensions; expected 2"):
        operator(weight, table.reshape(-1), None)
    with pytest.raises(RuntimeError, match="include_last_offset is True without offsets; expected False"):
        operator(weight, table, None, "sum", None, True)
    with pytest.raises(RuntimeError, match=r"indices\[7\] is 30, for feature 0, bag 1"):
        operator(weight, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 30]]), None)


def test_lookups_after_the_last_offset_are_not_used():
    weight = torch.randn(10, 3, requires_grad=True)
    got = recfuse.embedding_bag(
        torch.arange(6), weight, torch.tensor([0, 2, 3]), mode="mean", include_last_offset=True
    )
    assert_close_to_reference(got, torch.stack((weight[:2].mean(0), weight[2])), 1e-6)
    got.sum().backward()
    assert weight.grad[3:].abs().sum() == 0


@pytest.mark.parametrize("mode", MODES)
def test_nan_and_infinity_are_torchs(mode):
    weight = torch.randn(12, 5)
    weight[1], weight[2], weight[3] = torch.inf, -torch.inf, torch.nan
    bags = [[1], [2], [3], [1, 2], [2, 1], [0, 3, 4], [3, 0, 4], [2, 2], [4, 5], [1, 3], [3, 1]]
    indices = torch.tensor([row for bag in bags for row in bag])
    offsets = torch.tensor([0, *itertools.accumulate(len(bag) for bag in bags)][:-1])
    for dtype in DTYPES:
        got = recfuse.embedding_bag(indices, weight.to(dtype), offsets, mode=mode)
        want = F.embedding_bag(indices, weight.to(dtype), offsets, mode=mode)
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("mode", MODES)
def test_same_bits_from_run_to_run_and_for_any_number_of_threads(mode, threads):
    weight = torch.randn(500, 40)
    indices, offsets = ragged(500, 300, 60)
    results = []
    for count in (1, 2, 3, 1):
        threads(count)
        results.append(recfuse.embedding_bag(indices, weight, offsets, mode=mode, include_last_offset=True))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_prefetching_and_unchecked_bounds_change_nothing():
    weight = torch.randn(90, 16)
    indices, offsets = ragged(90, 20, 12)
    want = recfuse.embedding_bag(indices, weight, offsets[:-1])
    for distance, bounds in itertools.product((-1, 0, 1, 7, 1000), ("on", "off")):
        got = recfuse.embedding_bag(
            indices, weight, offsets[:-1], prefetch_distance=distance, bounds_check=bounds
        )
        assert torch.equal(got, want)
    for schedule in ("distance=4", " station=shared  warps=32 block=256 threads=32 parts=2 segment=64 "):
        assert torch.equal(recfuse.embedding_bag(indices, weight, offsets[:-1], schedule=schedule), want)


BAD_CONTENTS = {
    "negative": ([0, 1, -1, 2], [0, 2], {}, IndexError, ("bag 1", "-1", "10")),
    "rows": ([0, 1, 2, 10], [0, 1], {}, IndexError, ("bag 1", "10")),
    "huge": ([2**40, 1, 2, 3], [0, 1], {}, IndexError, ("bag 0", str(2**40))),
    "falling": ([0, 1, 2, 3], [0, 3, 2], {}, ValueError, ("3", "2")),
    "first": ([0, 1, 2, 3], [1, 2], {}, ValueError, ("1", "0")),
    "beyond": ([0, 1, 2, 3], [0, 5], {}, ValueError, ("5", "4")),
    "last": ([0, 1, 2, 3], [0, 2, 9], {"include_last_offset": True}, ValueError, ("9", "4")),
    "below": ([0, 1, 2, 3], [0, -2], {}, ValueError, ("-2",)),
}


@pytest.mark.parametrize("case", BAD_CONTENTS)
@pytest.mark.parametrize("mode", MODES)
def test_bad_contents_name_the_place(case, mode):
    indices, offsets, options, kind, words = BAD_CONTENTS[case]
    with pytest.raises(kind, match=r"recfuse\.embedding_bag: ") as caught:
        recfuse.embedding_bag(
            torch.tensor(indices), torch.randn(10, 4), torch.tensor(offsets), mode=mode, **options
        )
    assert isinstance(caught.value, RuntimeError)  # torch's own kind
    for word in words:
        assert word in str(caught.value)
    torch.testing.assert_close(
        recfuse.embedding_bag(torch.arange(4)[None], torch.ones(10, 4)), torch.ones(1, 4)
    )


def _arguments(**changes):
    return {
        "input": torch.arange(4),
        "weight": torch.randn(10, 4),
        "offsets": torch.tensor([0, 2]),
        **changes,
    }


BAD_ARGUMENTS = {
    "weight 1-D": {"weight": torch.randn(10)},
    "weight 3-D": {"weight": torch.randn(10, 2, 2)},
    "weight int64": {"weight": torch.ones(10, 4, dtype=torch.int64)},
    "weight complex": {"weight": torch.ones(10, 4, dtype=torch.complex64)},
    "weight sparse": {"weight": torch.ones(10, 4).to_sparse()},
    "input 0-D": {"input": torch.tensor(1)},
    "input 3-D": {"input": torch.ones(1, 2, 2, dtype=torch.int64)},
    "input float": {"input": torch.ones(4)},
    "input list": {"input": [1, 2]},
    "weight list": {"weight": [[1.0]]},
    "offsets list": {"offsets": [0, 2]},
    "offsets None": {"offsets": None},
    "offsets 2-D": {"offsets": torch.tensor([[0, 2]])},
    "offsets float": {"offsets": torch.tensor([0.0, 2.0])},
    "offsets with 2-D input": {"input": torch.ones(2, 2, dtype=torch.int64)},
    "no last offset": {"offsets": torch.zeros(0, dtype=torch.int64), "include_last_offset": True},
    "mode": {"mode": "average"},
    "mode None": {"mode": None},
    "max by frequency": {"mode": "max", "scale_grad_by_freq": True},
    "max sparse": {"mode": "max", "sparse": True},
    "factors of mean": {"mode": "mean", "per_sample_weights": torch.ones(4)},
    "factors of max": {"mode": "max", "per_sample_weights": torch.ones(4)},
    "factors' shape": {"mode": "sum", "per_sample_weights": torch.ones(3)},
    "factors' dtype": {"mode": "sum", "per_sample_weights": torch.ones(4, dtype=torch.float64)},
    "factors int": {"mode": "sum", "per_sample_weights": torch.ones(4, dtype=torch.int64)},
    "factors list": {"mode": "sum", "per_sample_weights": [1.0] * 4},
    "padding_idx above": {"padding_idx": 10},
    "padding_idx below": {"padding_idx": -11},
    "padding_idx str": {"padding_idx": "1"},
    "padding_idx float": {"padding_idx": 1.0},
    "scale_grad_by_freq int": {"scale_grad_by_freq": 1},
    "sparse int": {"sparse": 1},
    "include_last_offset str": {"include_last_offset": "yes"},
    "max_norm str": {"max_norm": "1"},
    "max_norm, index": {"input": torch.tensor([1, 2, 3, 10]), "max_norm": 1.0},
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_raise_torchs_kind_of_error(case):
    arguments = _arguments(**BAD_ARGUMENTS[case])
    with pytest.raises(Exception) as theirs:
        F.embedding_bag(**arguments)
    with pytest.raises(type(theirs.value)) as ours:
        recfuse.embedding_bag(**arguments)
    assert str(ours.value)


@pytest.mark.parametrize(
    "options",
    (
        {"bounds_check": "maybe"},
        {"prefetch_distance": -2},
        {"schedule": "station=moon"},
        {"schedule": "distance=65"},
        {"schedule": "speed=9"},
    ),
    ids=str,
)
def test_bad_options_of_our_own(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        recfuse.embedding_bag(**_arguments(), **options)


def _gradients(function, mode, dtype, indices, offsets, factors, **options):
    torch.manual_seed(3)
    weight = torch.randn(12, 6).to(dtype).requires_grad_()
    factors = factors.detach().to(dtype).requires_grad_() if factors is not None else None
    out = function(indices, weight, offsets, mode=mode, per_sample_weights=factors, **options)
    (out.double() * torch.arange(1, out.numel() + 1).view(out.shape).cos()).sum().backward()
    return weight.grad, None if factors is None else factors.grad


GRADIENT_OPTIONS = [
    {},
    {"padding_idx": 2},
    {"include_last_offset": True},
    {"sparse": True},
    {"sparse": True, "padding_idx": 2},
    {"scale_grad_by_freq": True},
    {"scale_grad_by_freq": True, "padding_idx": 2},
]


GRADIENT_CASES = [
    (mode, options, weighted)
    for mode, options, weighted in itertools.product(MODES, GRADIENT_OPTIONS, (False, True))
    if not (weighted and mode != "sum")
    and not (mode == "max" and options.keys() & {"sparse", "scale_grad_by_freq"})
]


@pytest.mark.parametrize(("mode", "options", "weighted"), GRADIENT_CASES, ids=str)
def test_gradients_are_torchs(mode, options, weighted):
    indices, offsets = ragged(12, 9, 5)
    offsets = offsets if options.get("include_last_offset") else offsets[:-1]
    factors = torch.rand(indices.numel()) if weighted else None
    ours = _gradients(recfuse.embedding_bag, mode, torch.float32, indices, offsets, factors, **options)
    by_freq = options.get("scale_grad_by_freq", False)  # torch's on the CPU takes other rows' counts
    plain = {**options, "scale_grad_by_freq": False}
    theirs = _gradients(F.embedding_bag, mode, torch.float32, indices, offsets, factors, **plain)
    if by_freq:
        theirs[0].div_(torch.bincount(indices, minlength=12).clamp(min=1)[:, None])
    assert ours[0].layout == theirs[0].layout
    assert not ours[0].is_sparse or (ours[0]._indices().diff() > 0).all()
    torch.testing.assert_close(ours[0].to_dense(), theirs[0].to_dense())
    if weighted:
        torch.testing.assert_close(ours[1], theirs[1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_agree_with_the_reference(mode, dtype):
    indices, offsets = ragged(12, 40, 9)
    factors = torch.rand(indices.numel()) if mode == "sum" else None
    for options in ({}, {"padding_idx": 5}):
        ours = _gradients(recfuse.embedding_bag, mode, dtype, indices, offsets[:-1], factors, **options)
        theirs = _gradients(reference, mode, torch.float32, indices, offsets[:-1], factors, **options)
        if dtype == torch.float32:
            torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
        elif mode != "max":  # rounding the table makes ties, and another row the largest
            scale = float(theirs[0].abs().max())
            torch.testing.assert_close(ours[0].float(), theirs[0], rtol=2e-2, atol=2e-2 * scale)


def test_sparse_gradients_by_frequency_are_refused_as_by_torch():
    for function in (recfuse.embedding_bag, F.embedding_bag):
        out = function(
            torch.arange(4)[None], torch.randn(5, 2, requires_grad=True), sparse=True, scale_grad_by_freq=True
        )
        with pytest.raises(RuntimeError, match="scale_grad_by_freq"):
            out.sum().backward()


def test_gradients_of_nothing():
    empty = torch.zeros(0, dtype=torch.int64)
    for mode, (indices, offsets) in itertools.product(
        MODES, ((empty, torch.zeros(3, dtype=torch.int64)), (empty, empty))
    ):
        weight = torch.randn(4, 5, requires_grad=True)
        recfuse.embedding_bag(indices, weight, offsets, mode=mode).sum().backward()
        assert torch.equal(weight.grad, torch.zeros(4, 5))


def test_only_inputs_that_require_gradients_get_them():
    weight, factors = torch.randn(6, 3), torch.rand(4, requires_grad=True)
    out = recfuse.embedding_bag(
        torch.arange(4), weight, torch.tensor([0, 1]), mode="sum", per_sample_weights=factors
    )
    out.sum().backward()
    torch.testing.assert_close(factors.grad, weight[:4].sum(1))
    assert weight.grad is None
    with torch.no_grad():
        assert not recfuse.embedding_bag(torch.arange(4)[None], weight.clone().requires_grad_()).requires_grad
    with torch.inference_mode():
        assert recfuse.embedding_bag(torch.arange(4)[None], weight).is_inference()


def test_the_table_may_change_before_backward():
    weight = torch.randn(6, 3, requires_grad=True)
    out = recfuse.embedding_bag(torch.arange(4)[None], weight, mode="sum")
    with torch.no_grad():
        weight.mul_(2)
    out.sum().backward()
    assert torch.equal(weight.grad[:4], torch.ones(4, 3))


@pytest.mark.parametrize("norm_type", (1.0, 2.0))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_max_norm_changes_the_table_as_torch_does(norm_type, dtype):
    ours, theirs = (torch.randn(9, 4, generator=torch.Generator().manual_seed(1)).to(dtype) for _ in range(2))
    arguments = torch.tensor([1, 1, 4, 8]), torch.tensor([0, 2])
    got = recfuse.embedding_bag(arguments[0], ours, arguments[1], max_norm=0.5, norm_type=norm_type)
    want = F.embedding_bag(arguments[0], theirs, arguments[1], max_norm=0.5, norm_type=norm_type)
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(got, want)
    before = ours.clone()
    with pytest.raises(IndexError, match=r"input\[2\] is 9"):
        recfuse.embedding_bag(torch.tensor([0, 1, 9]), ours, torch.tensor([0]), max_norm=0.01)
    assert torch.equal(ours, before)


@pytest.mark.parametrize(
    "changes",
    (
        {"weight": torch.randn(10, 4, dtype=torch.float64)},
        {"input": torch.arange(4, dtype=torch.int16)},
        {"offsets": torch.tensor([0, 2], dtype=torch.int16)},
        {"input": torch.arange(4, dtype=torch.int32)},
        {"offsets": torch.tensor([0, 2], dtype=torch.int32)},
        {"weight": torch.randn(10, 4, device="meta")},
    ),
    ids=lambda changes: " ".join(
        f"{name} {tensor.dtype} {tensor.device}" for name, tensor in changes.items()
    ),
)
def test_arguments_that_torch_accepts_are_accepted(changes):
    arguments = _arguments(**changes)
    ours, theirs = recfuse.embedding_bag(**arguments), F.embedding_bag(**arguments)
    assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
    if ours.device.type == "cpu":
        torch.testing.assert_close(ours, theirs)


def test_swapped_arguments_and_nested_input():
    weight = torch.randn(10, 4)
    with pytest.warns(UserWarning, match="Argument order"):
        got = recfuse.embedding_bag(weight, torch.arange(4), torch.tensor([0, 2]))
    assert torch.equal(got, recfuse.embedding_bag(torch.arange(4), weight, torch.tensor([0, 2])))
    nested = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)
    torch.testing.assert_close(recfuse.embedding_bag(nested, weight), F.embedding_bag(nested, weight))


class _Loud(torch.Tensor):
    """Remembers the functions that reach it."""

    seen: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_tensor_subclasses_see_the_function():
    weight = torch.randn(5, 2)
    got = recfuse.embedding_bag(torch.arange(4)[None], weight.as_subclass(_Loud), mode="sum")
    assert recfuse.embedding_bag in _Loud.seen
    assert isinstance(got, _Loud)
    torch.testing.assert_close(got.as_subclass(torch.Tensor), weight[:4].sum(0)[None])


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_autocast_leaves_it_alone_as_it_leaves_torchs(dtype):
    weight = torch.randn(10, 4).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = (
            f(torch.arange(6).view(2, 3), weight) for f in (recfuse.embedding_bag, F.embedding_bag)
        )
    assert ours.dtype == theirs.dtype == dtype
    torch.testing.assert_close(ours, theirs)


def test_every_instruction_set_agrees():
    """Each kernel that this CPU can run gives the reference: the best here, others each in a process."""
    known = ("scalar", "avx2", "avx512") if platform.machine() == "x86_64" else ("scalar", "neon")
    own = torch.ops.recfuse.cpu_isa()
    program = (
        "import sys, torch, recfuse; sys.path[:0] = sys.argv[1:]; import test_embedding_bag as t\n"
        "print(torch.ops.recfuse.cpu_isa())\n"
        "for dim in (1, 7, 16, 33, 130): t.test_every_kind_of_dim(dim)\n"
        "t.test_reads_nothing_around_its_rows(torch.bfloat16, 'sum')\n"
    )
    ran = {own}
    for isa in (isa for isa in known if isa != own):
        done = run_python("-c", program, *sys.path, env={**os.environ, "RECFUSE_CPU_ISA": isa})
        assert done.returncode == 0, done.stderr
        ran.add(done.stdout.strip())
    assert "scalar" in ran
