"""Tables that stay on the host: without a GPU both parts are computed on the CPU and compared with a
single module."""

from __future__ import annotations

import copy
import dataclasses
import types

import pytest
import torch
from torch.utils._pytree import tree_map

import recfuse
from recfuse.nn import EmbeddingColumns
from recfuse.nn.columns import Cross, Identity, Numeric, TableColumn, host
from recfuse.nn.columns.host import Lookup
from recfuse.nn.columns.placement import page_locked
from support.columns.inputs import COLUMNS, mapping, parts


@pytest.fixture(autouse=True)
def _nothing_compiled():
    """The compiler counts compilations per function, over all modules."""
    torch.compiler.reset()


def placed(names):
    """The columns with the tables of some on the host."""
    return [
        dataclasses.replace(one, placement="host" if one.table_name in names else "device")
        if isinstance(one, TableColumn)
        else one
        for one in COLUMNS
    ]


def pair(names, **options):
    """The same columns in two parts, and in one."""
    split = EmbeddingColumns(placed(names), **options)
    split._always_split = True
    whole = EmbeddingColumns(COLUMNS, **options)
    whole.load_state_dict(split.state_dict())
    return split, whole


PLACES = {
    "first": ("age",),
    "shared": ("tags",),
    "several": ("city", "pairs", "many"),
    "all": ("age", "city", "tags", "pairs", "many"),
}


@pytest.mark.parametrize("names", PLACES.values(), ids=PLACES)
def test_two_parts_are_one_module(names):
    split, whole = pair(names)
    assert list(split.state_dict()) == list(whole.state_dict())
    batch = mapping(parts())
    for given in (batch, split.pack(batch)):
        with torch.no_grad():
            assert torch.equal(split(given), whole(given))
        torch.testing.assert_close(split(given), whole(given))
    other = copy.deepcopy(split)
    other._always_split = True
    with torch.no_grad():
        assert torch.equal(other(batch), whole(batch))


HALF, BRAIN = torch.float16, torch.bfloat16


@pytest.mark.parametrize("dtype", (HALF, BRAIN))
@pytest.mark.parametrize("host", (HALF, BRAIN, torch.float32))
def test_the_outputs_dtype_is_that_of_all_tables(dtype, host):
    """The two parts are put together by one call if they are of one dtype, else by a copy."""
    columns = [
        Identity("a", 9, 4, dtype=dtype),
        Identity("b", 9, 8, dtype=host, placement="host", scale=0.3, pooling="sum"),
        Numeric("n"),
        Identity("c", 9, 2, dtype=host, placement="host"),
    ]
    split = EmbeddingColumns(columns)
    split._always_split = True
    whole = EmbeddingColumns(
        [dataclasses.replace(one, placement="device") for one in columns[:2]] + columns[2:]
    )
    whole.load_state_dict(split.state_dict())
    indices = torch.arange(9)
    bags = (torch.arange(27) % 9, torch.arange(10) * 3)
    batch = {"a": indices, "b": bags, "n": torch.rand(9), "c": indices.flip(0)}
    with torch.no_grad():
        found, want = split(batch), whole(batch)
        assert found.dtype == want.dtype == (dtype if dtype == host else torch.float32)
        torch.testing.assert_close(found, want, rtol=2e-2, atol=0)
        if dtype == host:
            assert torch.equal(found, want)


@pytest.mark.parametrize("width", (0, 3))
def test_a_part_of_no_width(width):
    """Its contents are checked all the same."""
    columns = [
        Identity("a", 9, 4),
        Identity("b", 9, 8, placement="host", slice=(0, 0)),
        Identity("c", 9, 8, placement="host", slice=(2, 2 + width)),
        Identity("d", 9, 2),
    ]
    module = EmbeddingColumns(columns)
    module._always_split = True
    indices = torch.arange(5)
    batch = dict.fromkeys("abcd", indices)
    with torch.no_grad():
        assert torch.equal(module(batch), module.to_torch()(batch))
        with pytest.raises(IndexError, match=r"'b'.*9"):
            module({**batch, "b": indices + 5})


