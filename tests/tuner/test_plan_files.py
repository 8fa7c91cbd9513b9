"""Files of plans that are damaged, hostile or of somebody else: refused in one way and in little memory, or
read as plans that can be printed, saved, plotted and applied.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import stat
import tempfile
import tracemalloc
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recfuse import CollectionPlan, Plan, cli
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.nn import EmbeddingBag
from recfuse.plan.features import FeatureTable
from recfuse.plan.table import Pinned
from support import bag_plan, collection_plan
from support.bag_plan import at

BYTES = 64 << 20  # that reading a file may take


@pytest.fixture(params=("table", "collection"))
def path(request, tmp_path):
    where = tmp_path / "plan.json"
    made(request.param)[1].save(where)
    return where


def made(kind):
    """A module, and a plan for it."""
    if kind == "table":
        module = EmbeddingBag(100, 4, mode="sum")
        pinned = Pinned(10, 0.5, "abc")
        return module, bag_plan.plan_for(module, pinned=pinned)
    module = collection_plan.collection_of()
    return module, collection_plan.plan_for(module)


def refused(path, words=""):
    """That reading a file raises the one class, in little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(ArgumentValueError) as raised:
            Plan.load(path)
        assert tracemalloc.get_traced_memory()[1] < BYTES
    finally:
        tracemalloc.stop()
    text = str(raised.value)
    assert words in text and str(path) in text and len(text) < 1000 + len(str(path))


@pytest.mark.parametrize(
    ("change", "words"),
    (
        (at("recfuse_plan", value=-5), "is of format -5; expected 1 to 1"),
        (at("recfuse_plan", value=0), "is of format 0"),
        (at("recfuse_plan", value=True), 'has no number under "recfuse_plan"; expected a plan'),
        (at("recfuse_plan", value=10**29), "is of format 1000"),
        (at("kind", value=["x" * 10**6] * 3), "is a plan for ["),
        (at("best_us", value=float("nan")), "a number is NaN; expected finite numbers"),
        (at("default_us", value=float("inf")), "a number is Infinity"),
        (at("seconds", value=-1), "seconds is -1; expected 0 to 1000000000000000000"),
        (at("best_us", value=0), "best_us is 0.0; expected more than 0"),
        (at("best_us", value=10**400), "a number has 401 digits; expected 30 at most"),
        (at("device", "type", value="tpu"), "device.type is 'tpu'; expected 'cuda' or 'cpu'"),
        (at("decisions", value=[1]), "decisions[0] is 1; expected an object"),
        (at("decisions", value=[0] * 100_001), "decisions has 100,001 items; expected 100,000 at most"),
        (at("trace", "sha256", value=[["x" * 10**5] * 10] * 10), "trace.sha256 is [["),
        (at("created", value=None), "created is None; expected str"),
    ),
)
def test_invalid_values_of_a_plan_are_refused(path, change, words):
    change(path)
    refused(path, words)


@pytest.mark.parametrize(
    ("change", "words"),
    (
        (at("table", "rows", value=-1), "table.rows is -1; expected 0 to"),
        (at("table", "rows", value=10**18), "expected 4611686018427387904 bytes at most in all tables"),
        (at("table", "dim", value=2**31), "table.dim is 2147483648; expected 2147483647 at most"),
        (at("table", "dtype", value="float64"), "expected 'float32' or 'float16' or 'bfloat16'"),
        (at("table", "mode", value="$\\x$"), "expected 'sum' or 'mean' or 'max'"),
        (at("pinned", "l2_fraction", value=0), "pinned.l2_fraction is 0.0; expected (0, 1]"),
        (at("schedule", value="distance=" + "9" * 5000), "expected a whole number from 0 to 2147483647"),
        (at("schedule", value="distance=\u0663"), "expected a whole number"),
        (at("schedule", value="distance=4\nwarps=32"), "expected a whole number"),
        (at("schedule", value="x" * 10**6), "is unknown or given twice"),
        (at("schedule", value="distance=65536"), "schedule: distance is 65536; expected 1 to 64"),
        (at("schedule", value="block=4"), "schedule: block is 4; expected a power of two, 32 to 1024"),
        (at("schedule", value="warps=1000000"), "schedule: warps is 1000000; expected 1 to 64"),
        (at("schedule", value="threads=3"), "schedule: threads is 3; expected a power of two, 1 to 1024"),
        (at("created", value="x" * ((2 << 20) + 1)), "created has 2,097,153 characters"),
    ),
)
def test_invalid_values_of_a_tables_plan_are_refused(tmp_path, change, words):
    made("table")[1].save(tmp_path / "plan.json")
    change(tmp_path / "plan.json")
    refused(tmp_path / "plan.json", words)


