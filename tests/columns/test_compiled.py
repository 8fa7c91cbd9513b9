"""Columns under torch.compile and torch.export, and torch's checks of operators."""

from __future__ import annotations

import io

import pytest
import torch
import torch._dynamo.testing
from torch.export import Dim
from torch.library import opcheck

from recfuse.nn import EmbeddingColumns
from recfuse.nn.columns import Bucketize, Identity, Numeric
from support.columns.inputs import COLUMNS, SUMS, mapping, parts

OPS = torch.ops.recfuse
SIZES = (5, 3, 17, 4096)


@pytest.fixture(autouse=True)
def _nothing_compiled():
    """The compiler counts compilations per function, over all modules."""
    torch.compiler.reset()


def gradients(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("packed", (False, True), ids=("mapping", "packed"))
@pytest.mark.parametrize("grad", (False, True), ids=("inference", "training"))
def test_one_program_for_all_sizes(packed, grad):
    module = EmbeddingColumns(COLUMNS)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    with torch.set_grad_enabled(grad):
        for number, size in enumerate(SIZES):
            batch = mapping(parts(number, size))
            batch = module.pack(batch) if packed else batch
            want, got = module(batch), compiled(batch)
            torch.testing.assert_close(got, want)
            if grad:
                module.zero_grad()
                want.square().sum().backward()
                wanted = gradients(module)
                module.zero_grad()
                got.square().sum().backward()
                for name, own in gradients(module).items():
                    torch.testing.assert_close(own, wanted[name])
    assert counter.frame_count == 1


@pytest.mark.long
def test_inductor():
    module = EmbeddingColumns(SUMS)
    compiled = torch.compile(lambda batch: module(batch).relu() + 1, fullgraph=True)
    batch = mapping(parts())
    with torch.no_grad():
        torch.testing.assert_close(compiled(batch), module(batch).relu() + 1)
    module.zero_grad()
    compiled(batch).sum().backward()
    own = gradients(module)
    module.zero_grad()
    (module(batch).relu() + 1).sum().backward()
    for name, wanted in gradients(module).items():
        torch.testing.assert_close(own[name], wanted)


def test_a_new_form_is_compiled_separately():
    module = EmbeddingColumns([Identity("a", 9, 4), Bucketize("b", [0.5], 4)])
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    ends = torch.arange(5)
    for batch in (
        {"a": torch.arange(4), "b": torch.rand(4)},
        {"a": (torch.arange(4), ends), "b": torch.rand(4)},
        {"a": torch.arange(8).view(4, 2), "b": torch.rand(4)},
        {"a": torch.arange(4), "b": (torch.rand(4), ends)},
        {"a": torch.arange(4).int(), "b": torch.rand(4).half()},
    ):
        with torch.no_grad():
            assert torch.equal(compiled(batch), module(batch))


def shapes():
    auto, jagged = Dim.AUTO, ({0: Dim.AUTO}, {0: Dim.AUTO}, {0: Dim.AUTO})
    found = {"age": {0: auto}, "place": jagged[:2], "tags": jagged, "w": {0: auto}}
    return {**found, "price": {0: auto, 1: Dim.STATIC}, "many": {0: auto, 1: Dim.STATIC}}


@pytest.mark.parametrize("strict", (False, True))
def test_exported_programs(strict):
    module = EmbeddingColumns(COLUMNS)
    with torch.no_grad():
        program = torch.export.export(
            module, (mapping(parts(0, 7)),), dynamic_shapes={"batch": shapes()}, strict=strict
        )
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        for size in (1, 2, 3, 100):
            batch = mapping(parts(size, size))
            assert torch.equal(loaded(batch), module(batch))
        for parameter in module.parameters():
            parameter.mul_(-2)
        assert torch.equal(program.module()(batch), module(batch))  # the Parameters are the module's
    assert any("embedding_columns" in str(node.target) for node in program.graph.nodes)


def test_autocast():
    module = EmbeddingColumns(COLUMNS)
    batch = mapping(parts())
    with torch.no_grad():
        want = module(batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(module(batch), want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(module(batch), want)


def calls():
    """Arguments of the operator, without and with jagged inputs and weights."""
    for columns in (COLUMNS, [Numeric("age"), Numeric("price", 2)], COLUMNS[2:3]):
        module = EmbeddingColumns(columns)
        for packed in (False, True):
            batch = mapping(parts())
            given = module._reader.read(module.pack(batch) if packed else batch)
            program, _ = module._whole.programs.of(given.places, given.device)
            inputs = list(map(list, given[2:]))
            weights = [weight.detach() for weight in module.packed_weights()]
            yield [weights, program, *inputs, given.batch, module.output_dim]


def test_opcheck():
    for call in calls():
        opcheck(OPS.embedding_columns.default, call)
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        opcheck(OPS._embedding_columns_lookups.default, call[1:-1], test_utils=tests)


def test_vmap():
    module = EmbeddingColumns([Identity("a", 9, 4)])
    rows = torch.randint(0, 9, (3, 5))
    with torch.no_grad():
        want = torch.stack([module({"a": own}) for own in rows])
        assert torch.equal(torch.vmap(lambda own: module({"a": own}))(rows), want)


def test_meta():
    module = EmbeddingColumns(COLUMNS, device="meta")
    batch = torch.utils._pytree.tree_map(lambda one: one.to("meta"), mapping(parts()))
    with torch.no_grad():
        out = module(batch)
    assert out.is_meta and out.shape == (6, 70)


def test_torch_fx_is_refused():
    with pytest.raises(TypeError, match="symbolic_trace"):
        torch.fx.symbolic_trace(torch.nn.Sequential(EmbeddingColumns(SUMS)))


def test_another_module_of_the_same_class_has_its_own_program():
    """The code compiled for one module is not used for another module's batches of another form."""
    specs = [Identity("a", 5, 2, pooling="sum"), Identity("b", 7, 2, pooling="sum")]
    modules = [EmbeddingColumns(specs) for _ in range(2)]
    jagged = torch.tensor([4, 1, 2]), torch.tensor([0, 1, 3])
    forms = [
        {"a": torch.tensor([[1, 2], [3, 4]]), "b": jagged},
        {"a": jagged, "b": torch.tensor([[1, 2], [3, 4]])},
    ]
    compiled = [torch.compile(module, backend="eager") for module in modules]
    with torch.no_grad():
        for order in ((0, 1), (1, 0)):
            for number in order:
                for batch in forms[:: 1 if number else -1]:
                    assert torch.equal(compiled[number](batch), modules[number](batch))
