"""Entries that do not fit each other are refused, by the names of feature and column; weights, scales."""

from __future__ import annotations

import pytest
import torch

from recfuse.nn import EmbeddingColumns
from recfuse.nn.columns import Identity, Numeric

PAIR = (Identity("a", 5, 1), Identity("b", 5, 1))
ASIDE = Identity("a", 5, 1, pooling="sum", weights="w")


def jagged(samples, each=1):
    return torch.arange(samples * each) % 5, torch.arange(samples + 1) * each


def ones(module):
    with torch.no_grad():
        for weight in module.parameters():
            weight.fill_(1.0)
    return module


WRONG = {
    "beside dense": (
        {"a": torch.zeros(2, dtype=torch.long), "b": jagged(4)},
        "'b'.*offsets .5.; expected .3.",
    ),
    "beside jagged": ({"a": jagged(2), "b": jagged(4)}, "'b'.*offsets .5.; expected .3."),
    "beside one": ({"a": torch.zeros(1, dtype=torch.long), "b": jagged(4)}, "'b'.*offsets .5.; expected .2."),
    "fewer": ({"a": jagged(4), "b": jagged(2)}, "'b'.*offsets .3.; expected .5."),
    "dense": ({"a": torch.zeros(4, dtype=torch.long), "b": torch.zeros(2, dtype=torch.long)}, "'b'"),
    "no width": ({"a": torch.zeros(2, 0, dtype=torch.long), "b": jagged(2)}, r"'a'.*\[2, 0\]"),
    "two dimensions": ({"a": (torch.zeros(2, 2), torch.arange(3)), "b": jagged(2)}, r"'a'.*values \[2, 2\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_numbers_of_samples_are_refused(name):
    batch, text = WRONG[name]
    module = EmbeddingColumns(PAIR)
    for call in (module, module.pack, torch.no_grad()(module)):
        with pytest.raises(ValueError, match=text):
            call(batch)
    for call in (module, module.pack):
        assert call({"a": jagged(2), "b": jagged(2)}) is not None
    with pytest.raises(ValueError, match=text):
        module.to_torch()(batch)


def test_other_types_name_the_feature():
    module = EmbeddingColumns([*PAIR, Numeric("n")])
    good = {"a": jagged(3), "b": torch.zeros(3, dtype=torch.long), "n": torch.ones(3)}
    for name, entry in (("a", (torch.ones(3).double(), torch.arange(4))), ("n", torch.ones(3).double())):
        for grad in (True, False):
            with (
                torch.set_grad_enabled(grad),
                pytest.raises(TypeError, match=f"feature '{name}'"),
            ):
                module({**good, name: entry})
    with pytest.raises(ValueError, match=r"^recfuse.embedding_columns: column 'n': it is numeric"):
        module({**good, "n": torch.ones(3, 2)})


ASIDES = {
    "other offsets": (
        {
            "a": (torch.tensor([0, 1, 2]), torch.tensor([0, 1, 3])),
            "w": (torch.tensor([1.0, 10.0, 100.0]), torch.tensor([0, 2, 3])),
        },
        "have other offsets; expected the offsets of its values",
    ),
    "fewer samples": (
        {"a": jagged(2, 2), "w": (torch.ones(4), torch.tensor([0, 4]))},
        "have other offsets; expected the offsets of its values",
    ),
    "other shape": (
        {"a": torch.zeros(2, 3, dtype=torch.long), "w": torch.arange(6.0).view(3, 2)},
        r"\[3, 2\]",
    ),
    "jagged beside dense": (
        {"a": torch.zeros(2, 2, dtype=torch.long), "w": (torch.ones(4), torch.tensor([0, 1, 4]))},
        "have other offsets; expected the offsets of its values",
    ),
    "fewer": ({"a": jagged(2, 2), "w": torch.ones(3)}, "weights"),
}


@pytest.mark.parametrize("name", ASIDES)
def test_weights_of_other_samples_are_refused(name):
    batch, text = ASIDES[name]
    with pytest.raises(ValueError, match=text):
        EmbeddingColumns([ASIDE])(batch)


def test_weights_that_fit():
    module = ones(EmbeddingColumns([ASIDE]))
    values, ends = jagged(2, 2)
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    wide = torch.zeros(2, 2, dtype=torch.long)
    for feature in ((values, ends), wide):
        for aside in (weights, (weights, ends), (weights, ends.int()), (weights, ends.clone())):
            assert module({"a": feature, "w": aside}).flatten().tolist() == [3, 7]
    assert module({"a": wide, "w": weights.view(2, 2)}).flatten().tolist() == [3, 7]


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
def test_weights_of_every_float(dtype):
    columns = [
        Identity("a", 5, 1, pooling="sum", weighted=True),
        ASIDE.__class__("b", 5, 1, pooling="sum", weights="w"),
    ]
    module = ones(EmbeddingColumns(columns))
    weights = torch.tensor([0.5, 2.0, 4.0], dtype=dtype)
    entry = torch.arange(3), torch.tensor([0, 1, 3])
    batch = {"a": (*entry, weights), "b": entry, "w": weights}
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert module(batch).tolist() == [[0.5, 0.5], [6.0, 6.0]]
    assert module(module.pack(batch)).tolist() == [[0.5, 0.5], [6.0, 6.0]]


@pytest.mark.parametrize("pooling", ("sum", "mean", "max"))
def test_float16_sums_are_scaled_before_they_are_rounded(pooling):
    columns = [
        Identity("a", 3, 2, pooling=pooling, scale=0.1),
        Identity("b", 3, 2, pooling="sum", invalid="drop", fill_value=3.0),
        Identity("c", 3, 4, pooling="sum", scale=-0.5, slice=(1, 3)),
    ]
    module = EmbeddingColumns(columns, dtype=torch.float16)
    with torch.no_grad():
        for weight in module.parameters():
            weight.fill_(3e4)
    batch = {
        "a": torch.tensor([[0, 1, 2], [0, 0, 0]]),
        "b": torch.tensor([[7], [1]]),
        "c": (torch.tensor([1, 2]), torch.tensor([0, 2, 2])),
    }
    out = module(batch)
    torch.testing.assert_close(out, torch.no_grad()(module)(batch), rtol=1e-3, atol=0.0)
    assert out.isfinite().all() and out.requires_grad
    out.sum().backward()
    wide = module.to_torch().double()
    wide(batch).sum().backward()
    for name, table in module.tables.items():
        want = wide.tables._modules[name].weight.grad
        torch.testing.assert_close(table.weight.grad.double(), want, rtol=1e-3, atol=1e-3)


def test_training_on_the_meta_device():
    module = EmbeddingColumns([Identity("a", 2**32, 64), Identity("b", 9, 3, pooling="sum")], device="meta")
    batch = {
        "a": torch.empty(7, dtype=torch.long, device="meta"),
        "b": (
            torch.empty(9, dtype=torch.long, device="meta"),
            torch.empty(8, dtype=torch.long, device="meta"),
        ),
    }
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert module(batch).shape == (7, 67)


def test_bounds_check_is_looked_at_at_once():
    with pytest.raises(ValueError, match=('bounds_check is \'maybe\'; expected "on" or "off"')):
        EmbeddingColumns(PAIR, bounds_check="maybe")


@pytest.mark.parametrize("kind", ("sum", "max"))
def test_sums_of_mixed_dtypes_are_float32_in_training(kind):
    columns = [
        Identity("a", 50, 4, pooling="sum", dtype=torch.bfloat16),
        Identity("b", 50, 4, pooling=kind, dtype=torch.float32),
    ]
    module = EmbeddingColumns(columns)
    batch = {name: torch.randint(0, 50, (40, 9)) for name in "ab"}
    out = module(batch)
    assert out.dtype == torch.float32 and not torch.equal(out, out.bfloat16().float())
    torch.testing.assert_close(out, torch.no_grad()(module)(batch), rtol=1e-6, atol=1e-6)
    out.sum().backward()
    for parameter in module.parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0
