"""Dicts of plain tensors, which are read at once; dicts with other values take the slow path."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch

from recfuse import _C
from recfuse._storage import CELL
from recfuse.nn import EmbeddingColumns
from recfuse.nn.columns import Bucketize, Identity, Modulo, Numeric

SPECS = (
    Bucketize("a", [0.0, 1.0, 2.0], 4),
    Identity("b", 5, 8, pooling="sum", preprocess=[Modulo(5)]),
    Numeric("n", 2),
    Identity("c", 5, 3, preprocess=[Modulo(5)]),
)


def batch(size=6, index=torch.int64):
    lengths = torch.arange(size) % 3
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(index)
    return {
        "a": torch.linspace(-1, 3, size),
        "b": (torch.arange(int(offsets[-1]), dtype=index), offsets),
        "n": torch.rand(size, 2),
        "c": torch.arange(size, dtype=index),
    }


@pytest.fixture
def read(monkeypatch):
    """A module, and a list to which each batch whose addresses it reads adds an entry."""
    module, found = EmbeddingColumns(SPECS), []
    reader = module._addresses

    def reading(given):
        found.append(reader(given))
        return found[-1]

    monkeypatch.setattr(module, "_addresses", reading)
    return module, found


def compare(module, given):
    with torch.no_grad():
        torch.testing.assert_close(module(given), module.to_torch()(given))


PLAIN = {
    "as it is": lambda b: b,
    "int32": lambda b: batch(index=torch.int32),
    "no samples": lambda b: batch(0),
    "a column of a matrix": lambda b: {**b, "a": torch.rand(6, 3)[:, 1]},
    "columns of a matrix": lambda b: {**b, "n": torch.rand(6, 5)[:, 1:3]},
    "transposed": lambda b: {**b, "n": torch.rand(2, 6).t()},
    "expanded": lambda b: {**b, "a": torch.ones(1).expand(6)},
    "of one value": lambda b: {**b, "c": torch.arange(6)[:, None]},
    "more entries": lambda b: {"x": 1, **b, None: None},
    "with a gradient": lambda b: {**b, "a": torch.rand(6, requires_grad=True)},
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_tensors_are_read_at_once(read, name):
    module, found = read
    for _ in range(2):
        compare(module, PLAIN[name](batch()))
    assert all(one is not None for one in found) and len(found) == 2


def imaginary():
    """Its memory has the other sign."""
    return torch.complex(torch.rand(6), torch.rand(6)).conj().imag


OTHERS = {
    "half": lambda b: {**b, "a": b["a"].half()},
    "bool": lambda b: {**b, "c": b["c"] > 2},
    "uint8": lambda b: {**b, "c": b["c"].to(torch.uint8)},
    "negated": lambda b: {**b, "a": imaginary()},
    "negated numbers": lambda b: {**b, "n": imaginary().view(3, 2).repeat(2, 1).conj().clone()},
    "values with gaps": lambda b: {**b, "b": (torch.arange(12)[::2], b["b"][1])},
    "a parameter": lambda b: {**b, "a": torch.nn.Parameter(b["a"])},
    "a list": lambda b: {**b, "b": list(b["b"])},
    "a mapping": lambda b: {**b, "b": {"values": b["b"][0], "offsets": b["b"][1]}},
    "zero tensor": lambda b: {**b, "a": torch._efficientzerotensor(6)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_addresses_are_read(read, name):
    module, found = read
    given = OTHERS[name](batch())
    if name == "negated":
        assert given["a"].is_neg()
    with torch.no_grad():
        torch.testing.assert_close(module(given), module.to_torch()(given))
    assert name == "negated numbers" or found == [None]


def test_one_negated_sample(read):
    module, _ = read
    given = batch(1)
    given["n"] = torch.complex(torch.rand(1, 2), torch.rand(1, 2)).conj().imag
    given["a"] = torch.complex(torch.rand(1), torch.full((1,), 1.5)).conj().imag
    assert given["n"].is_neg() and given["a"].is_neg()
    compare(module, given)


WRONG = {
    "missing": (lambda b: {name: one for name, one in b.items() if name != "c"}, ValueError, "'c'"),
    "samples": (lambda b: {**b, "c": torch.arange(5)}, ValueError, "'c'"),
    "offsets": (lambda b: {**b, "b": (b["b"][0], torch.arange(4))}, ValueError, "'b'"),
    "float64": (lambda b: {**b, "a": b["a"].double()}, TypeError, "'a'"),
    "no tensor": (lambda b: {**b, "a": 1.5}, TypeError, "'a'"),
    "no row": (lambda b: {**b, "b": (b["b"][0], b["b"][1] - 1)}, ValueError, "'b'"),
    "kinds": (lambda b: {**b, "c": torch.rand(6)}, TypeError, "'c'"),
    "freed": (lambda b: freed(b), ValueError, "storage"),
}


def freed(given):
    given["a"].untyped_storage().resize_(0)
    return given


@pytest.mark.parametrize("name", WRONG)
def test_wrong_addresses_keep_their_errors(name):
    change, error, text = WRONG[name]
    with torch.no_grad(), pytest.raises(error, match=text):
        EmbeddingColumns(SPECS)(change(batch()))


def test_gradients_and_recorded_programs_get_the_tensors(read):
    module, found = read
    given = batch()
    module({**given, "n": given["n"]}).sum().backward()
    assert found == [] and all(weight.grad is not None for weight in module.parameters())
    module.requires_grad_(False)
    with torch.no_grad():
        traced = torch.jit.trace(lambda a: module({**given, "a": a}), given["a"], check_trace=False)
        other = torch.rand(6)
        torch.testing.assert_close(traced(other), module.to_torch()({**given, "a": other}))
        recorded = torch.fx.experimental.proxy_tensor.make_fx(lambda a: module({**given, "a": a}))(given["a"])
        torch.testing.assert_close(recorded(other), module.to_torch()({**given, "a": other}))


def test_entries_are_kept_while_they_are_read(read):
    """Another thread removes them from the dict at the same time."""
    module, _ = read
    given, stop = batch(4000), threading.Event()
    want = module.to_torch()(given).detach()

    def replace():
        while not stop.is_set():
            given["a"] = given["a"].clone()
            gc.collect()

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        with torch.no_grad():
            for _ in range(50):
                torch.testing.assert_close(module(given), want)
    finally:
        stop.set()
        thread.join()


def test_other_objects_have_no_addresses():
    plain, offsets = torch.ones(3), torch.arange(4)
    read = _C.embedding_columns_inputs
    assert read(torch.Tensor, CELL, (plain, (plain, offsets)), -1) is not None
    for entry in (None, 1.5, plain.numpy(), torch.nn.Parameter(plain), plain.to_sparse(), plain.to("meta")):
        assert read(torch.Tensor, CELL, (entry,), -1) is None
        assert read(torch.Tensor, CELL, ((plain, offsets, entry),), -1) is None or entry is None
        assert read(torch.Tensor, CELL, ((entry, offsets),), -1) is None
    for entry in ((), (plain,), (plain, offsets, None, None), [plain, offsets]):
        assert read(torch.Tensor, CELL, (entry,), -1) is None
    assert read(torch.Tensor, CELL, ((plain, torch.arange(7)),), 3) is not None  # of two features
    assert read(torch.Tensor, CELL, (plain, (plain, torch.arange(7))), -1) is None
    with pytest.raises(TypeError):
        read(torch.Tensor, CELL, [plain], -1)


def test_the_operator_takes_no_address():
    module = EmbeddingColumns(SPECS)
    found = module._reader.addresses(batch())
    assert [argument.type.kind() for argument in
            torch.ops.recfuse._embedding_columns_at.default._schema.arguments][2] == "IntType"  # fmt: skip
    weights = module.packed_weights()
    with torch.no_grad():
        module._whole.at(weights, found, "on")
        for number in (0, -1, found.number + 1000, 2**62, found.forms.ctypes.data):
            with pytest.raises(ValueError, match=rf"inputs is {number}, which is no batch"):
                module._whole.at(weights, found._replace(number=number), "on")
        with pytest.raises(ValueError, match="inputs is a batch of 6 samples on the CPU"):
            module._whole.at(weights, found._replace(batch=7), "on")
        number = module._reader.addresses(batch()).number  # its owner has been freed
        with pytest.raises(ValueError, match="no batch that is being read"):
            module._whole.at(weights, found._replace(number=number), "on")


SHRUNK = {
    "dense": lambda b: b["a"],
    "wide": lambda b: b["n"],
    "values": lambda b: b["b"][0],
    "offsets": lambda b: b["b"][1],
    "a view": lambda b: b.update(a=torch.rand(6, 3)[:, 1]) or b["a"],
}


@pytest.mark.parametrize("elements", (0, 2))
@pytest.mark.parametrize("name", SHRUNK)
def test_a_storage_that_shrank_is_refused(name, elements):
    module, given = EmbeddingColumns(SPECS), batch(16)
    if name == "a view":
        given["a"] = torch.rand(16, 3)[:, 1]
    with torch.no_grad():
        module(given)
        freed_tensor = given["a"] if name == "a view" else SHRUNK[name](given)
        freed_tensor.untyped_storage().resize_(elements * freed_tensor.itemsize)
        for call in (module, module.pack, module.requires_grad_(True)):
            with pytest.raises(ValueError, match=r"has no memory for its elements, which need \d+ bytes"):
                call(given)
    with pytest.raises(ValueError, match=r"has no memory for its elements, which need \d+ bytes"):
        module(given)


def pairs(seed, count=5, size=7):
    """Jagged entries of two types, with values past the last offset, and offsets of two types."""
    draw, found = torch.Generator().manual_seed(seed), {}
    for number in range(count):
        lengths = torch.randint(0, 4, (size,), generator=draw)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        values = torch.randint(0, 5, (int(offsets[-1]) + number % 2,), generator=draw)
        narrow = (seed, number % 3) in ((0, 0), (1, 1), (2, 2))
        found[f"p{number}"] = (values.int() if number % 2 else values, offsets.int() if narrow else offsets)
    return found


WRONG_OFFSETS = {
    "as they are": lambda offsets: offsets,
    "all narrow": lambda offsets: offsets.int(),
    "from 1": lambda offsets: offsets + 1,
    "too far": lambda offsets: offsets * 2,
    "negative": lambda offsets: -offsets - 3,
}


@pytest.mark.parametrize("name", WRONG_OFFSETS)
@pytest.mark.parametrize("count", (1, 5))
@pytest.mark.parametrize("seed", range(4))
def test_packed_as_tensor_by_tensor(name, count, seed):
    specs = [Identity(f"p{number}", 5, 2, pooling="sum") for number in range(count)]
    module = EmbeddingColumns([*specs, *SPECS])
    given = {**batch(7), **pairs(seed, count)}
    for entry in ("p0", f"p{count - 1}"):
        given[entry] = given[entry][0], WRONG_OFFSETS[name](given[entry][1])
    if name == "all narrow":
        given = {key: (one[0], one[1].int()) if isinstance(one, tuple) else one for key, one in given.items()}
    found = module._reader.addresses(given)
    own, slow = module._reader.packer.at(found), module._reader.packer(module._reader.read(given))
    assert own._form == slow._form and own._inputs.places == slow._inputs.places
    for mine, theirs in zip(own._inputs[2:], slow._inputs[2:], strict=True):
        assert [one.dtype for one in mine] == [one.dtype for one in theirs]
        assert all(map(torch.equal, mine, theirs)) and len(mine) == len(theirs)
    if name in ("as they are", "all narrow"):
        with torch.no_grad():
            torch.testing.assert_close(module(module.pack(given)), module.to_torch()(given))


@pytest.mark.parametrize("name", PLAIN)
def test_plain_tensors_are_packed_at_once(read, name):
    module, found = read
    given = PLAIN[name](batch())
    with torch.no_grad():
        packed = module.pack(given)
        assert found != [None] and len(found) == 1
        torch.testing.assert_close(module(packed), module.to_torch()(given))


def test_packing_takes_no_more_than_there_is():
    found = EmbeddingColumns(SPECS)._reader.addresses(batch())
    groups = np.array([0, 0, 1, 2], np.int32)  # numbers, rows of c, and of b
    size, _ = _C.embedding_columns_pack(found.owner, groups, 3, 0, 0)
    with pytest.raises(
        ValueError, match=f"needs {size} bytes; expected the {size - 1} of the buffer at most"
    ):
        _C.embedding_columns_pack(found.owner, groups, 3, found.forms.ctypes.data, size - 1)
    with pytest.raises(ValueError, match="PyCapsule"):
        _C.embedding_columns_pack(found.forms, groups, 3, 0, 0)
    with pytest.raises(ValueError, match="input 3 has group 2, of 2 groups"):
        _C.embedding_columns_pack(found.owner, groups, 2, 0, 0)
    with pytest.raises(ValueError, match="inputs of group 0 differ"):
        _C.embedding_columns_pack(found.owner, groups * 0, 3, 0, 0)
    with pytest.raises(ValueError, match="groups has 3 elements; expected 4, as inputs"):
        _C.embedding_columns_pack(found.owner, groups[:3], 3, 0, 0)


def test_numbers_with_gradients_are_not_packed_in_silence():
    given = batch() | {"n": torch.rand(6, 2, requires_grad=True)}
    with pytest.raises(RuntimeError, match=r"grad|out="):
        EmbeddingColumns(SPECS).pack(given)


def test_another_default_device_changes_nothing():
    module, given = EmbeddingColumns(SPECS), batch()
    with torch.no_grad():
        want = module.to_torch()(given)
        with torch.device("meta"):
            packed = module.pack(given)
            assert packed.device.type == "cpu"
            for one in (given, packed):
                torch.testing.assert_close(module(one), want)
