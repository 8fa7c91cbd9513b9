"""Contestants checked and then timed in turns, in the same way for every benchmark; and their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from common.calls import time_calls
from common.checks import checked
from common.report import Row
from common.settings import Setting
from common.table import Table


def measure(
    label: str,
    runs: Mapping[str, Callable[[Any], Any]],
    inputs: Sequence[Any],
    setting: Setting,
    error_of: Callable[[str, Any], float],
    allowed: float | Callable[[str], float],
    *,
    first: Mapping[str, Callable[[], Any]] | None = None,
    beside: Mapping[str, Callable[[Any], Any]] | None = None,
    rounds: int | None = None,
    **turns: Any,
) -> Row:
    """Times runs on one subject; ends the program if an output is wrong.

    Args:
        runs: contestants, which take an element of `inputs`. A peer that does not run here is left out, with
        a note.
        error_of: returns the error of the output of a run.
        first: returns the outputs to compare; None: each run on the first input.
        beside: runs that take turns with them but have no output to compare.
        rounds: samples of each; None: `--rounds`.
        turns: options of `time_calls`.

    Returns:
        A row, whose record has the keys us, relative_error, without_graph and measured.
    """
    calls = first or {name: partial(run, inputs[0]) for name, run in runs.items()}
    limit = allowed if callable(allowed) else lambda name: allowed
    errors, notes = checked(setting.parser, label, calls, error_of, limit)
    kept = {**{name: runs[name] for name in errors}, **(beside or {})}
    rounds = rounds or setting.arguments.rounds
    result, failures = time_calls(kept, inputs, setting.device, rounds=rounds, **turns)
    record = {
        "us": {name: timing_.median * 1e6 for name, timing_ in result.timings.items()},
        "relative_error": errors,
        "without_graph": failures,
        "measured": result.to_json(environment=False),
    }
    notes += [f"{label}, {name}: no graph: {why}" for name, why in failures.items()]
    return Row(label, result, record, notes)


def tabulate(
    title: str, first: str, rows: Iterable[Row], names: Sequence[str], suffix: str = "", **extra: Any
) -> Table:
    """Tabulates medians and spreads in µs: a row per subject, a column per contestant, whose timings end
    with `suffix`."""
    cells = [[row.label, *(row.cell(name + suffix) for name in names)] for row in rows]
    return Table(title, [first, *names], cells, **extra)