@pytest.mark.parametrize(
    ("change", "words"),
    (
        (at("schedule_of", value="0*9999999"), "schedule_of has '0*9999999'; expected integers"),
        (at("table_of", value="0*9999999"), "for 100,000 features at most"),
        (at("expected", value="0*99999 " * 100), "for 100,000 features at most"),
        (at("expected", value="0 " * 7_000_000), "for 100,000 features at most"),
        (at("table_of", value="9" * 10**6), "table_of has '9999"),
        (at("expected", value="\u0663"), "expected integers"),
        (at("tables", 0, "rows", value=10**18), "bytes at most in all tables"),
        (at("schedules", value=[""] * 6), "schedules has 6 items; expected 5 at most"),
        (at("schedules", 1, value="kind=pool threads=0"), "threads is '0'; expected a whole number from 1"),
    ),
)
def test_invalid_values_of_a_collections_plan_are_refused(tmp_path, change, words):
    made("collection")[1].save(tmp_path / "plan.json")
    change(tmp_path / "plan.json")
    refused(tmp_path / "plan.json", words)


@pytest.mark.parametrize(
    ("schedule", "words"),
    (
        ("block=32 threads=64", "block is 32; expected at least threads, 64"),
        (
            "station=none distance=2",
            'distance is 2; expected 1 or left out with station "none", which has one row in flight. '
            'Use station "register"',
        ),
        ("bags=32 distance=2", "bags is 32, with which there is no station, distance"),
        ("warps=1 block=64", "warps is 1; expected at least the 2 of one block of 64 threads"),
    ),
)
def test_a_schedule_that_no_call_could_use_is_refused_when_it_is_applied(tmp_path, schedule, words):
    module, plan = made("table")
    plan.pinned, plan.device, plan.schedule = None, replace(plan.device, type="cuda"), schedule
    plan.save(tmp_path / "plan.json")
    with pytest.raises(ArgumentValueError, match="apply: the plan does not fit: ") as raised:
        Plan.load(tmp_path / "plan.json").apply(module)
    assert words in str(raised.value) and not module.schedule


@pytest.mark.parametrize(
    ("schedule", "words"),
    (
        ("kind=pool distance=65536", "distance is 65536; expected 1, 2, 4, 8 or 16"),
        ("kind=pool threads=3", "threads is 3; expected a power of two"),
        ("kind=pool split=1000000", "split is 1000000; expected 1 to 64"),
        ("kind=staged threads=64", "threads is 64; expected 2, 4, 8, 16 or 32 for a staged table"),
    ),
)
def test_schedules_that_no_call_could_use_are_refused_when_they_are_applied(tmp_path, schedule, words):
    collection, plan = made("collection")
    plan.schedules[1] = schedule
    plan.save(tmp_path / "plan.json")
    with pytest.raises(ArgumentValueError, match="apply: the plan does not fit: ") as raised:
        Plan.load(tmp_path / "plan.json").apply(collection)
    assert words in str(raised.value) and collection.plan is None


