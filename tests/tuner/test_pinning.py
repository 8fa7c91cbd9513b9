"""Pinned rows: their choice, refresh and release; no effect on the CPU."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import recfuse
from recfuse import PinnedRows, errors
from recfuse.data import traces
from recfuse.nn import EmbeddingBag, pinning

TRACE = [3, 3, 3, 7, 7, 1, 9]


@pytest.fixture
def weight():
    return torch.randn(20, 64)


class Stream:
    """Stands in for a CUDA stream."""

    def __init__(self, log, name):
        self.log, self.name, self.device = log, name, torch.device("cpu")

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch):
    """CPU tensors count as being on a GPU with an L2 of 4 KiB; its requests are recorded."""
    events, streams, state = [], [], SimpleNamespace(now="main", capturing=False)

    @contextlib.contextmanager
    def on(stream):
        before, state.now = state.now, stream.name
        yield
        state.now = before

    def make(device):
        streams.append(Stream(events, f"side{len(streams)}"))
        return streams[-1]

    def call(operator, weight, rows):
        name = "pin" if operator == "pin" else "unpin"
        events.append((name, None if rows is None else rows.tolist(), state.now))

    operators = sys.modules["recfuse.ops.pin_rows"]
    for module in (pinning, operators):
        monkeypatch.setattr(module, "on_gpu", lambda weight: True)
    for name in ("pin_rows", "unpin"):
        own = functools.partial(call, name.partition("_")[0])
        monkeypatch.setattr(torch.ops.recfuse, name, own, raising=False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda rows, stream: None)
    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(events, state.now))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=4096)
    )
    events_of = SimpleNamespace(events=events, state=state)
    return events_of


def test_pinning_on_the_cpu_has_no_effect(weight):
    recfuse.pin_rows(weight, [1, 2])
    recfuse.unpin(weight)
    with PinnedRows(weight, TRACE) as pinned:
        assert not pinned.active
        pinned.step()
        pinned.update(rows=[1])
        assert pinned.rows.tolist() == [1]
        assert "nothing" in repr(pinned)
    recfuse.check()
    recfuse.check("cpu")


def test_check_asks_the_device_and_gives_errors_their_class(monkeypatch):
    asked = []

    def check(index):
        asked.append(index)
        if index == 3:
            raise errors.translate(
                RuntimeError(
                    "IndexError: recfuse.embedding_bag: indices[70] is 12, for bag 3; expected 0 to 9"
                )
            )

    monkeypatch.setattr(torch.ops.recfuse, "check", check, raising=False)
    recfuse.check(1)
    assert asked == []  # CUDA was never used
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    for device in (None, 1, "cuda", "cuda:2", torch.device("cuda", 4), "cpu", torch.device("meta")):
        recfuse.check(device)
    assert asked == [5, 1, 5, 2, 4]
    with pytest.raises(IndexError, match=r"^recfuse\.embedding_bag: indices\[70\] is 12"):
        recfuse.check(3)


@pytest.mark.parametrize(
    "given",
    (
        {"trace": TRACE},
        {"trace": np.array(TRACE, dtype=np.int32)},
        {"trace": torch.tensor(TRACE)},
        {"statistics": traces.statistics(np.array(TRACE))},
        {"rows": [3, 7, 1, 9]},
    ),
    ids=("list", "array", "tensor", "statistics", "rows"),
)
def test_the_hottest_rows_come_first(weight, given):
    assert PinnedRows(weight, **given).rows.tolist() == [3, 7, 1, 9]


def test_the_hottest_rows_of_traces():
    assert traces.hottest(np.array(TRACE), 2).tolist() == [3, 7]
    assert traces.hottest(np.array([], dtype=np.int64)).tolist() == []
    found = traces.statistics(np.array(TRACE))
    assert found.hottest.tolist() == traces.hottest(np.array(TRACE)).tolist()
    assert found.counts.tolist() == [3, 2, 1, 1]


def test_as_many_rows_as_fit(log, weight):
    rows = list(range(20))
    assert len(PinnedRows(weight, rows=rows)) == 8  # 256 bytes each in half of 4 KiB
    assert len(PinnedRows(weight, rows=rows, l2_fraction=0.75)) == 12
    assert len(PinnedRows(weight[:, :1], rows=rows)) == 16  # a cache line each
    assert len(PinnedRows(weight[:, :33], rows=rows)) == 8  # two


def test_refreshed_before_the_first_and_every_third_call(log, weight):
    pinned = PinnedRows(weight, rows=[4, 2], every=3)
    counts = []
    for _ in range(7):
        pinned.step()
        counts.append(len(log.events))
    assert counts == [1, 1, 1, 2, 2, 2, 3]
    assert set(map(str, log.events)) == {str(("pin", [4, 2], "main"))}


def test_a_block_pins_and_unpins(log, weight):
    with PinnedRows(weight, rows=[1]) as pinned:
        assert pinned.active
    assert log.events == [("pin", [1], "main"), ("unpin", [1], "main")]
    pinned.step()
    pinned.close()
    assert len(log.events) == 2 and not pinned.active


def test_update_lets_the_old_rows_go(log, weight):
    pinned = PinnedRows(weight, rows=[1], every=5)
    pinned.step()
    pinned.update([6, 6, 5])
    pinned.step()
    assert log.events == [
        ("pin", [1], "main"),
        ("unpin", [1], "main"),
        ("pin", [6, 5], "main"),
        ("pin", [6, 5], "main"),
    ]
    with pytest.raises(ValueError):
        pinned.update(rows=[20])
    assert pinned.rows.tolist() == [6, 5]


def test_a_refresh_may_overlap_with_other_work(log, weight):
    pinned = PinnedRows(weight, rows=[1]).overlap()
    pinned.refresh()
    pinned.refresh(Stream(log.events, "given"))
    log.state.capturing = True
    pinned.refresh()  # a graph has to have it on the stream it captures
    log.state.capturing = False
    pinned.overlap(False).refresh()
    pinned.close()
    assert log.events == [
        ("pin", [1], "side0"),
        ("pin", [1], "given"),
        ("pin", [1], "main"),
        ("pin", [1], "main"),
        "main waits for side0",
        ("unpin", [1], "main"),
    ]


def test_pinning_accepts_lists_and_arrays(log, weight):
    recfuse.pin_rows(weight, [1, 2])
    recfuse.pin_rows(weight, torch.tensor([3], dtype=torch.int32))
    recfuse.unpin(weight, np.array([2]))
    recfuse.unpin(weight)
    assert [rows for _, rows, _ in log.events] == [[1, 2], [3], [2], None]


def test_a_module_refreshes_before_its_calls_and_a_copy_pins_its_own(log):
    module = EmbeddingBag(20, 64, mode="sum")
    module.pinned = PinnedRows(module.weight, rows=[1]).overlap()
    module(torch.tensor([[1, 2]]))
    assert log.events == [("pin", [1], "side0")]
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.pinned is not module.pinned and other.pinned.weight is other.weight
        other(torch.tensor([[1]]))
    assert [event[2] for event in log.events] == ["side0", "side1", "side2"]
    assert list(module.state_dict()) == ["weight"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    (
        ({}, "exactly one of"),
        ({"trace": [1], "rows": [1]}, "exactly one of"),
        ({"rows": [1, 20]}, r"rows lie in \[1, 20\]; expected \[0, 20\)"),
        ({"rows": [-1]}, r"rows lie in \[-1, -1\]"),
        ({"rows": [1], "l2_fraction": 0.0}, "l2_fraction is 0.0"),
        ({"rows": [1], "l2_fraction": 1.5}, "l2_fraction is 1.5"),
        ({"rows": [1], "every": 0}, "every is 0"),
    ),
)
def test_bad_arguments(weight, arguments, words):
    with pytest.raises(ValueError, match=words):
        PinnedRows(weight, **arguments)


def test_no_rows_are_nothing_to_pin(log, weight):
    pinned = PinnedRows(weight, trace=[])
    pinned.step()
    pinned.close()
    assert not pinned.active and log.events == []


class PinRowsParams(ctypes.Structure):
    """rf_pin_rows_params."""

    _fields_ = (
        ("weight", ctypes.c_void_p), ("rows", ctypes.c_int64), ("row_bytes", ctypes.c_int64),
        ("row_pitch", ctypes.c_int64), ("hot_rows", ctypes.c_void_p), ("n_hot_rows", ctypes.c_int64),
        ("index_type", ctypes.c_int),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    (
        ({"rows": -1}, "-1 rows"),
        ({"row_pitch": -8}, "-8 bytes apart"),
        ({"rows": 1 << 40, "row_pitch": 1 << 40}, "fit int64"),
        ({"weight": None}, "pointers that are not NULL"),
        ({"hot_rows": None}, "pointers that are not NULL"),
        ({"index_type": 2}, "index_type is 2"),
    ),
)
def test_bad_arguments_of_a_c_program(changes, words):
    """Refused before a GPU is looked for, so also without a GPU."""
    library = ctypes.CDLL(recfuse.library_path())
    library.rf_last_error.restype = ctypes.c_char_p
    good = {"weight": 64, "rows": 5, "row_bytes": 8, "row_pitch": 8, "hot_rows": 64, "n_hot_rows": 1}
    params = PinRowsParams(**{**good, "index_type": 1, **changes})
    assert library.rf_pin_rows_cuda(ctypes.byref(params), True, None) != 0
    assert words in library.rf_last_error().decode()


@pytest.mark.parametrize("function", (recfuse.pin_rows, recfuse.unpin))
def test_other_types_than_tensors_are_refused(function):
    with pytest.raises(TypeError, match=r"weight is a list; expected a torch.Tensor"):
        function([1.0], [0])