def test_batches_of_many_forms():
    """Each form of a batch has its own program; those of before are found again."""
    split, whole = pair(("tags", "many"))
    batches = [mapping(parts(seed, size)) for seed, size in enumerate((5, 1, 33))]
    with torch.no_grad():
        for batch in batches * 2:
            for given in (batch, split.pack(batch)):
                assert torch.equal(split(given), whole(given))


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_threads_look_up_rows_of_the_host(monkeypatch):
    """A batch on the host is looked up by its rows; if only its samples are on the GPU, or in graphs, the
    GPU does it."""
    columns = [
        Identity("a", 9, 4, placement="host"),
        Identity("b", 9, 4, placement="host", pooling="sum"),
        Identity("wide", 9, 4, placement="host", pooling="sum"),
        Identity("c", 9, 4),
        Numeric("n"),
    ]
    module = EmbeddingColumns(columns).requires_grad_(False)
    weights, split = module.packed_weights(), module._split
    pinned, captured = [True], []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: bool(pinned))
    monkeypatch.setattr(host, "is_captured", lambda: bool(captured))

    def batch_of(samples):
        zeros = torch.zeros(samples, dtype=torch.int64)
        bags = zeros.repeat(3), torch.arange(samples + 1) * 3
        wide = torch.zeros(samples, 2, dtype=torch.int64)
        given = {"a": zeros, "b": bags, "wide": wide, "c": zeros, "n": zeros}
        return module._reader.read(module.pack(given))

    class OnGpu(type(batch_of(1))):
        device = CUDA

    gpu, stream, call = Lookup.GPU, Lookup.STREAM, Lookup.CALL
    most = host.MOST_ROWS // 6
    cases = [(0, gpu, gpu), (512, gpu, gpu), (513, gpu, call), (most, gpu, call), (most + 1, stream, call)]
    for samples, here, there in cases:
        given = batch_of(samples)
        assert split.rows(given) == 6 * samples
        elsewhere = OnGpu(*given)
        assert split.lookup(weights, given, None, CUDA) is here
        assert split.lookup(weights, elsewhere, given, CUDA) is here
        assert split.lookup(weights, elsewhere, None, CUDA) is there
        assert split.lookup(weights, given, None, CPU) is call
        captured.append(True)
        assert split.lookup(weights, elsewhere, None, CUDA) is gpu
        captured.clear()
        pinned.clear()
        assert split.lookup(weights, given, None, CUDA) is stream
        assert split.lookup(weights, elsewhere, None, CUDA) is call
        pinned.append(True)
    split._waits = False
    assert split.lookup(weights, batch_of(most + 1), None, CUDA) is call
    split._waits = True
    module.requires_grad_()
    with torch.no_grad():
        assert split.lookup(weights, batch_of(1), None, CUDA) is call
        assert split.lookup(weights, batch_of(most + 1), None, CUDA) is call


