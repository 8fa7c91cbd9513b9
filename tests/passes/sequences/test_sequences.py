"""Histories of graphs: lookups that are padded, joined by cat, masked or used apart become one call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recfuse

pytest.importorskip("fbgemm_gpu", reason="fbgemm_gpu is not installed (the test extra's peers are optional)")
from support.graphs import WAYS, gradients, passed
from support.graphs.histories import ROWS, Fixed, Padded, complete, pad, pad_by_torch

pytestmark = pytest.mark.long
each_way = pytest.mark.parametrize("way", WAYS)


def calls_of(graph: torch.fx.Graph, name: str) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if name in str(node.target)]


def assert_equal(found: Any, expected: Any) -> None:
    """Bits are equal: rows are copied."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def swapped_program(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    program = torch.export.export(model, batch)
    return program, recfuse.swap(program)


@each_way
@pytest.mark.parametrize("make", (Padded, Fixed))
def test_bits_are_the_models(way: str, make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = make().requires_grad_(False)
    batch = model.batch(6)
    swapped, report = passed(model, batch, way)
    assert not report.left and {entry.pattern for entry in report.swapped} == {"sequences"}
    assert_equal(swapped(*batch), model(*batch))
    if way in ("eager", "aot_eager"):
        for bags in (1, 3, 40):
            batch = model.batch(bags)
            assert_equal(swapped(*batch), model(*batch))


@pytest.mark.parametrize("way", ("eager", "aot_eager", "exported"))
@pytest.mark.parametrize("make", (Padded, Fixed, lambda: Padded(padding_idx=2)))
def test_gradients_are_the_models(way: str, make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = make()
    batch = model.batch(6)
    swapped, report = passed(model, batch, way)
    assert report.swapped
    expected = gradients(model, model, batch)
    if way == "exported":
        own = dict(swapped.named_parameters())
        gradients(swapped, swapped, batch)
        found = [own[name].grad for name, _ in model.named_parameters()]
    else:
        found = gradients(model, swapped, batch)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_sparse_gradients() -> None:
    torch.manual_seed(0)
    model = Padded(sparse=True)
    batch = model.batch(6)
    swapped, report = passed(model, batch, "eager")
    assert report.swapped
    for one, other in zip(gradients(model, swapped, batch), gradients(model, model, batch), strict=True):
        torch.testing.assert_close(one, other)


def test_rows_that_are_used_apart_stay_in_training() -> None:
    model = Fixed()
    _, report = passed(model, model.batch(4), "eager")
    assert len(report.swapped) == len(report.left) == 3
    assert {entry.detail for entry in report.left} == {
        "the rows are used apart and a table trains, so one call would gain nothing"
    }


def test_programs_for_any_batch() -> None:
    model = Fixed().requires_grad_(False)
    batch = torch.export.Dim("batch", min=2, max=1 << 16)
    program = torch.export.export(model, model.batch(6), dynamic_shapes=({0: batch},))
    report = recfuse.swap(program, check=[model.batch(2), model.batch(30)])
    assert not report.left and len(calls_of(program.graph, "recfuse.fused_embedding.default")) == 2
    assert not calls_of(program.graph, "aten.embedding")
    for samples in (2, 7, 500):
        own = model.batch(samples)
        assert_equal(program.module()(*own), model(*own))


def test_a_saved_program_runs(tmp_path: Any) -> None:
    model = Padded().requires_grad_(False)
    batch = model.batch(6)
    program, _ = swapped_program(model, batch)
    torch.export.save(program, tmp_path / "model.pt2")
    assert_equal(torch.export.load(tmp_path / "model.pt2").module()(*batch), model(*batch))


class Split(nn.Module):
    """One table for all features of a batch; the rows are split, converted and padded."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 4, dtype=dtype).requires_grad_(False)

    def forward(self, values: Tensor, lengths: Tensor) -> tuple[Tensor]:
        matrix = lengths.view(3, -1)
        sizes = matrix.sum(1).tolist()
        for size in sizes:
            torch._check(size >= 0)
            torch._check(size <= values.shape[0])
        parts = self.table(values).split(sizes)
        padded = [
            pad(part.float(), complete(own), 2) for part, own in zip(parts, matrix.unbind(0), strict=True)
        ]
        return (torch.cat(padded, -1),)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_one_lookup_for_all_features(dtype: torch.dtype) -> None:
    """All keys of the lengths are read where they lie: no cat of indices."""
    model = Split(dtype)
    batch = torch.randint(0, ROWS, (11,)), torch.tensor([1, 3, 0, 2, 5, 0])
    values = torch.export.Dim("values", min=2)
    program = torch.export.export(model, batch, dynamic_shapes=({0: values}, None), strict=False)
    report = recfuse.swap(program)
    (call,) = calls_of(program.graph, "recfuse.fused_embedding.default")
    assert not report.left and call.args[2].op == "placeholder"
    assert_equal(program.module()(*batch), model(*batch))


@pytest.mark.parametrize("operator", ("jagged_2d_to_dense", "of nested tensors"))
def test_other_operators_that_pad(operator: str) -> None:
    class Model(Padded):
        def forward(self, indices: list[Tensor], lengths: list[Tensor]) -> tuple[Tensor]:  # type: ignore[override]
            found = []
            for table, own, counts in zip(self.tables, indices, lengths, strict=True):
                if operator == "jagged_2d_to_dense":
                    found.append(torch.ops.fbgemm.jagged_2d_to_dense(table(own), complete(counts), 3))
                else:
                    found.append(pad_by_torch(table(own), complete(counts), 3))
            return (torch.cat(found, -1),)

    model = Model().requires_grad_(False)
    batch = model.batch(6)
    program, report = swapped_program(model, batch)
    assert not report.left and len(calls_of(program.graph, "recfuse.fused_embedding.default")) == 1
    assert_equal(program.module()(*batch), model(*batch))


def test_torchrecs_histories() -> None:
    torchrec = pytest.importorskip("torchrec", reason="torchrec is not installed")
    from torchrec.modules.embedding_configs import EmbeddingConfig

    keys = ["a", "b", "c"]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            configs = [
                EmbeddingConfig(name=key, num_embeddings=ROWS, embedding_dim=4, feature_names=[key])
                for key in keys
            ]
            self.tables = torchrec.EmbeddingCollection(tables=configs)

        def forward(self, values: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
            found = self.tables(torchrec.KeyedJaggedTensor(keys, values, lengths=lengths))
            padded = [own.to_padded_dense(4) for own in found.values()]
            return torch.cat(padded, -1), padded[0] + 1

    model = Model().requires_grad_(False)
    batch = torch.randint(0, ROWS, (11,)), torch.tensor([1, 3, 0, 2, 5, 0])
    values = torch.export.Dim("values", min=2)
    program = torch.export.export(model, batch, dynamic_shapes=({0: values}, None), strict=False)
    report = recfuse.swap(program)
    assert len(report.swapped) == 3 and not calls_of(program.graph, "aten.embedding")
    assert_equal(program.module()(*batch), model(*batch))


def masks(lengths: Tensor, length: int = 3) -> Tensor:
    return (torch.arange(length) < lengths.unsqueeze(1)).unsqueeze(-1)


MASKED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "product": lambda padded, lengths, _: padded * masks(lengths),
    "product of floats": lambda padded, lengths, _: padded * masks(lengths).float(),
    "where": lambda padded, lengths, _: torch.where(masks(lengths), padded, 0.0),
    "masked_fill": lambda padded, lengths, _: padded.masked_fill(~masks(lengths), 0.0),
    "of other lengths": lambda padded, lengths, other: padded * masks(other),
    "filled with 1": lambda padded, lengths, _: padded.masked_fill(~masks(lengths), 1.0),
    "of the other positions": lambda padded, lengths, _: padded.masked_fill(masks(lengths), 0.0),
    "of later positions": lambda padded, lengths, _: (
        padded * (torch.arange(1, 4) < lengths.unsqueeze(1)).unsqueeze(-1)
    ),
}


@pytest.mark.parametrize("name", MASKED)
def test_masks_of_the_padding_are_removed(name: str) -> None:
    class Model(Padded):
        def forward(self, indices: list[Tensor], lengths: list[Tensor]) -> tuple[Tensor]:  # type: ignore[override]
            found = [
                MASKED[name](pad(table(own), complete(counts), 3), counts, lengths[0] + 1)
                for table, own, counts in zip(self.tables, indices, lengths, strict=True)
            ]
            return (torch.cat(found, -1),)

    torch.manual_seed(0)
    model = Model().requires_grad_(False)
    with torch.no_grad():
        model.tables[0].weight[3] = -torch.inf
    batch = model.batch(6)
    program, report = swapped_program(model, batch)
    removed = [entry for entry in report.swapped if entry.kind == "mask of a padded history"]
    assert len(removed) == (3 if list(MASKED).index(name) < 4 else 0)
    found, expected = program.module()(*batch), model(*batch)
    assert torch.equal(found[0].nan_to_num(7), expected[0].nan_to_num(7))


LEFT: dict[str, tuple[Callable[[Any, Tensor, Tensor], Any], str]] = {
    "padded with 1": (lambda table, own, ends: pad(table(own), ends, 3, 1.0), "padding_value is 1.0"),
    "other use": (
        lambda table, own, ends: (pad(rows := table(own), ends, 3), rows.sum(0)),
        "the rows have another use, sum_1, before the padding",
    ),
    "converted twice": (
        lambda table, own, ends: pad(table(own).half().split([2, 3])[0].float(), ends.clamp(max=2), 3),
        "the rows are converted twice or to another device",
    ),
    "double": (lambda table, own, ends: pad_by_torch(table(own), ends, 3), "expected 3 dims of float32"),
    "scaled by frequency": (
        lambda table, own, ends: pad(F.embedding(own, table.weight, scale_grad_by_freq=True), ends, 3),
        "scale_grad_by_freq is set",
    ),
    "written to": (
        lambda table, own, ends: pad(table(own), ends, 3).add_(1),
        "is written to in place",
    ),
    "alone": (lambda table, own, ends: table(own.view(1, 5)) + 1, "no other lookup has indices"),
    "returned": (
        lambda table, own, ends: (table(own.view(1, 5)), table(own.view(1, 5) // 2).view(-1)),
        "the program returns them",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_skipped_histories_have_a_reason(name: str) -> None:
    function, reason = LEFT[name]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(ROWS, 4).requires_grad_(False)
            if name == "double":
                self.table.double()

        def forward(self, indices: Tensor, lengths: Tensor) -> Any:
            found = function(self.table, indices, complete(lengths))
            return found if isinstance(found, tuple) else (found,)

    model = Model()
    batch = torch.randint(0, ROWS, (5,)), torch.tensor([2, 0, 3])
    program, report = swapped_program(copy.deepcopy(model), batch)
    assert not report.swapped and any(reason in entry.detail for entry in report.left), str(report)
    assert_equal(program.module()(*batch), model(*batch))


def test_bad_contents_raise() -> None:
    class Model(Padded):
        def forward(self, indices: list[Tensor], offsets: list[Tensor]) -> tuple[Tensor]:  # type: ignore[override]
            both = zip(self.tables, indices, offsets, strict=True)
            return (torch.cat([pad(table(own), ends, 3) for table, own, ends in both], -1),)

    model = Model().requires_grad_(False)
    indices = [torch.arange(5) for _ in range(3)]
    offsets = [torch.tensor([0, 2, 4]) for _ in range(3)]  # the last lookup is in no history
    program, report = swapped_program(model, (indices, offsets))
    assert not report.left
    assert_equal(program.module()(indices, offsets), model(indices, offsets))
    with pytest.raises(RuntimeError, match=r"recfuse.fused_embedding: offsets of a table begin with another"):
        program.module()(indices, [offsets[0] + 1, *offsets[1:]])
    with pytest.raises(ValueError, match="offsets"):
        program.module()(indices, [torch.tensor([0, 4, 2]), *offsets[1:]])
    with pytest.raises(ValueError, match="offsets"):
        program.module()(indices, [torch.tensor([0, 4, 9]), *offsets[1:]])
    with pytest.raises(IndexError, match="for feature 1, bag 0; expected 0 to 19"):
        program.module()([indices[0], torch.tensor([20, 0, 0, 0, 0]), indices[2]], offsets)
