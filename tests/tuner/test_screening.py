"""Candidates that the model ranks first, against recorded measurements of all candidates on an H200."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from recfuse.ops.schedules import Schedule
from recfuse.tuner.table.screening import Device, cost, first_third

ROOT = Path(__file__).resolve().parents[2]
H200 = Device(132, 64, 65536, 228 << 10)
BAGS = 2048
DEFAULT = Schedule(threads=64, block=512)
RECORD = json.loads((ROOT / "benchmarks/results/h200/embedding_bag.json").read_text())
TRACES = "one_item", "high", "medium", "low", "random"


def measured(trace: str, step: str) -> dict[Schedule, float]:
    """The microseconds of the candidates of a step, from the table of a recorded plan."""
    rows: list[list[str]] = []
    for line in RECORD[f"main {trace}"]["plan"].split("\n"):
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        if line.startswith("│") and len(cells) == 5:
            if cells[0]:
                rows.append(cells)
            else:  # a continued line
                rows[-1] = [f"{before} {cell}".strip() for before, cell in zip(rows[-1], cells, strict=True)]
    found = {}
    for name, candidate, us, *_ in rows:
        if name == step and candidate.startswith("station=") and us:
            found[Schedule.parse(candidate)] = float(us)
    return found


@pytest.mark.parametrize("step", ["occupancy", "prefetch"])
@pytest.mark.parametrize("trace", TRACES)
def test_the_first_third_has_the_best(trace, step):
    us = measured(trace, step)
    assert len(us) > 10 and max(us.values()) > 1.5 * min(us.values())
    for seed in range(20):
        candidates = random.Random(seed).sample(list(us), len(us))  # equal costs keep their order
        chosen = first_third(candidates, H200, BAGS, DEFAULT)
        assert len(chosen) == -(-len(us) // 3)
        assert min(us[one] for one in chosen) <= 1.01 * min(us.values())


def test_chance_finds_the_best_less_often():
    hits = []
    for trace in TRACES:
        for step in ("occupancy", "prefetch"):
            us = measured(trace, step)
            for seed in range(20):
                chosen = random.Random(seed).sample(list(us), -(-len(us) // 3))
                hits.append(min(us[one] for one in chosen) <= 1.01 * min(us.values()))
    assert sum(hits) < 0.75 * len(hits)


def test_cost_falls_with_bytes_in_flight():
    few, many = (Schedule("register", distance, 64, 512, 16) for distance in (1, 4))
    assert cost(few, H200, BAGS) > cost(many, H200, BAGS)
    slow, fast = (Schedule("none", 1, 64, 512, warps) for warps in (16, 64))
    assert cost(slow, H200, BAGS) > cost(fast, H200, BAGS)
    assert cost(Schedule("local", 4), H200, BAGS) > cost(Schedule("register", 4), H200, BAGS)
