"""``FusedEmbeddingCollection``: values, gradients, state and errors of torch's embeddings."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import recfuse
from recfuse.nn import FusedEmbeddingCollection, Table

SHAPES = ((30, 4), (9, 8), (50, 4))


def batch(features: int = 3, bags: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Indices, offsets and the indices of each feature."""
    torch.manual_seed(seed)
    lengths = torch.randint(0, 4, (features * bags,))
    ends = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    indices = torch.randint(9, (int(ends[-1]),))
    bounds = ends[::bags].tolist()
    return indices, ends, [indices[a:b] for a, b in itertools.pairwise(bounds)]


def tables(sparse: bool = False) -> list[nn.Embedding]:
    torch.manual_seed(1)
    return [nn.Embedding(rows, dim, sparse=sparse) for rows, dim in SHAPES]


def test_rows_are_those_of_the_tables() -> None:
    own = tables()
    expected = [table.weight.detach().clone() for table in own]
    collection = FusedEmbeddingCollection.from_embeddings(own, ["a", "b", "c"])
    indices, offsets, parts = batch()
    found = collection(indices, offsets)
    for one, part, weight in zip(found, parts, expected, strict=True):
        assert torch.equal(one, weight[part])
    assert len({one.untyped_storage().data_ptr() for one in found}) == 1
    for name, weight, part in zip("abc", expected, parts, strict=True):
        assert torch.equal(collection.tables[name](part), weight[part])
        assert torch.equal(collection.tables[name](part[:2, None]), weight[part[:2, None]])
    padded = collection(indices, offsets, layout="padded", length=2)
    assert padded.shape == (5, 2, 16)
    assert not padded[..., :4][~recfuse.history_mask(offsets[:6], 2)].any()


@pytest.mark.parametrize("sparse", (False, True))
def test_gradients_are_those_of_torch(sparse: bool) -> None:
    own = tables(sparse)
    twins = copy.deepcopy(own)
    collection = FusedEmbeddingCollection.from_embeddings(own)
    indices, offsets, parts = batch()
    found = collection(indices, offsets)
    sum((rows * (1 + number)).sum() for number, rows in enumerate(found)).backward()
    for number, (twin, part) in enumerate(zip(twins, parts, strict=True)):
        (twin(part) * (1 + number)).sum().backward()
        grad = collection.tables[f"t{number}"].weight.grad
        assert grad is not None and twin.weight.grad is not None
        assert grad.is_sparse == sparse and torch.equal(grad.to_dense(), twin.weight.grad.to_dense())


def test_a_feature_that_is_not_used_moves_no_table() -> None:
    """Torch's Adam does not step a table without a gradient, and its state must not change either."""
    own = tables()
    before = own[2].weight.detach().clone()
    collection = FusedEmbeddingCollection.from_embeddings(own)
    optimizer = recfuse.optim.Adam(collection, lr=0.1)
    indices, offsets, _ = batch()
    for step in range(2):
        found = collection(indices, offsets)
        (found[0].sum() + (found[1].sum() if step else 0)).backward()
        optimizer.step()
    assert torch.equal(collection.tables["t2"].weight, before)


def test_frozen_tables_stay() -> None:
    own = tables()
    collection = FusedEmbeddingCollection.from_embeddings(own)
    collection.tables["t2"].requires_grad_(False)
    before = collection.tables["t2"].weight.clone()
    first = collection.tables["t0"].weight.clone()
    trained = [weight for weight in collection.packed_weights() if weight.requires_grad]
    optimizer = recfuse.optim.SGD(trained, lr=1.0)
    indices, offsets, parts = batch()
    found = collection(indices, offsets)
    assert torch.equal(found[2], before[parts[2]])
    sum(rows.sum() for rows in found).backward()
    optimizer.step()
    assert torch.equal(collection.tables["t2"].weight, before)
    assert not torch.equal(collection.tables["t0"].weight, first)