def test_streams_that_read_a_table_are_made_known_once(monkeypatch):
    """By a copy from its memory, which torch records; again after the table has moved to other memory."""
    columns = [
        Identity("a", 9, 4, placement="host"),
        Identity("c", 9, 8),
        Identity("b", 9, 2, placement="host"),
    ]
    module = EmbeddingColumns(columns).requires_grad_(False)
    split, copied, stream = module._split, [], types.SimpleNamespace(cuda_stream=5)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    copy = torch.Tensor.copy_

    def copy_(self, source, non_blocking=False):
        assert non_blocking and source.numel() == 1
        copied.append(source.data_ptr())
        return copy(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    weights = module.packed_weights()
    tables = [weights[number].data_ptr() for number in module._host_matrices]
    split.keep(weights, CPU)
    split.keep(weights, CPU)
    assert copied == tables
    stream.cuda_stream = 6
    split.keep(weights, CPU)
    assert copied == 2 * tables
    number = module._host_matrices[0]
    weights = [one.clone() if at == number else one for at, one in enumerate(weights)]
    split.keep(weights, CPU)
    assert copied == [*2 * tables, weights[number].data_ptr()]


def test_a_cross_looks_up_each_pair_of_values():
    columns = [Cross("both", ("a", "wide"), 99, 4, placement="host", pooling="sum"), Numeric("n")]
    module = EmbeddingColumns(columns).requires_grad_(False)
    zeros = torch.zeros(20, dtype=torch.int64)
    given = {"a": (zeros.repeat(3), torch.arange(21) * 3), "wide": torch.zeros(20, 7).long(), "n": zeros}
    assert module._split.rows(module._reader.read(module.pack(given))) == 20 * 3 * 7


@pytest.mark.parametrize("dtype", (HALF, BRAIN, torch.float32))
@pytest.mark.parametrize("host_dtype", (HALF, BRAIN, torch.float32))
def test_host_tables_with_another_rounding_use_a_separate_call(dtype, host_dtype):
    """Threads for which no call waits pool to float32, which must equal their result in a separate call."""
    columns = [Identity("a", 9, 4, dtype=dtype), Identity("b", 9, 4, dtype=host_dtype, placement="host")]
    module = EmbeddingColumns(columns).requires_grad_(False)
    indices = torch.zeros(host.MOST_ROWS + 1, dtype=torch.int64)
    given = module._reader.read({"a": indices, "b": indices})
    found = module._split.lookup(module.packed_weights(), given, None, CUDA)
    merged = host_dtype == dtype or dtype == torch.float32
    rounded = host_dtype != torch.float32 and dtype != host_dtype
    assert found is (Lookup.STREAM if merged and not rounded else Lookup.CALL)


@pytest.mark.parametrize("names", PLACES.values(), ids=PLACES)
def test_the_call_that_only_a_stream_waits_for(names):
    """On the CPU it computes the same, and waits."""
    split, whole = pair(names)
    for seed, size in enumerate((5, 1, 33)):
        batch = mapping(parts(seed, size))
        given = split._reader.read(split.pack(batch))
        with torch.no_grad():
            found = split._split.deferred(split.packed_weights(), given, given, CPU, "on")
            assert torch.equal(found, whole(batch))


def test_its_errors_have_the_columns_names():
    columns = [
        Numeric("n"),
        Identity("empty", 5, 4, slice=(0, 0), placement="host"),
        Identity("a", 5, 4),
        Identity("b", 5, 4, placement="host"),
        Identity("c", 5, 4),
        Identity("bags", 5, 4, placement="host", pooling="sum"),
    ]
    module = EmbeddingColumns(columns)
    good, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2, 3])
    bad = torch.tensor([1, 2, 9])
    for name in ("empty", "a", "b", "c", "bags"):
        batch = {**dict.fromkeys("nabc", good), "empty": good, "bags": (good, offsets)}
        batch[name] = (bad, offsets) if name == "bags" else bad
        given = module._reader.read(batch)
        with torch.no_grad(), pytest.raises(IndexError, match=f"'{name}'.*9"):
            module._split.deferred(module.packed_weights(), given, given, CPU, "on")
    batch["bags"] = good, offsets.to(torch.int16)
    given = module._reader.read({**batch, "bags": (good, offsets)})
    given = given._replace(offsets=[one.to(torch.int16) for one in given.offsets])
    with torch.no_grad(), pytest.raises(TypeError, match=r"offsets is int16.*feature 'bags'"):
        module._split.deferred(module.packed_weights(), given, given, CPU, "on")


def test_the_operator_has_a_fake():
    split, _ = pair(("tags", "city"))
    calls = []
    given = split._reader.read(split.pack(mapping(parts())))
    called = host.embedding_columns_split

    def kept(*arguments):
        calls.append(arguments)
        return called(*arguments)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(host, "embedding_columns_split", kept)
        split._split.deferred(split.packed_weights(), given, given, CPU, "on")
    ((weights, program, inputs, *middle, host_weights, host_program, near, bounds),) = calls
    flat = weights, program, *inputs, *middle, host_weights, host_program, *near[:-1], bounds
    detached = tree_map(lambda one: one.detach() if isinstance(one, torch.Tensor) else one, flat)
    torch.library.opcheck(torch.ops.recfuse._embedding_columns_split.default, detached)


