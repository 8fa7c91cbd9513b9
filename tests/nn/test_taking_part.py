"""Tables that take no part in a step: as in torch they do not change, or the step raises."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn, optim

import recfuse
from recfuse.nn import FusedEmbeddingBagList
from support.compiled import sees_optimizers

ROWS = (9, 7, 5)
BATCH = [(torch.randint(0, rows, (6,)), torch.tensor([0, 2, 4])) for rows in ROWS]
close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


def bags(sparse=False, dtype=None):
    return [nn.EmbeddingBag(rows, 4, mode="sum", sparse=sparse, dtype=dtype) for rows in ROWS]


def pooled(tables, used):
    """All tables in one call; the loss uses `used`."""
    indices, offsets = zip(*BATCH, strict=True)
    if isinstance(tables, FusedEmbeddingBagList):
        found = tables.pool(list(offsets), list(indices))
    else:
        found = [tables[at](indices[at], offsets[at]) for at in range(len(ROWS))]
    return sum((one if at in used else one.detach()).square().sum() for at, one in enumerate(found))


def one_by_one(tables, used):
    """Single tables, each in its own call."""
    return sum(tables[at](*BATCH[at]).square().sum() for at in used)


def views(tables, used):
    """Of the weights, without a call."""
    return sum(tables[at].weight.square().sum() for at in used)


LOSSES = {"pooled": pooled, "one by one": one_by_one}
STEPS = ({0, 2}, {1}, {0, 1, 2}, {2})
MOVING = {
    "AdamW": functools.partial(optim.AdamW, lr=0.1, weight_decay=0.1),
    "momentum": functools.partial(optim.SGD, lr=0.1, momentum=0.9),
    "decay": functools.partial(optim.SGD, lr=0.1, weight_decay=0.1),
    "RMSprop": optim.RMSprop,
    "Adagrad with lr_decay": functools.partial(optim.Adagrad, lr=0.1, lr_decay=0.1),
}
STILL = {
    "SGD": functools.partial(optim.SGD, lr=0.1),
    "Adagrad": functools.partial(optim.Adagrad, lr=0.1),
    "LBFGS": functools.partial(optim.LBFGS, lr=0.1),
}


def step(tables, optimizer, loss, used):
    def closure():
        optimizer.zero_grad()
        found = loss(tables, used)
        found.backward()
        return found

    if isinstance(optimizer, recfuse.optim.SGD.__mro__[1]):
        closure()
        optimizer.step()
    else:
        optimizer.step(closure)


def pair(make, sparse=False, dtype=None, row_wise=None):
    """Tables of torch, and packed tables, each with an optimizer."""
    plain = nn.ModuleList(bags(sparse, dtype))
    own = copy.deepcopy(plain)
    theirs, ours = make(plain.parameters()), make(own.parameters())
    if row_wise is not None:
        ours.recfuse_row_wise = row_wise
    return plain, theirs, FusedEmbeddingBagList(own, optimizers=[ours]), ours


def same(plain, packed):
    for at in range(len(ROWS)):
        close(packed[at].weight.detach(), plain[at].weight.detach())


@pytest.mark.parametrize("sparse", (False, True))
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("make", STILL.values(), ids=STILL)
def test_optimizers_unmoved_by_zero_gradients_step(make, loss, sparse):
    is_lbfgs = make is STILL["LBFGS"]  # its products of all Parameters are rounded in another order
    plain, theirs, packed, ours = pair(make, sparse and not is_lbfgs, torch.float64 if is_lbfgs else None)
    for used in STEPS:
        step(plain, theirs, loss, used)
        step(packed, ours, loss, used)
        same(plain, packed)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("loss", (*LOSSES.values(), views), ids=(*LOSSES, "views"))
@pytest.mark.parametrize("make", MOVING.values(), ids=MOVING)
def test_a_step_that_would_move_a_table_raises(make, loss, dtype):
    _, _, packed, ours = pair(make, dtype=dtype)
    with pytest.raises(ValueError, match=r"table '1' took no part in this step"):
        step(packed, ours, loss, {0, 2})


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_sparse_adam_counts_the_steps_of_a_table(loss):
    _, _, packed, ours = pair(optim.SparseAdam, sparse=True)
    with pytest.raises(ValueError, match=r"table '1' took no part"):
        step(packed, ours, loss, {0, 2})


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("make", MOVING.values(), ids=MOVING)
def test_with_a_parameter_a_table_every_optimizer_is_right(make, loss, dtype):
    plain, theirs, packed, ours = pair(make, dtype=dtype, row_wise=False)
    for used in STEPS:
        step(plain, theirs, loss, used)
        step(packed, ours, loss, used)
        same(plain, packed)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("make", MOVING.values(), ids=MOVING)
def test_steps_that_use_all_tables_equal_torchs(make, loss):
    plain, theirs, packed, ours = pair(make)
    for _ in range(3):
        step(plain, theirs, loss, {0, 1, 2})
        step(packed, ours, loss, {0, 1, 2})
        same(plain, packed)


def test_tables_that_take_part_in_several_backward_passes():
    plain, theirs, packed, ours = pair(MOVING["AdamW"])
    for tables, optimizer in ((plain, theirs), (packed, ours)):
        for used in ({0}, {1, 2}):
            one_by_one(tables, used).backward()
        optimizer.step()
        optimizer.zero_grad()
        pooled(tables, {0, 1, 2}).backward()
        one_by_one(tables, {1}).backward()
        optimizer.step()
    same(plain, packed)


def test_autograd_grad_records_no_table():
    _, _, packed, ours = pair(MOVING["AdamW"])
    one_by_one(packed, {0, 2}).backward()
    torch.autograd.grad(one_by_one(packed, {1}), list(packed.parameters()))
    with pytest.raises(ValueError, match=r"table '1' took no part"):
        ours.step()


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("deferred", (False, True))
@pytest.mark.parametrize("kind", ("SGD", "Adagrad", "RowWiseAdagrad", "Adam"))
def test_fused_optimizers_pass_over_such_tables(kind, deferred, loss):
    packed = FusedEmbeddingBagList(bags())
    make = functools.partial(getattr(recfuse.optim, kind), lr=0.1, weight_decay=0.1, deferred=deferred)
    optimizer = make(packed.parameters())
    step(packed, optimizer, loss, {0, 1, 2})
    before = {name: value.clone() for name, value in packed.state_dict().items()}
    (parameter,) = packed.parameters()
    states = {name: value.clone() for name, value in optimizer.state[parameter].items() if name != "step"}
    step(packed, optimizer, loss, {0, 2})
    rows = packed.layout.tables[1]
    own = slice(rows.first_row, rows.first_row + rows.num_embeddings)
    assert torch.equal(packed[1].weight, before["1.weight"])
    for name, value in states.items():
        assert torch.equal(optimizer.state[parameter][name][own], value[own])
    for number in (0, 2):
        assert not torch.equal(packed[number].weight, before[f"{number}.weight"])


def test_a_sparse_gradient_has_no_rows_of_such_tables():
    packed = FusedEmbeddingBagList(bags(sparse=True))
    pooled(packed, {0, 2}).backward()
    assert packed[1].weight.grad._nnz() == 0
    assert packed[0].weight.grad._nnz() > 0


def test_a_matrix_without_a_used_table_has_no_gradient():
    packed = FusedEmbeddingBagList([*bags(), nn.EmbeddingBag(4, 8, mode="sum")])
    indices, offsets = zip(*BATCH, (torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2])), strict=True)
    packed.pool(list(offsets), list(indices))[3].sum().backward()
    assert [parameter.grad is None for parameter in packed.parameters()] == [True, False]


def test_discarded_gradients_do_not_affect_later_steps():
    """A discarded gradient has no effect on the next gradient of a table without lookups."""
    _, _, packed, ours = pair(MOVING["AdamW"])
    one_by_one(packed, {0, 2}).backward()
    ours.zero_grad()
    indices, offsets = zip(*BATCH, strict=True)
    indices, offsets = list(indices), list(offsets)
    indices[1], offsets[1] = indices[1][:0], torch.zeros(3, dtype=torch.int64)
    sum(one.square().sum() for one in packed.pool(offsets, indices)).backward()
    ours.step()


class Model(nn.Module):
    def __init__(self, tables, used, loss=pooled):
        super().__init__()
        self.tables, self.used, self.loss = tables, used, loss

    def forward(self):
        return self.loss(self.tables, self.used)


def compiled(tables, used, backend, loss=pooled):
    torch.compiler.reset()
    return torch.compile(Model(tables, used, loss), backend=backend, fullgraph=True)


BACKENDS = {"aot_eager": lambda: "aot_eager", "recfuse": lambda: recfuse.backend("aot_eager")}


@pytest.mark.parametrize(
    ("sparse", "loss"),
    (
        (False, pooled),
        pytest.param(True, pooled, marks=pytest.mark.long),
        pytest.param(False, one_by_one, marks=pytest.mark.long),
    ),
)
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_a_compiled_step_raises_too(backend, sparse, loss):
    _, _, packed, ours = pair(optim.SparseAdam if sparse else MOVING["AdamW"], sparse)
    compiled(packed, {0, 2}, backend(), loss).forward().backward()
    with pytest.raises(ValueError, match=r"table '1' took no part in this step"):
        ours.step()
    ours.zero_grad()
    compiled(packed, {0, 1, 2}, backend(), loss).forward().backward()
    ours.step()


@sees_optimizers
@pytest.mark.parametrize("make", (MOVING["AdamW"], pytest.param(MOVING["momentum"], marks=pytest.mark.long)))
def test_a_compiled_program_with_a_parameter_a_table(make):
    plain, theirs, packed, ours = pair(make, row_wise=False)
    for used in STEPS:
        step(plain, theirs, pooled, used)
        ours.zero_grad()
        compiled(packed, used, "aot_eager").forward().backward()
        ours.step()
        same(plain, packed)


@pytest.mark.long
@sees_optimizers
@pytest.mark.parametrize("kind", ("SGD", "Adagrad", "RowWiseAdagrad", "Adam"))
def test_fused_optimizers_pass_over_such_tables_in_a_compiled_program(kind):
    packed = FusedEmbeddingBagList(bags())
    twin = copy.deepcopy(packed)
    make = functools.partial(getattr(recfuse.optim, kind), lr=0.1, weight_decay=0.1)
    ours, theirs = make(packed.parameters()), make(twin.parameters())
    for used in ({0, 1, 2}, {0, 2}, {1}):
        compiled(packed, used, "aot_eager").forward().backward()
        pooled(twin, used).backward()
        ours.step()
        theirs.step()
        same(twin, packed)


def test_an_exported_program_has_operators_of_c_alone():
    packed = FusedEmbeddingBagList(bags())
    for strict, loss in ((False, pooled), (True, pooled), (False, one_by_one)):
        program = torch.export.export(Model(packed, {0, 1, 2}, loss), (), strict=strict)
        names = {str(node.target) for node in program.graph.nodes}
        assert {name for name in names if name.startswith("recfuse")} == {
            "recfuse.fused_embedding_bag.default"
        }