def test_one_update_for_a_table_of_bags_and_histories() -> None:
    """A Parameter that a pooled and an unpooled call share is updated once, with the sum of its gradients."""
    weight = nn.Parameter(torch.randn(9, 4))
    expected = weight.detach().clone().requires_grad_()
    optimizer = recfuse.optim.Adagrad([weight], lr=0.5)
    reference = torch.optim.Adagrad([expected], lr=0.5)
    features = torch.tensor([[0, 0, 9, 4, 0, -1, 0]])
    indices, offsets = torch.tensor([1, 5, 5, 8]), torch.tensor([0, 3, 4])
    pooled = recfuse.fused_embedding_bag([weight], features, indices, offsets, 4)
    rows = recfuse.fused_embedding([weight], features, indices, offsets, 4)
    (pooled.sum() + 2 * rows.sum()).backward()
    optimizer.step()
    twin = functional.embedding_bag(indices, expected, offsets[:-1], mode="sum")
    (twin.sum() + 2 * functional.embedding(indices, expected).sum()).backward()
    reference.step()
    torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-6)


def test_state_dicts() -> None:
    collection = FusedEmbeddingCollection([Table(30, 4, name="a"), Table(9, 8, name="b", padding_idx=2)])
    state = collection.state_dict()
    assert list(state) == ["embeddings.a.weight", "embeddings.b.weight"]
    assert not state["embeddings.b.weight"][2].any()
    other = FusedEmbeddingCollection([Table(30, 4, name="a"), Table(9, 8, name="b")])
    other.load_state_dict(state)
    indices, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])
    for one, twin in zip(collection(indices, offsets), other(indices, offsets), strict=True):
        assert torch.equal(one, twin)
    for twin in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert torch.equal(twin(indices, offsets, layout="padded", length=2)[..., 4:],
                           other(indices, offsets, layout="padded", length=2)[..., 4:])  # fmt: skip
    alone = copy.deepcopy(other.tables["b"])
    assert type(alone) is nn.Embedding and torch.equal(alone.weight, state["embeddings.b.weight"])


def test_several_features_share_a_table() -> None:
    collection = FusedEmbeddingCollection([Table(30, 4, name="item", feature_names=("seen", "bought"))])
    assert collection.feature_names == ["seen", "bought"] and collection.feature_dims == [4, 4]
    joined = collection(torch.tensor([3, 4, 5, 6]), torch.tensor([0, 1, 2, 3, 4]), layout="joined")
    rows = collection.tables["item"].weight
    assert torch.equal(joined, torch.cat((rows[[3, 4]], rows[[5, 6]]), 1))


def test_padding_rows_are_read_and_get_no_gradient() -> None:
    table = nn.Embedding(9, 4, padding_idx=2)
    with torch.no_grad():
        table.weight[2] = 7
    collection = FusedEmbeddingCollection.from_embeddings([table])
    (found,) = collection(torch.tensor([2, 3]), torch.tensor([0, 2]))
    assert found[0].tolist() == [7] * 4
    found.sum().backward()
    grad = collection.tables["t0"].weight.grad
    assert grad is not None and grad.sum(1).tolist() == [0, 0, 0, 4, 0, 0, 0, 0, 0]


def test_half_and_float_tables_in_one_call() -> None:
    collection = FusedEmbeddingCollection([Table(9, 4), Table(9, 8, dtype=torch.float16)])
    assert [one.dtype for one in collection(torch.tensor([1, 2]), torch.tensor([0, 1, 2]))] == [
        torch.float32,
        torch.float32,
    ]
    (_, half) = collection(torch.tensor([1, 2]), torch.tensor([0, 1, 2]), dtype=torch.float16)
    assert torch.equal(half, collection.tables["t1"].weight[[2]])


def overlapping() -> list[nn.Embedding]:
    memory = torch.randn(8, 4)
    return [nn.Embedding.from_pretrained(memory[at : at + 5], freeze=False) for at in (0, 3)]


