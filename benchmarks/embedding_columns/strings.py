"""The host's time of the hash of strings: recfuse.data.hash_strings and its peers."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from common.report import Figure, Row, load_notes
from common.settings import Setting
from common.table import Table
from embedding_columns import bench
from embedding_columns.models import MOST, model_kinds
from recfuse import timing
from recfuse.data import hash_strings

KINDS = {"numbers": "numbers in [0, 100,000)", "ids": "ids of 16 bytes", "urls": "40 to 90 bytes"}
_LOOP_PART = 16  # a Python loop hashes this fraction of the strings


def make_strings(kind: str, count: int, seed: int) -> list[str]:
    """Uniform, of a kind."""
    random = np.random.default_rng(seed)
    if kind == "numbers":
        return random.integers(0, 100_000, count).astype(str).tolist()
    ids = [f"{value:016x}" for value in random.integers(0, 2**63, count).tolist()]
    if kind == "ids":
        return ids
    lengths = random.integers(24, 75, count).tolist()
    return [(f"https://{one}/" + one * 5)[: length + 16] for one, length in zip(ids, lengths, strict=True)]


def candidates_of(strings: list[str], threads: int) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """Returns candidates by name; a name "... loop" hashes one of `_LOOP_PART` strings."""
    array, part = np.array(strings), strings[::_LOOP_PART]
    forms: dict[str, Any] = {"NumPy U": array, "NumPy S": array.astype("S"), "list of str": strings}
    notes = []
    try:
        import pyarrow as pa
    except ImportError:
        notes.append("pyarrow is left out: pip install pyarrow")
    else:
        forms = {"Arrow": pa.array(strings), **forms}
    candidates: dict[str, Callable[[], Any]] = {}
    for form, given in forms.items():
        for used in sorted({1, threads}):
            name = f"recfuse, {form}" + (f", {used} threads" if used > 1 else "")
            candidates[name] = lambda given=given, used=used: hash_strings(given, threads=used)

    def digests() -> list[int]:
        return [
            int.from_bytes(hashlib.blake2b(one.encode(), digest_size=8).digest(), "little") for one in part
        ]

    candidates["hashlib.blake2b, loop"] = digests
    candidates["zlib.crc32, loop"] = lambda: [zlib.crc32(one.encode()) for one in part]
    try:
        import xxhash
    except ImportError:
        notes.append("xxhash is left out: pip install xxhash")
    else:
        candidates["xxhash.xxh64, loop"] = lambda: [xxhash.xxh64_intdigest(one.encode()) for one in part]
    try:
        import pandas as pd
    except ImportError:
        notes.append("pandas is left out: pip install pandas")
    else:
        objects = array.astype(object)
        candidates["pandas.util.hash_array"] = lambda: pd.util.hash_array(objects, categorize=False)
    return candidates, notes


@bench.figure("strings")
def figure_strings(setting: Setting) -> Figure:
    """Strings per second, and the time of a batch of E or F."""
    arguments, count = setting.arguments, setting.arguments.strings
    threads = min(2, setting.arguments.threads or 2)
    rows, notes = [], []
    for kind, text in KINDS.items():
        candidates, more = candidates_of(make_strings(kind, count, arguments.seed), threads)
        result = timing.compare(candidates, rounds=arguments.rounds, progress=False)
        notes += more
        rows.append(Row(text, result, {}))
    table = Table(
        f"Million strings a second, of {count:,} (medians of {arguments.rounds})",
        ["", *(row.label for row in rows)],
    )
    for name in rows[0].result.timings:
        done = count / (_LOOP_PART if name.endswith("loop") else 1)
        table.rows.append([name, *(f"{done / row.result[name].median / 1e6:.1f}" for row in rows)])
    table.notes = [*dict.fromkeys(notes), *load_notes(row.result for row in rows)]
    batch, more = _batches(setting, threads)
    return Figure([table, batch], {}, [row.result.to_json(environment=False) for row in rows] + more)


def _batches(setting: Setting, threads: int) -> tuple[Table, list[Any]]:
    """Times all strings of a batch of a model, in an Arrow array or a list."""
    arguments, size, records = setting.arguments, setting.arguments.batch, []
    names: list[str] = []
    table = Table(f"µs for the strings of a batch of {size} (median ± IQR)", ["model", "strings"])
    for model in arguments.models:
        columns = {kind.name: kind.count for kind in model_kinds(model, 1, arguments.part)}
        count = int(size * (columns["string"] + columns["strings"] * (MOST + 1) / 2))
        candidates, _ = candidates_of(make_strings("numbers", count, arguments.seed), threads)
        ours = {name: run for name, run in candidates.items() if name.startswith("recfuse")}
        result = timing.compare(ours, rounds=arguments.rounds, progress=False)
        names = names or list(ours)
        row = Row(model, result, {})
        table.rows.append([model, f"{count:,}", *map(row.cell, names)])
        records.append({"model": model, "strings": count, "measured": result.to_json(environment=False)})
    table.columns = [*table.columns, *names]
    return table, records