@pytest.mark.filterwarnings("ignore:recfuse.Plan")
def test_a_plan_that_is_read_runs(path):
    kind = "table" if "pinned" in json.loads(path.read_text()) else "collection"
    module, _ = made(kind)
    given = (bag_plan if kind == "table" else collection_plan).batches()
    if kind == "table":
        at("pinned", value=None)(path)
    Plan.load(path).apply(module)
    assert module(*given[0]).isfinite().all()


def test_a_plan_without_features_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    made("collection")[1].save(path)
    for name in ("schedule_of", "table_of", "expected"):
        at(name, value="")(path)
    refused(path, "table_of is empty")


@pytest.mark.parametrize(
    "text", ("[" * 200_000, '{"a":' * 200_000, '{"recfuse_plan": 1, "a": ' + "[" * 900_000)
)
def test_deep_nesting_is_refused(path, text):
    path.write_text(text)
    refused(path, "nests lists or objects too deeply")


def test_a_large_file_is_refused(path):
    path.write_text(path.read_text() + " " * (17 << 20))
    refused(path, "is larger than 16,777,216 bytes")


@pytest.mark.parametrize("text", (b"\xff\xfe{", b"\x00", b"null", b'"recfuse_plan"', b"\xef\xbb\xbf{}"))
def test_invalid_texts_are_refused(path, text):
    path.write_bytes(text)
    refused(path)


def test_paths():
    for wrong in (None, 3, {}):
        with pytest.raises(ArgumentTypeError, match=r"recfuse\.Plan\.load: path is an? .*expected a str"):
            Plan.load(wrong)
        with pytest.raises(ArgumentTypeError, match=r"recfuse\.Plan\.save: path is an? .*expected a str"):
            made("table")[1].save(wrong)
    with pytest.raises(ArgumentValueError, match="has a NUL character"):
        Plan.load("a\0b")


