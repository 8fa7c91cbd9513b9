"""However a weight is changed, eager, compiled and exported calls use it.

Each way is applied to a packed module and, if possible, to a loop of torch's modules; then outputs and
gradients are compared, as they were before the change.
"""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from torch import nn

import recfuse
from recfuse.nn import EmbeddingBag, FusedEmbeddingBagCollection, FusedEmbeddingBagList, Table
from support.processes.fresh import run_python

SPECS = ((30, 4, "sum"), (20, 16, "mean"), (50, 4, "sum"), (9, 8, "max"))  # rows, dim, mode
BAGS = 6


def batch_of(seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(SPECS) * BAGS,), generator=generator)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    bounds = offsets[::BAGS].tolist()
    parts = [
        torch.randint(0, rows, (end - start,), generator=generator)
        for (rows, _, _), (start, end) in zip(SPECS, itertools.pairwise(bounds), strict=True)
    ]
    return torch.cat(parts), offsets


def loop_of(seed=1):
    """torch's modules, the reference of packed modules."""
    torch.manual_seed(seed)
    return nn.ModuleList([nn.EmbeddingBag(rows, dim, mode=mode) for rows, dim, mode in SPECS])


def call_loop(loop, indices, offsets):
    out = []
    for number, bag in enumerate(loop):
        own = offsets[number * BAGS : (number + 1) * BAGS + 1]
        part = slice(int(own[0]), int(own[-1]))
        out.append(
            nn.functional.embedding_bag(
                indices[part], bag.weight, own - own[0], mode=bag.mode, include_last_offset=True
            )
        )
    return torch.cat(out, dim=1)


class OfList(nn.Module):
    """A FusedEmbeddingBagList called as a collection is."""

    def __init__(self, bags):
        super().__init__()
        self.emb_l = FusedEmbeddingBagList(bags)

    @property
    def tables(self):
        return {f"t{number}": table for number, table in enumerate(self.emb_l)}

    def forward(self, indices, offsets):
        ends = offsets[BAGS::BAGS].tolist() if not torch.compiler.is_compiling() else None
        if ends is None:  # one feature after the other, as the list is called inside
            return self.emb_l._pool(indices, offsets)
        starts = [0, *ends[:-1]]
        own = [offsets[number * BAGS : (number + 1) * BAGS] - start for number, start in enumerate(starts)]
        parts = [indices[start:end] for start, end in zip(starts, ends, strict=True)]
        return torch.cat(self.emb_l.pool(own, parts), dim=1)


def keyed(bags):
    """TorchRec's collection, swapped; called as a collection is."""
    modules = pytest.importorskip("torchrec.modules.embedding_modules")
    configs = pytest.importorskip("torchrec.modules.embedding_configs")
    jagged = pytest.importorskip("torchrec.sparse.jagged_tensor")
    pooling = {"sum": configs.PoolingType.SUM, "mean": configs.PoolingType.MEAN}
    collection = modules.EmbeddingBagCollection(
        [
            configs.EmbeddingBagConfig(
                name=f"t{number}",
                num_embeddings=bag.num_embeddings,
                embedding_dim=bag.embedding_dim,
                pooling=pooling[bag.mode],
                feature_names=[f"f{number}"],
            )
            for number, bag in enumerate(bags)
        ]
    )
    with torch.no_grad():
        for bag, own in zip(bags, collection.embedding_bags.values(), strict=True):
            own.weight.copy_(bag.weight)

    class OfKeyed(nn.Module):
        def __init__(self):
            super().__init__()
            self.ebc = collection
            recfuse.swap(self)

        @property
        def tables(self):
            return self.ebc.tables

        def forward(self, indices, offsets):
            keys = [f"f{number}" for number in range(len(bags))]
            return self.ebc(jagged.KeyedJaggedTensor(keys, indices, offsets=offsets)).values()

    return OfKeyed()


SUBJECTS = {
    "collection": lambda loop: FusedEmbeddingBagCollection.from_embedding_bags(loop),
    "list": lambda loop: OfList(loop),
    "keyed": keyed,
}


def _assign(tables, number, value):
    tables[number].weight = value


def _assign_data(tables, number, value):
    tables[number].weight.data = value


def _copy(tables, number, value):
    with torch.no_grad():
        tables[number].weight.copy_(value)


def _copy_data(tables, number, value):
    tables[number].weight.data.copy_(value)


def _rows(tables, number, value):
    with torch.no_grad():
        tables[number].weight[2:5] = value[2:5]


def _init(tables, number, value):
    nn.init.constant_(tables[number].weight, float(value[0, 0]))


TABLE_WAYS = {
    "weight = tensor": _assign,
    "weight.data = tensor": _assign_data,
    "weight.copy_": _copy,
    "weight.data.copy_": _copy_data,
    "some rows": _rows,
    "nn.init": _init,
}


def _group_data(module):
    for parameter in module.parameters():
        parameter.data = torch.full_like(parameter, 0.25)


def _group_replaced(module):
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, nn.Parameter(torch.full_like(parameter, 0.5)))


def _group_in_place(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.75)


def _vector(module):
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(torch.full_like(vector, -0.5), module.parameters())


