"""However a weight is changed, eager, compiled and exported calls use it."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from recfuse.nn import EmbeddingColumns
from recfuse.nn.columns import Hash, Identity, Numeric
from support.columns.inputs import COLUMNS, mapping, parts


@pytest.fixture(autouse=True)
def _nothing_compiled():
    """The compiler counts compilations per function, over all modules."""
    torch.compiler.reset()


def _sgd(module):
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(module.parameters(), lr=0.125).step()
    module.zero_grad()


def _loaded(module, **options):
    state = {name: torch.randn_like(value) for name, value in module.state_dict().items()}
    module.load_state_dict(state, **options)


def _half_loaded(module):
    state = {name: torch.randn_like(value).half() for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)
    assert all(parameter.dtype == torch.float16 for parameter in module.parameters())
    module.float()


def _data(module):
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter)


def _replaced(module):
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, torch.nn.Parameter(torch.randn_like(parameter)))


def _in_place(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(-3)


def _view(module):
    module.tables["tags"].weight = torch.randn(50, 16)
    module.tables["age"].weight.data = torch.randn(4, 8)
    with torch.no_grad():
        module.tables["city"].weight[3:7] = 1.5


def _vector(module):
    vector = torch.nn.utils.parameters_to_vector(module.parameters())
    torch.nn.utils.vector_to_parameters(torch.randn_like(vector), module.parameters())


def _filled(module):
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.fill_(0.25)


WAYS = {
    "optimizer step": _sgd,
    "load_state_dict": _loaded,
    "load_state_dict(assign)": lambda module: _loaded(module, assign=True),
    "load_state_dict(assign, half)": _half_loaded,
    "parameter.data =": _data,
    "parameter replaced": _replaced,
    "in place": _in_place,
    "a table's view": _view,
    "vector_to_parameters": _vector,
    "half and back": lambda module: module.half().float(),
    "to meta and back": lambda module: module.to("meta").to_empty(device="cpu").apply(_filled),
    "share_memory": lambda module: module.share_memory(),
}


def reference_of(module):
    """Returns the reference of the module's present state."""
    return module.to_torch()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "compiled", (False, pytest.param(True, marks=pytest.mark.long)), ids=("eager", "compiled")
)
def test_a_weight_that_was_changed(way, compiled):
    module = EmbeddingColumns(COLUMNS)
    batch = mapping(parts())
    call = torch.compile(module, backend="aot_eager") if compiled else module
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            before = call(batch).detach().clone()
            WAYS[way](module)
            after = call(batch)
            torch.testing.assert_close(after, reference_of(module)(batch))
            if way not in ("half and back", "share_memory", "to meta and back"):
                assert not torch.equal(after, before)
            if grad:
                module.zero_grad()
                after.sum().backward()
                assert all(parameter.grad is not None for parameter in module.parameters())
                module.zero_grad()


def test_the_state_dict_speaks_of_tables():
    module = EmbeddingColumns(COLUMNS)
    names = ["tables." + name + ".weight" for name in ("age", "city", "tags", "pairs", "many")]
    assert list(module.state_dict()) == names
    reference = module.to_torch()
    assert set(reference.state_dict()) == set(names)
    other = EmbeddingColumns(COLUMNS)
    other.load_state_dict(reference.state_dict())
    batch = mapping(parts())
    with torch.no_grad():
        assert torch.equal(other(batch), module(batch))
    with pytest.raises(RuntimeError, match=r"size mismatch for tables\.age\.weight"):
        other.load_state_dict({**module.state_dict(), names[0]: torch.zeros(3, 3)})
    with pytest.raises(RuntimeError, match=r"Missing key.*tables\.city\.weight"):
        other.load_state_dict({name: one for name, one in module.state_dict().items() if name != names[1]})
    reference.load_state_dict(module.state_dict())


@pytest.mark.parametrize("name", ("type", "keys", "weight", "training", "forward"))
def test_any_name_will_do_for_a_table(name):
    module = EmbeddingColumns([Identity(name, 5, 4, feature="x")])
    batch = {"x": torch.arange(5)}
    assert list(module.state_dict()) == list(module.to_torch().state_dict()) == [f"tables.{name}.weight"]
    assert torch.equal(module.to_torch()(batch), module(batch))


def test_copies():
    module = EmbeddingColumns([*COLUMNS, Hash("held", 10, 4, feature="place", placement="host")])
    batch = mapping(parts())
    with torch.no_grad():
        want = module(batch)
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        for other in (
            copy.deepcopy(module),
            pickle.loads(pickle.dumps(module)),
            torch.load(file, weights_only=False),
        ):
            assert torch.equal(other(batch), want)
            _in_place(other)
            assert not torch.equal(other(batch), want)
            assert torch.equal(module(batch), want)


def test_other_types_are_computed_by_torch():
    module = EmbeddingColumns(COLUMNS).double()
    reference = module.to_torch()
    batch = mapping(parts())
    out = module(batch)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, reference(batch))
    out.sum().backward()
    reference(batch).sum().backward()
    for name, table in module.tables.items():
        torch.testing.assert_close(table.weight.grad, reference.tables._modules[name].weight.grad)


def test_numbers_alone_have_no_table():
    module = EmbeddingColumns([Numeric("a"), Numeric("b", 3)])
    batch = {"a": torch.rand(4), "b": torch.randint(0, 9, (4, 3))}
    assert torch.equal(module(batch), torch.cat((batch["a"][:, None], batch["b"].float()), 1))
    assert module.state_dict() == {} and not list(module.parameters())
    assert "columns=2, rows=0, output_dim=4, bytes=0" in repr(module)


def test_scripts_are_refused():
    with pytest.raises(NotImplementedError, match="cannot be scripted"):
        torch.jit.script(EmbeddingColumns([Numeric("a")]))
