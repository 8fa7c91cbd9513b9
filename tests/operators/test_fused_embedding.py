"""Lookups of many features without pooling: bits of torch's embedding, gradients, errors, compilers."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import recfuse
from support.operators.histories import DTYPES, LAYOUTS, Histories, by_torch, draw_histories


def looked_up(call: Histories, **options: Any) -> Tensor:
    arguments, given = call.arguments()
    return recfuse.fused_embedding(*arguments, **given, **options)


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    integer = torch.int32 if found.dtype.itemsize == 4 else torch.int16
    assert torch.equal(found.view(integer), expected.view(integer))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(8))
def test_copies_the_bits_of_torch(layout: str, seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(40):
        call = draw_histories(draw, layout)
        assert_same_bits(looked_up(call), by_torch(call))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(50))
def test_many_small_calls(seed: int) -> None:
    draw = random.Random(1000 + seed)
    torch.manual_seed(seed)
    for _ in range(2000):
        call = draw_histories(draw)
        assert_same_bits(looked_up(call), by_torch(call))


def test_not_a_number_keeps_its_bits() -> None:
    bits = torch.tensor([[0x7F800001, -1, 0x7FC12345, -0x80000000]], dtype=torch.int32)
    features = torch.tensor([[0, 0, 1, 4, 0, -1, 0]])
    found = recfuse.fused_embedding(
        [bits.view(torch.float32)], features, torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2]), 4
    )
    assert torch.equal(found.view(torch.int32), bits.expand(2, 4))


def test_threads_give_the_same_bits() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(5000, 64), torch.randn(300, 32).half()]
    features = torch.tensor([[0, 0, 5000, 64, 0, -1, 0], [1, 0, 300, 32, 0, -1, 64]])
    lengths = torch.randint(0, 90, (500,)).repeat(2)
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    indices = torch.randint(300, (int(offsets[-1]),))
    for layout, length in (("joined", 0), ("padded", 50)):
        call = Histories(weights, features, indices, offsets, layout, length)
        found = looked_up(call)
        before = torch.get_num_threads()
        torch.set_num_threads(4)
        try:
            assert_same_bits(looked_up(call), found)
        finally:
            torch.set_num_threads(before)
        assert_same_bits(found, by_torch(call))


def gradients(call: Histories, output: Tensor, grad: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(output, call.weights, grad, allow_unused=True)
    return [
        torch.zeros_like(weight) if one is None else one
        for weight, one in zip(call.weights, found, strict=True)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sparse", (False, True))
def test_gradients(layout: str, sparse: bool) -> None:
    draw = random.Random(f"{layout} {sparse}")
    torch.manual_seed(3)
    for _ in range(60):
        call = draw_histories(draw, layout)
        call = replace(call, weights=[weight.requires_grad_() for weight in call.weights])
        output = looked_up(call, sparse=sparse)
        # Sums of small integers are exact in float32 and in any order.
        grad = torch.randint(-3, 4, output.shape).to(output.dtype)
        found = gradients(call, output, grad)
        if sparse:
            assert all(one.is_coalesced() for one in found if one.is_sparse)
            found = [one.to_dense() for one in found]
        wide = [weight.detach().double().requires_grad_() for weight in call.weights]
        expected = gradients(
            double := replace(call, weights=wide, dtype=torch.float64), by_torch(double), grad.double()
        )
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other.to(one.dtype), rtol=0, atol=0)


def test_a_frozen_weight_gets_no_gradient() -> None:
    weights = [torch.randn(6, 4), torch.randn(5, 4, requires_grad=True)]
    features = torch.tensor([[0, 0, 6, 4, 0, -1, 0], [1, 0, 5, 4, 0, -1, 4]])
    indices, offsets = torch.tensor([5, 1, 4, 4]), torch.tensor([0, 1, 2, 3, 4])
    for layout, dim in (("jagged", 4), ("joined", 8)):
        found = recfuse.fused_embedding(weights, features, indices, offsets, dim, layout=layout)
        (grad,) = torch.autograd.grad(found.sum(), weights[1:])
        assert grad.sum(1).tolist() == [0, 0, 0, 0, 8]


def test_a_weight_of_no_feature_shifts_no_rows() -> None:
    """Also a frozen weight of another dim, whose rows the numbers of later rows follow."""
    for dim in (0, 3, 8):
        weights = [torch.randn(10, 4), torch.randn(7, dim), torch.randn(6, 4, requires_grad=True)]
        features = torch.tensor([[0, 0, 10, 4, 0, -1, 0], [2, 0, 6, 4, 0, -1, 4]])
        indices, offsets = torch.tensor([3, 9, 5, 2, 5]), torch.tensor([0, 2, 2, 3, 5])
        found = recfuse.fused_embedding(weights, features, indices, offsets, 4)
        (grad,) = torch.autograd.grad(found.sum(), weights[2:])
        assert grad.sum(1).tolist() == [0, 0, 4, 0, 0, 8]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ("SGD", "Adam"))
def test_fused_optimizers_step_as_torch_does(layout: str, kind: str) -> None:
    draw = random.Random(f"{layout} {kind}")
    torch.manual_seed(5)
    for _ in range(12):
        call = draw_histories(draw, layout, torch.float32)
        own = replace(call, weights=[torch.nn.Parameter(weight.clone()) for weight in call.weights])
        reference = replace(call, weights=[torch.nn.Parameter(weight.clone()) for weight in call.weights])
        fused = getattr(recfuse.optim, kind)(own.weights, lr=0.1)
        for step in range(2):
            output = looked_up(own)
            grad = torch.randint(1, 4, output.shape).float()  # each touched row has a gradient
            (output * grad).sum().backward()
            fused.step()
            expected = by_torch(reference)
            (expected * grad).sum().backward()
            with torch.no_grad():
                for weight in reference.weights:
                    assert_touched_step(kind, weight, step)
        for one, other in zip(own.weights, reference.weights, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def assert_touched_step(kind: str, weight: Tensor, step: int) -> None:
    """One step of ``kind`` on the rows with a gradient, in place: a row-sparse optimizer."""
    grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    touched = grad.ne(0).any(1)
    if kind == "SGD":
        weight[touched] -= 0.1 * grad[touched]
    else:
        state = getattr(weight, "state", None) or [torch.zeros_like(weight), torch.zeros_like(weight)]
        weight.state = state
        first, second = state
        first[touched] = 0.9 * first[touched] + 0.1 * grad[touched]
        second[touched] = 0.999 * second[touched] + 0.001 * grad[touched] ** 2
        corrected = first / (1 - 0.9 ** (step + 1)), second / (1 - 0.999 ** (step + 1))
        weight[touched] -= (0.1 * corrected[0] / (corrected[1].sqrt() + 1e-8))[touched]
    weight.grad = None


def one_table(**changes: Any) -> Histories:
    features = torch.tensor([[0, 0, 10, 4, 0, -1, 0], [0, 0, 10, 4, 0, -1, 4]])
    call = Histories(
        [torch.randn(10, 4)],
        features,
        torch.tensor([1, 2, 3, 4, 5, 6]),
        torch.tensor([0, 1, 3, 4, 6]),
        "jagged",
    )
    return replace(call, **changes)


ERRORS = {
    "index": (
        {"indices": torch.tensor([1, 2, 3, 4, 5, 10])}, IndexError,
        r"history\[1\] is 10, for feature 1, bag 1; expected 0 to 9, less than the 10 rows of its table",
    ),
    "negative": (
        {"indices": torch.tensor([1, -2, 3, 4, 5, 6])}, IndexError,
        r"history\[0\] is -2, for feature 0, bag 1; expected 0 to 9",
    ),
    "padded index": (
        {"indices": torch.tensor([1, 2, 11, 4, 5, 6]), "layout": "padded", "length": 2}, IndexError,
        r"history\[1\] is 11, for feature 0, bag 1",
    ),
    "offset": (
        {"offsets": torch.tensor([0, 4, 3, 4, 6])}, ValueError,
        r"offsets\[2\] is 3, for feature 0, bag 1; expected 4",
    ),
    "first offset": (
        {"offsets": torch.tensor([1, 1, 3, 4, 6])}, ValueError, r"offsets\[0\] is 1; expected 0",
    ),
    "last offset": (
        {"offsets": torch.tensor([0, 1, 3, 4, 5])}, ValueError, r"the last offset, is 5; expected 6",
    ),
    "histories": (
        {"offsets": torch.tensor([0, 1, 3, 5, 6]), "layout": "joined"}, ValueError,
        r"offsets\[3\] is 5, for feature 1, bag 0; expected 4, since features of layout joined have "
        "histories of the same lengths",
    ),
    "bags": (
        {"offsets": torch.tensor([0, 1, 3, 6])}, ValueError,
        r"offsets has 4 elements; expected features \* bags",
    ),
    "length": ({"layout": "padded"}, ValueError, "length is 0; expected 1 or more with layout padded"),
    "negative length": ({"layout": "padded", "length": -3}, ValueError, "length is -3; expected 1 or more"),
    "length of jagged": ({"length": 3}, ValueError, "length is 3; expected 1 or more with layout padded"),
    "layout": ({"layout": "dense"}, ValueError, "layout is"),
    "fill": ({"fill": torch.zeros(4)}, ValueError, "fill is given, and no slot is without a lookup"),
    "columns of fill": (
        {"fill": torch.zeros(4), "layout": "padded", "length": 2}, ValueError,
        "fill has 4 elements; expected 8",
    ),
    "sizes": ({"sizes": (2, 4)}, ValueError, r"sizes\[0\] is 2; expected 3, the lookups of the feature"),
    "sum of sizes": ({"sizes": (2, 3)}, ValueError, "sizes has the sum 5; expected 6"),
    "dims": (
        {"features": torch.tensor([[0, 0, 10, 4, 0, -1, 0], [0, 0, 20, 2, 0, -1, 4]])}, ValueError,
        r"features\[1\] has 2 columns and begins at element 0; expected whole rows of weights\[0\]",
    ),
    "pooling": (
        {"features": torch.tensor([[0, 0, 10, 4, 1, -1, 0], [0, 0, 10, 4, 0, -1, 4]])}, ValueError,
        r"features\[0\] has pooling 1; expected 0",
    ),
    "dtype": ({"dtype": torch.float64}, TypeError, "dtype is torch.float64; expected torch.float32"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    changes, kind, text = ERRORS[case]
    with pytest.raises(kind, match=f"recfuse.fused_embedding: .*{text}"):
        looked_up(one_table(**changes))


def test_cut_lookups_are_not_read() -> None:
    call = one_table(layout="padded", length=1)
    cut = replace(call, indices=torch.tensor([1, 2, 99, 4, 5, -1]))
    assert_same_bits(looked_up(cut), by_torch(call))


def test_fill_has_no_gradient() -> None:
    fill = torch.zeros(8, requires_grad=True)
    call = one_table(layout="padded", length=2, fill=fill)
    with pytest.raises(ValueError, match="fill requires a gradient, which it would not get"):
        looked_up(call)
    with torch.no_grad():
        looked_up(call)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(layout: str) -> None:
    draw = random.Random(layout)
    for _ in range(3):
        call = draw_histories(draw, layout, torch.float32)
        weights = [weight.requires_grad_() for weight in call.weights]
        arguments = weights, *call.arguments()[0][1:], list(call.sizes), call.fill, layout, call.length
        if call.sizes:  # gradients read the sizes' features
            arguments = [weight.detach() for weight in weights], *arguments[1:]
        torch.library.opcheck(torch.ops.recfuse.fused_embedding.default, arguments)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_programs(layout: str) -> None:
    draw = random.Random(layout)
    compiled = torch.compile(looked_up_of, backend="aot_eager", dynamic=True)
    for _ in range(4):
        call = draw_histories(draw, layout, torch.float32)
        call = replace(call, weights=[weight.requires_grad_() for weight in call.weights])
        output, expected = compiled(*arguments_of(call)), looked_up_of(*arguments_of(call))
        assert_same_bits(output, expected)
        for one, other in zip(
            gradients(call, output, torch.ones_like(output)),
            gradients(call, expected, torch.ones_like(output)),
            strict=True,
        ):
            assert torch.equal(one, other)


def arguments_of(call: Histories) -> tuple[Any, ...]:
    arguments, options = call.arguments()
    return *arguments, options["layout"], options["length"], options["sizes"]


def looked_up_of(*given: Any) -> Tensor:
    *arguments, layout, length, sizes = given
    return recfuse.fused_embedding(*arguments, layout=layout, length=length, sizes=sizes)


def test_compiled_training_with_a_fused_optimizer() -> None:
    call = one_table(layout="joined")
    weights = torch.nn.Parameter(call.weights[0].clone()), torch.nn.Parameter(call.weights[0].clone())
    programs = torch.compile(looked_up_of, backend="aot_eager"), looked_up_of
    for weight, program in zip(weights, programs, strict=True):
        optimizer = recfuse.optim.SGD([weight], lr=0.5)
        program(*arguments_of(replace(call, weights=[weight]))).square().sum().backward()
        optimizer.step()
    assert torch.equal(*weights) and not torch.equal(weights[0], call.weights[0])


def test_export() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(10, 4))

        def forward(self, features: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
            return recfuse.fused_embedding(
                [self.weight], features, indices, offsets, 8, layout="padded", length=3
            )

    model, call = Model(), one_table()
    program = torch.export.export(model, (call.features, call.indices, call.offsets)).module()
    arguments = call.features, call.indices, call.offsets
    assert_same_bits(program(*arguments), model(*arguments))


def test_vmap_and_func() -> None:
    call = one_table(layout="joined")
    weights = torch.randn(3, 10, 4)
    found = torch.vmap(lambda weight: looked_up(replace(call, weights=[weight])))(weights)
    for weight, one in zip(weights, found, strict=True):
        assert_same_bits(one, by_torch(replace(call, weights=[weight])))
    grad = torch.func.grad(lambda weight: looked_up(replace(call, weights=[weight])).sum())(weights[0])
    assert grad.sum() == 24


def test_the_mask() -> None:
    offsets = torch.tensor([0, 2, 2, 5, 6, 8, 8])
    assert recfuse.history_mask(offsets[:4], 3).int().tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
    assert recfuse.history_mask(offsets, 2, 2).int().tolist() == [[1, 1], [1, 1], [1, 1]]
    for length, features, text in ((0, 1, "length is 0"), (2, 4, r"offsets has shape \[7\]")):
        with pytest.raises(ValueError, match=text):
            recfuse.history_mask(offsets, length, features)
    others: tuple[Any, ...] = ((offsets.float(), 2), (offsets.bool(), 2), (offsets, 2.5), (offsets, "2"),
                               (offsets, True), (offsets, torch.tensor(2)), (offsets, 2, 1.0))  # fmt: skip
    for arguments in others:
        with pytest.raises(TypeError, match=r"recfuse.history_mask: .*; expected"):
            recfuse.history_mask(*arguments)


@pytest.mark.parametrize(
    "option", ({"length": 2.0}, {"layout": None}, {"sizes": [2.0]}, {"sizes": torch.tensor([4, 4])})
)
@pytest.mark.parametrize("trains", (False, True))
def test_options_of_other_types_are_refused_by_name(option: dict[str, Any], trains: bool) -> None:
    weight = torch.randn(9, 4, requires_grad=trains)
    features = torch.tensor([[0, 0, 9, 4, 0, -1, 0]])
    with pytest.raises(TypeError, match=r"recfuse\.fused_embedding: "):
        recfuse.fused_embedding([weight], features, torch.tensor([1, 2]), torch.tensor([0, 2]), 4, **option)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_second_derivatives_are_refused_by_name(layout: str) -> None:
    call = one_table(layout=layout, length=2 if layout == "padded" else 0)
    weight = call.weights[0].requires_grad_()
    output = looked_up(replace(call, weights=[weight]))
    ones = torch.ones_like(output, requires_grad=True)
    (grad,) = torch.autograd.grad(output, weight, ones, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivatives of .*, fused_embedding and"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
def test_features_without_bags_or_tables(dtype: torch.dtype) -> None:
    features = torch.tensor([[0, 0, 10, 4, 0, -1, 0]])
    weights, none = [torch.randn(10, 4).to(dtype)], torch.zeros(0, dtype=torch.int64)
    start = torch.zeros(1, dtype=torch.int64)
    assert recfuse.fused_embedding(weights, features, none, start, 4).shape == (0, 4)
    padded = recfuse.fused_embedding(weights, features, none, start, 4, layout="padded", length=3)
    assert padded.shape == (0, 3, 4) and padded.dtype == dtype