def hooked() -> list[nn.Embedding]:
    table = nn.Embedding(9, 4)
    table.weight.register_hook(lambda grad: grad * 2)
    return [table]


ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "mode": (
        lambda: FusedEmbeddingCollection([Table(9, 4, mode="mean")]), ValueError, "mode of t0 is 'mean'",
    ),
    "weights": (
        lambda: FusedEmbeddingCollection([nn.Embedding(9, 4)]), TypeError, r"Call from_embeddings\(tables\)",
    ),
    "twice": (
        lambda: FusedEmbeddingCollection([Table(9, 4, name="a")] * 2), ValueError, "two tables are named 'a'",
    ),
    "bags": (
        lambda: FusedEmbeddingCollection.from_embeddings([nn.EmbeddingBag(9, 4)]), ValueError,
        "table 0 is .*EmbeddingBag.*; expected a torch.nn.Embedding",
    ),
    "max_norm": (
        lambda: FusedEmbeddingCollection.from_embeddings([nn.Embedding(9, 4, max_norm=1.0)]), ValueError,
        "table 0 has max_norm",
    ),
    "no offsets": (
        lambda: FusedEmbeddingCollection([(9, 4)])(torch.tensor([1])), TypeError, "offsets is a NoneType",
    ),
    "offsets": (
        lambda: FusedEmbeddingCollection([(9, 4)] * 2)(torch.tensor([1]), torch.tensor([0, 1])), ValueError,
        r"offsets has shape \[2\]",
    ),
    "first offset": (
        lambda: FusedEmbeddingCollection([(9, 4)])(torch.tensor([1, 2]), torch.tensor([1, 2])), ValueError,
        "offsets begin at 1 and end at 2; expected 0 and 2",
    ),
    "last offset": (
        lambda: FusedEmbeddingCollection([(9, 4)])(torch.tensor([1, 2]), torch.tensor([0, 1])), ValueError,
        "offsets begin at 0 and end at 1; expected 0 and 2",
    ),
    "float offsets": (
        lambda: FusedEmbeddingCollection([(9, 4)])(torch.tensor([1]), torch.tensor([0.0, 1.0])), TypeError,
        "offsets is float32; expected int32 or int64",
    ),
    "sizes": (
        lambda: FusedEmbeddingCollection([(9, 4)] * 2)(torch.tensor([1]), torch.tensor([0, 1, 1]), sizes=[1]),
        ValueError, "sizes has 1 elements; expected a list of 2",
    ),
    "tensor of sizes": (
        lambda: FusedEmbeddingCollection([(9, 4)])(
            torch.tensor([1]), torch.tensor([0, 1]), sizes=torch.tensor([1])
        ),
        ValueError, "sizes is a Tensor; expected a list of 1",
    ),
    "a list for a table": (
        lambda: FusedEmbeddingCollection([(9, 4)]).tables["t0"]([1]), TypeError, "input is a list",
    ),
    "shared memory": (
        lambda: FusedEmbeddingCollection.from_embeddings(overlapping()), ValueError,
        "table 1 shares memory with table 0, which packing would separate. Call such a table alone",
    ),
    "hook of a weight": (
        lambda: FusedEmbeddingCollection.from_embeddings(hooked()), ValueError,
        "table 0: weight has gradient hooks",
    ),
    "index": (
        lambda: FusedEmbeddingCollection([(9, 4)])(torch.tensor([1, 9]), torch.tensor([0, 2])), IndexError,
        r"history\[1\] is 9, for feature 0, bag 0",
    ),
    "double": (
        lambda: FusedEmbeddingCollection([Table(9, 4, dtype=torch.float64)])(
            torch.tensor([1]), torch.tensor([0, 1])
        ),
        ValueError, "the tables are not in one call",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    make, kind, text = ERRORS[case]
    with pytest.raises(kind, match=f"recfuse.*{text}"):
        make()


@pytest.mark.parametrize("layout", ("joined", "padded"))
def test_compiled_training(layout: str) -> None:
    collection = FusedEmbeddingCollection([(30, 4), (9, 4)])
    indices, offsets = torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([0, 1, 3, 4, 6])

    def loss(module: nn.Module) -> Tensor:
        found = module(indices, offsets, layout=layout, length=2 if layout == "padded" else 0)
        return found.square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    compiled(collection).backward()
    (grad,) = [weight.grad.clone() for weight in collection.packed_weights()]
    collection.zero_grad()
    loss(collection).backward()
    assert torch.equal(grad, collection.packed_weights()[0].grad)


def test_compiled_rows_of_each_feature() -> None:
    collection = FusedEmbeddingCollection([(30, 4), (9, 8)])
    indices, offsets, _ = batch(2)
    compiled = torch.compile(lambda: sum(rows.square().sum() for rows in collection(indices, offsets)),
                             backend="aot_eager")  # fmt: skip
    found = compiled()
    assert torch.equal(found, sum(rows.square().sum() for rows in collection(indices, offsets)))