@pytest.mark.parametrize("names", PLACES.values(), ids=PLACES)
def test_all_tables_are_trained(names):
    split, whole = pair(names)
    optimizers = [recfuse.optim.SGD(one, lr=0.1) for one in (split, whole)]
    for seed in range(3):
        batch = mapping(parts(seed))
        for module, optimizer in zip((split, whole), optimizers, strict=True):
            optimizer.zero_grad()
            module(batch).square().sum().backward()
            optimizer.step()
    for name, one in split.state_dict().items():
        torch.testing.assert_close(one, whole.state_dict()[name])


def test_two_parts_compiled():
    split, whole = pair(("tags", "age"))
    compiled = torch.compile(split, fullgraph=True, backend="aot_eager")
    batch = mapping(parts())
    with torch.no_grad():
        assert torch.equal(compiled(batch), whole(batch))
    torch.testing.assert_close(compiled(batch), whole(batch))


def test_errors_have_the_columns_names():
    columns = [Numeric("n"), Identity("a", 5, 4), Identity("b", 5, 4, placement="host"), Identity("c", 5, 4)]
    module = EmbeddingColumns(columns)
    module._always_split = True
    good = torch.tensor([1, 2, 3])
    for name in "abc":
        batch = {"n": good, "a": good, "b": good, "c": good, name: torch.tensor([1, 2, 9])}
        for grad in (False, True):
            with torch.set_grad_enabled(grad), pytest.raises(IndexError, match=f"'{name}'.*9"):
                module(batch)


def test_large_tables_stay():
    """By their size, or by the column's placement; the GPU gets the rest."""
    columns = [
        Identity("small", 100, 4),
        Identity("large", 1000, 16),
        Identity("kept", 1000, 16, placement="device"),
        Identity("sent", 10, 4, placement="host"),
    ]
    both, sent = ("large", "sent"), ("sent",)
    for bound, names in ((16000, both), ("62KiB", both), ("1MiB", sent), (None, sent)):
        module = EmbeddingColumns(columns, host_tables=bound)
        report = module.memory_report()
        assert report.host_tables == names
        sizes = {"small": 1600, "large": 64000, "kept": 64000, "sent": 160}
        assert report.host_bytes == sum(sizes[name] for name in names)
        assert report.device_bytes == sum(sizes.values()) - report.host_bytes
        assert report.saved == report.host_bytes / sum(sizes.values())
        assert all(name in str(report) for name in names)
    assert EmbeddingColumns(columns[:1]).memory_report().saved == 0
    assert EmbeddingColumns([Numeric("a")]).memory_report().device_bytes == 0


class _Fake(torch.Tensor):
    """A tensor that reports a GPU as its device."""

    is_cuda = True


def test_moves_leave_the_hosts_tables_where_they_are():
    """`cuda()` and `to()` only change the dtype of these tensors."""
    module = EmbeddingColumns(placed(("tags",)))
    host = [module.packed_weights()[at] for at in module._host_matrices]
    seen = []

    def to_gpu(tensor):
        seen.append(tensor)
        return tensor.detach().half().as_subclass(_Fake) if tensor.numel() == 0 else tensor

    module._apply(to_gpu)
    assert all(weight.dtype == torch.float16 and weight.is_cpu for weight in host)
    assert not any(one is weight for one in seen for weight in host)
    assert module.tables["age"].weight.dtype == torch.float32
    module.float()
    module.to("meta")
    assert all(weight.is_meta for weight in module.packed_weights())


def test_page_locked_memory(monkeypatch):
    """If there is too little memory a warning says so, and the table does not change."""
    table = torch.ones(3, 4)
    assert page_locked(table) is table
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self.numel() == 2)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
    locked = page_locked(table)
    assert locked is not table and torch.equal(locked, table)
    shared = torch.ones(3).share_memory_()
    assert page_locked(shared) is shared
    pinned = torch.ones(2)
    assert page_locked(pinned) is pinned

    def fail(self):
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(torch.Tensor, "pin_memory", fail)
    with pytest.warns(
        UserWarning, match=r"could not be page-locked \(CUDA error: out of memory\), so CPU threads"
    ):
        assert page_locked(table) is table