def _loaded(module, **options):
    state = {name: torch.full_like(value, 1.5) for name, value in module.state_dict().items()}
    module.load_state_dict(state, **options)


def _loaded_assigned_half(module):
    state = {name: torch.full_like(value, 1.5).half() for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)
    module.float()


def _sgd(module):
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(module.parameters(), lr=0.125).step()
    module.zero_grad()


MODULE_WAYS = {
    "parameter.data =": _group_data,
    "parameter replaced": _group_replaced,
    "parameter in place": _group_in_place,
    "vector_to_parameters": _vector,
    "load_state_dict": _loaded,
    "load_state_dict(assign)": lambda module: _loaded(module, assign=True),
    "load_state_dict(assign, half)": _loaded_assigned_half,
    "optimizer step": _sgd,
    "half and back": lambda module: module.half().float(),
    "share_memory": lambda module: module.share_memory(),
    "frozen": lambda module: module.requires_grad_(False),
    "to another device and back": lambda module: module.to("meta").to_empty(device="cpu").apply(_quarter),
}


def _quarter(module):
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.fill_(0.25)


def run(function, module, batch):
    """Output without and with gradients, and the gradient of each table."""
    with torch.no_grad():
        plain = function(*batch)
    out = function(*batch)
    torch.testing.assert_close(out, plain)
    if not out.requires_grad:
        return [plain]
    module.zero_grad()
    (out * torch.arange(out.numel()).view(out.shape).cos()).sum().backward()
    return [plain, *(parameter.grad for parameter in module.parameters())]


def check(function, module, loop, subject_tables, batch):
    """The module agrees with torch's loop, in outputs and in each table's gradient."""
    got = run(function, module, batch)
    want = run(lambda *given: call_loop(loop, *given), loop, batch)
    torch.testing.assert_close(got[0], want[0])
    assert (len(got) > 1) == (len(want) > 1)
    if len(got) > 1:
        for table, grad in zip(subject_tables(), want[1:], strict=True):
            torch.testing.assert_close(table.weight.grad, grad)


def subject_of(subject, compiled):
    """torch's loop, a batch, the packed module of the same weights, and the way to call it."""
    loop, batch = loop_of(), batch_of()
    if subject == "keyed":  # TorchRec has no max
        loop, batch = loop[:3], keyed_batch()
    module = SUBJECTS[subject](copy.deepcopy(loop))
    if not compiled:
        return loop, batch, module, module
    torch.compiler.reset()
    function = torch.compile(module, backend="aot_eager", fullgraph=subject == "collection")
    return loop, batch, module, function


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_a_changed_table_is_seen(subject, compiled):
    loop, batch, module, function = subject_of(subject, compiled)
    check(function, module, loop, lambda: module.tables.values(), batch)
    for number, (name, way) in enumerate(TABLE_WAYS.items()):
        table = number % len(loop)
        value = torch.randn_like(loop[table].weight)
        way(list(module.tables.values()), table, value)
        with torch.no_grad():
            if name == "some rows":
                loop[table].weight[2:5] = value[2:5]
            else:
                loop[table].weight.copy_(value[0, 0] if name == "nn.init" else value)
        check(function, module, loop, lambda: module.tables.values(), batch)


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_a_changed_module_is_seen(subject, compiled):
    loop, batch, module, function = subject_of(subject, compiled)
    for way in MODULE_WAYS.values():
        keys = list(module.state_dict())
        way(module)
        way(loop)
        assert list(module.state_dict()) == keys
        check(function, module, loop, lambda: module.tables.values(), batch)


def keyed_batch():
    indices, offsets = batch_of()
    offsets = offsets[: 3 * BAGS + 1]
    return indices[: int(offsets[-1])], offsets


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_a_changed_bag_is_seen(compiled):
    torch.manual_seed(3)
    theirs = nn.EmbeddingBag(30, 4, mode="sum")
    ours = EmbeddingBag(30, 4, mode="sum")
    ours.load_state_dict(theirs.state_dict())
    function = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    indices, offsets = torch.randint(0, 30, (20,)), torch.tensor([0, 3, 3, 9])
    for way in MODULE_WAYS.values():
        way(ours)
        way(theirs)
        outs = []
        for call, bag in ((function, ours), (theirs, theirs)):
            with torch.no_grad():
                plain = call(indices, offsets)
            out = call(indices, offsets)
            bag.zero_grad()
            if out.requires_grad:
                out.square().sum().backward()
            outs.append((plain, out.detach(), bag.weight.grad))
        for mine, other in zip(*outs, strict=True):
            torch.testing.assert_close(mine, other)


def test_functional_call_uses_the_given_weights_eager_and_compiled():
    module = FusedEmbeddingBagCollection.from_embedding_bags(loop_of())
    batch = batch_of()
    before = module(*batch)
    ones = {name: torch.ones_like(value) for name, value in module.named_parameters()}

    def call(given):
        return torch.func.functional_call(module, given, batch)

    loop = loop_of()
    with torch.no_grad():
        for bag in loop:
            bag.weight.fill_(1)
    torch.testing.assert_close(call(ones), call_loop(loop, *batch))
    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager")
    torch.testing.assert_close(compiled(ones), call_loop(loop, *batch))
    torch.testing.assert_close(compiled(dict(module.named_parameters())), before)
    torch.testing.assert_close(module(*batch), before)


