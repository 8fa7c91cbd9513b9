"""The classes of errors when torch runs the operators: backward passes, compiled and exported programs."""

from __future__ import annotations

import io

import pytest
import torch

import recfuse
from recfuse import errors
from recfuse.nn import FusedEmbeddingBagCollection
from support.library_cases import freed
from support.operators import calls, overload

GOOD, BAD, OFFSETS = torch.tensor([0, 1, 2]), torch.tensor([0, 9, 2]), torch.tensor([0, 2])


class Bag(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(5, 4))

    def forward(self, indices, offsets):
        return recfuse.embedding_bag(indices, self.weight, offsets, mode="sum")


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()


@pytest.mark.parametrize("gradients", (torch.enable_grad, torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize("backend", (pytest.param("inductor", marks=pytest.mark.long), "aot_eager"))
def test_compiled_programs(backend, gradients):
    with gradients():
        compiled = torch.compile(Bag(), backend=backend)
        compiled(GOOD, OFFSETS)
        with pytest.raises(errors.IndexRangeError, match=r"^recfuse\.embedding_bag: indices\[1\] is 9"):
            compiled(BAD, OFFSETS)


@pytest.mark.parametrize("strict", (False, True))
def test_exported_programs(strict):
    program = torch.export.export(Bag(), (GOOD, OFFSETS), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for one in (program, torch.export.load(file)):
        with pytest.raises(errors.IndexRangeError, match=r"^recfuse\.embedding_bag: indices\[1\] is 9"):
            one.module()(BAD, OFFSETS)


@pytest.mark.parametrize("backend", (None, "aot_eager"))
@pytest.mark.parametrize("sparse", (False, True))
@pytest.mark.parametrize("collection", (False, True))
def test_backward_passes(collection, sparse, backend):
    module = Bag()
    if collection:
        module = FusedEmbeddingBagCollection.from_embedding_bags(
            [torch.nn.EmbeddingBag(5, 4, mode="sum", sparse=sparse) for _ in range(2)]
        )
    elif sparse:
        pytest.skip("Bag is dense")
    compiled = module if backend is None else torch.compile(module, backend=backend)
    pooled = compiled(torch.cat((GOOD, GOOD)), torch.tensor([0, 2, 3, 4, 6]) if collection else OFFSETS)
    with pytest.raises(errors.ArgumentValueError, match=r"^recfuse\.\w+: grad has no memory"):
        pooled.backward(freed(torch.ones_like(pooled)))


def test_memory_in_a_backward_pass():
    call = calls()["fused_embedding_bag_backward"] | {"rows": 2**45, "features": torch.zeros(0, 7).long()}
    call["offsets"] = call["offsets"][:1]
    call |= {"grad": torch.zeros(0, 8), "winners": None, "per_sample_weights": None, "indices": GOOD[:0]}
    with pytest.raises(torch.OutOfMemoryError, match=r"^recfuse\.fused_embedding_bag_backward: ") as raised:
        overload("fused_embedding_bag_backward")(**call)
    assert isinstance(raised.value, MemoryError)


def test_a_call_by_the_name_of_the_operator():
    for operator in (torch.ops.recfuse.embedding_bag, torch.ops.recfuse.embedding_bag.default):
        for gradients in (torch.enable_grad, torch.inference_mode):
            with gradients(), pytest.raises(IndexError, match=r"^recfuse\.embedding_bag: indices\[1\] is 9"):
                operator(torch.rand(5, 4), BAD, OFFSETS, "sum")
        with pytest.raises(TypeError, match=r"^recfuse\.embedding_bag: weight is None; expected a tensor"):
            operator(None, GOOD, OFFSETS)


def test_private_operators_have_public_names_in_messages():
    with pytest.raises(ValueError, match=r"^recfuse\.embedding_bag: grad has 1 dimensions"):
        overload("_embedding_bag_gradient")(**calls()["_embedding_bag_gradient"] | {"grad": torch.rand(3)})


def test_a_scripted_call_still_finds_the_operator():
    def call(weight, indices, offsets):
        return torch.ops.recfuse.embedding_bag(weight, indices, offsets, "sum")

    weight = torch.rand(5, 4)
    scripted = torch.jit.trace(call, (weight, GOOD, OFFSETS), check_trace=False)
    torch.testing.assert_close(scripted(weight, GOOD, OFFSETS), call(weight, GOOD, OFFSETS))
    with pytest.raises(RuntimeError, match=r"recfuse\.embedding_bag: indices\[1\] is 9"):
        scripted(weight, BAD, OFFSETS)