def test_values_without_a_form_in_files_are_named(tmp_path):
    for value, words in ((float("nan"), "not JSON compliant"), (torch.zeros(2), "not JSON serializable")):
        plan = made("table")[1]
        plan.seconds = value
        with pytest.raises(
            (ArgumentValueError, ArgumentTypeError), match=rf"plan\.json is not written.*{words}"
        ):
            plan.save(tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


def test_a_plan_that_cannot_be_written_is_not_lost(capsys, tmp_path, monkeypatch):
    replace, out = os.replace, tmp_path / "plan.json"

    def replaced(source, target):
        if str(target) == str(out):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    arguments = [
        "tune",
        "--trace",
        "low",
        "--rows",
        "90",
        "--budget",
        "0",
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    with pytest.raises(SystemExit) as stopped:
        cli.main([*arguments, "--out", str(out), "--dim", "8", "--batch", "8"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"No space left on device: '{out}'), and the plan is in " in error
    assert Plan.load(error.split(" is in ")[1].removesuffix(" instead")).table.rows == 90
    assert not out.exists()


def test_links_and_pipes_are_not_replaced(tmp_path):
    plan, link, pipe = made("table")[1], tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(tmp_path / "plan.json")
    plan.save(link)
    assert link.is_symlink() and Plan.load(tmp_path / "plan.json") == plan
    os.mkfifo(pipe)
    with pytest.raises(ArgumentValueError, match="pipe is no regular file"):
        plan.save(pipe)
    assert pipe.is_fifo()


def test_a_plan_of_the_largest_size_is_read_and_printed(tmp_path):
    _, plan = made("collection")
    number = 100_000
    plan.schedule_of, plan.table_of, plan.expected = [0, 1] * (number // 2), [0] * number, [16] * number
    plan.decisions = plan.decisions[:1] * 5000
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.rows().shape == (number, 5)
    assert "and 3,000 more, in decisions of the plan" in str(loaded)


@pytest.mark.parametrize("mask", (0o022, 0o077, 0o002))
def test_a_new_file_has_the_mode_of_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        made("table")[1].save(tmp_path / "plan.json")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "plan.json").stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("mode", (0o600, 0o664))
def test_a_file_that_is_replaced_keeps_its_mode(path, mode):
    path.chmod(mode)
    before = path.stat().st_ino
    made("table")[1].save(path)
    assert path.stat().st_ino != before and stat.S_IMODE(path.stat().st_mode) == mode


def test_a_plan_whose_time_is_zero_is_printed():
    """As user code may create it."""
    for kind in ("table", "collection"):
        plan = made(kind)[1]
        plan.best_us = 0.0
        assert "plan 0.00 µs" in str(plan)


def test_a_report_has_no_control_characters():
    _, plan = made("table")
    plan.created = "\x1b[2J\x07\ud800"
    assert "\\x1b[2J\\x07\\ud800" in str(plan) and str(plan).encode()


def test_a_figure_has_so_many_classes_and_schedules(tmp_path):
    pytest.importorskip("matplotlib")
    _, plan = made("collection")
    number = 500
    table = plan.tables[0]
    plan.tables = [FeatureTable(9, dim + 1, "float32", "sum", False) for dim in range(number)]
    plan.schedules = [f"kind=pool threads={place + 1}" for place in range(number)]
    plan.schedule_of = plan.table_of = list(range(number))
    plan.expected = [16] * number
    assert table not in plan.tables
    bars, _ = plan.plot().axes
    assert len(bars.get_xticks()) == 60 and "60 of 500" in bars.get_title()
    assert sum(patch.get_height() for patch in bars.patches) == 60


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**31), 10**31)
    | st.sampled_from((0, 1, -1, 2**31, 2**63, 10**18))
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(("0*5", "1*99999", "0*9999999", "kind=pool", "distance=3", "max", "cuda", "\x1b")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def places_of(record, place=()):
    """The way to each value."""
    pairs = (
        record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    )
    for key, value in pairs:
        yield (*place, key)
        yield from places_of(value, (*place, key))


@st.composite
def damaged(draw, record):
    """The text of a record in which some values are others, or missing, or twice; or of which a part is."""
    record = copy.deepcopy(record)
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from(list(places_of(record))))
        inner = record
        for key in way:
            inner = inner[key]
        change = draw(st.sampled_from(("value", "value", "like", "drop", "twice")))
        if change == "drop":
            del inner[last]
        elif change == "twice" and isinstance(inner, list):
            inner.append(inner[last])
        elif change == "like" and type(inner[last]) in (int, float):
            inner[last] = draw(st.integers(0, 10**18) | st.floats(0, 1e18))
        else:
            inner[last] = draw(JSON)
        if not record:
            break
    text = json.dumps(record, indent=draw(st.sampled_from((None, 2))))
    if draw(st.integers(0, 9)) == 0:
        start, length = draw(st.integers(0, len(text))), draw(st.integers(0, 20))
        text = text[:start] + draw(st.text(max_size=5)) + text[start + length :]
    return text


@pytest.mark.long
@pytest.mark.parametrize("kind", ("table", "collection"))
@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_file_is_refused_or_read_as_a_plan_that_works(tmp_path, kind, data):
    path = tmp_path / "plan.json"
    module, plan = made(kind)
    plan.save(path)
    path.write_text(data.draw(damaged(json.loads(path.read_text()))), errors="surrogatepass")
    try:
        loaded = Plan.load(path)
    except ArgumentValueError as error:
        assert str(path) in str(error)
        return
    assert isinstance(loaded, (Plan, CollectionPlan))
    assert str(loaded).encode() and loaded.speedup >= 0
    loaded.save(path)
    assert Plan.load(path) == loaded
    given = (bag_plan if isinstance(loaded, Plan) else collection_plan).batches()
    with contextlib.suppress(ArgumentValueError):
        assert loaded.drift(given).before == loaded.trace
    with warnings.catch_warnings(), contextlib.suppress(ArgumentValueError):
        warnings.simplefilter("ignore", UserWarning)
        loaded.apply(module)
    if data.draw(st.integers(0, 9)) == 0:
        pytest.importorskip("matplotlib")
        loaded.plot().canvas.draw()