class OfPool(nn.Module):
    """A list of tables as an exported program calls it: offsets and lookups stacked."""

    def __init__(self, bags):
        super().__init__()
        self.emb_l = FusedEmbeddingBagList(bags)

    def forward(self, indices, offsets):
        return torch.cat(self.emb_l.pool(offsets, indices), dim=1)


@pytest.mark.parametrize("strict", (False, True))
@pytest.mark.parametrize("subject", ("collection", "list", "bag"))
def test_an_exported_program_reads_its_parameters(subject, strict):
    loop, batch = loop_of(), batch_of()
    want = call_loop
    if subject == "collection":
        module = FusedEmbeddingBagCollection.from_embedding_bags(copy.deepcopy(loop))
    elif subject == "list":
        module = OfPool(copy.deepcopy(loop))
        batch = torch.randint(0, 9, (len(SPECS), 12)), torch.arange(0, 12, 2).repeat(len(SPECS), 1)

        def want(loop, indices, offsets):
            return torch.cat([bag(i, o) for bag, i, o in zip(loop, indices, offsets, strict=True)], dim=1)
    else:
        module = EmbeddingBag.from_pretrained(loop[0].weight.detach().clone(), mode="sum", freeze=False)
        loop, batch = loop[:1], (torch.randint(0, 30, (12,)), torch.arange(0, 12, 2))

        def want(loop, indices, offsets):
            return loop[0](indices, offsets)

    exported = torch.export.export(module, batch, strict=strict).module()
    assert set(exported.state_dict()) == set(dict(module.named_parameters()))
    torch.testing.assert_close(exported(*batch), want(loop, *batch))
    for way in ("parameter.data =", "parameter in place", "load_state_dict", "optimizer step"):
        MODULE_WAYS[way](exported)
        MODULE_WAYS[way](loop)
        out = exported(*batch)
        torch.testing.assert_close(out, want(loop, *batch))
        assert out.requires_grad
    exported.zero_grad()
    exported(*batch).sum().backward()
    loop.zero_grad()
    want(loop, *batch).sum().backward()
    total = sum(parameter.grad.sum() for parameter in exported.parameters())
    torch.testing.assert_close(total, sum(parameter.grad.sum() for parameter in loop.parameters()))


_LOADED_ALONE = """
import sys, torch
torch.ops.load_library(sys.argv[1])
program = torch.export.load(sys.argv[2])
module, batch = program.module(), torch.load(sys.argv[3])
module.load_state_dict({name: torch.ones_like(value) for name, value in module.state_dict().items()})
with torch.no_grad():
    torch.save(module(*batch), sys.argv[4])
assert "recfuse" not in sys.modules
"""


def test_an_exported_file_holds_the_weights_once_and_runs_with_the_library_alone(tmp_path):
    sizes = ((20_000, 16), (5_000, 16), (3_000, 64), (100, 3))
    module = FusedEmbeddingBagCollection(sizes)
    batch = torch.arange(8), torch.arange(9)
    program, given, output = (tmp_path / name for name in ("program.pt2", "batch.pt", "output.pt"))
    torch.export.save(torch.export.export(module, batch), program)
    weights = sum(rows * dim * 4 for rows, dim in sizes)
    assert program.stat().st_size <= 1.05 * weights
    torch.save(batch, given)
    arguments = [recfuse.library_path(), str(program), str(given), str(output)]
    run_python("-c", _LOADED_ALONE, *arguments, capture_output=False, check=True)
    assert torch.load(output).eq(1).all()


def test_saved_files_hold_the_weights_once():
    module = FusedEmbeddingBagCollection([(1000, 16)] * 50)
    for what in (module, module.state_dict()):
        stream = io.BytesIO()
        torch.save(what, stream)
        assert stream.tell() <= 1.1 * 50 * 1000 * 16 * 4


@pytest.mark.parametrize("backend", ("aot_eager", pytest.param("inductor", marks=pytest.mark.long)))
def test_a_maximum_that_is_compiled_keeps_its_winners(backend):
    """Not the weights, which may change before the backward pass."""
    for module, name, call in (
        (
            FusedEmbeddingBagCollection([Table(9, 8, mode="max")]),
            "embedding_bags.packed_dim8",
            torch.arange(7),
        ),
        (EmbeddingBag(9, 8, mode="max"), "weight", torch.tensor([0, 3])),
    ):
        indices = torch.tensor([8, 1, 2, 3, 8, 5])
        gradient = torch.randn(call.numel() - 1 if name != "weight" else 2, 8)
        module(indices, call).backward(gradient)
        weight = module.get_parameter(name)
        want, weight.grad = weight.grad, None
        torch.compiler.reset()
        out = torch.compile(module, backend=backend, fullgraph=True)(indices, call)
        with torch.no_grad():
            weight.copy_(torch.randn(9, 8))
        out.backward(gradient)
        torch.testing.assert_close(weight.grad, want)
