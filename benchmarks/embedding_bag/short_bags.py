"""Short bags: NVIDIA cuEmbed's sweep of one table, from 1 to 64 lookups per bag, with a plain gather as the
ceiling.

Lookups follow a power law, rank ** -alpha (0: uniform), in a random order of the table's rows; bags are
equally long, and their offsets are given. A sample has several consecutive batches. The ceiling is a gather
that writes a row for each bag: with short bags a gather that only reads is no ceiling, because with one
lookup half of the bytes are the output.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from common.ceilings import SHAPES, Shape, fastest_shape, gather
from common.measure import measure
from common.report import Figure, Row
from common.settings import Setting
from common.table import Table
from embedding_bag import bench
from embedding_bag.candidates import Candidate, make_candidates
from embedding_bag.setting import Part, Pass, each, error_of_pass

ROWS, DIMS, BAGS, POOLINGS = (10**6, 10**7), (32, 128), (1024, 32768, 131072), (1, 16, 64)
ALPHAS = (0.0, 1.05, 1.15)
NAMES = ("torch", "fbgemm v1", "fbgemm v2", "recfuse", "recfuse fp16", "recfuse bf16")
SELECT = "index_select"
"""For bags of one lookup: torch's gather, which copies rows."""
BATCHES, LOOKUPS = 8, 1 << 22
"""Of a sample: the number of batches, or fewer with this number of lookups."""
CHECKED = 8192
"""Bags whose sums are compared."""
ROUNDS = 5
_SHAPES = [shape for shape in SHAPES if shape.l1 and shape.in_flight < 16 and not shape.rolling]


@dataclass(frozen=True)
class Cell:
    """A point of the sweep."""

    rows: int
    dim: int
    bags: int
    pooling: int
    alpha: float

    @property
    def table(self) -> str:
        """Its table."""
        return f"{self.rows // 10**6}M x {self.dim}"

    @property
    def kind(self) -> str:
        """The kind of the bags."""
        return f"{self.bags} x {self.pooling}"


class TableSetting(Setting):
    """One table, and batches for it."""

    def __init__(self, setting: Setting, rows: int, dim: int) -> None:
        """`setting`: the benchmark's."""
        super().__init__(setting.parser, setting.arguments)
        self._generator = torch.Generator(self.device).manual_seed(self.arguments.seed)
        self.weights = [torch.randn(rows, dim, device=self.device, generator=self._generator)]
        self._order = torch.randperm(rows, device=self.device, generator=self._generator)
        self._gathers: dict[tuple[str, str], Shape] = {}

    def part(self, cell: Cell) -> Part:
        """Creates a batch."""
        uniform = torch.rand(
            cell.bags * cell.pooling, device=self.device, generator=self._generator, dtype=torch.float64
        )
        if cell.alpha == 0:
            rank = uniform * cell.rows
        else:
            power = 1 - cell.alpha
            rank = (uniform * ((cell.rows + 1) ** power - 1) + 1) ** (1 / power) - 1
        indices = self._order[rank.long().clamp_(0, cell.rows - 1)]
        return indices, torch.arange(0, len(indices) + 1, cell.pooling, device=self.device)

    def compile_ahead(self, points: Iterable[tuple[int, int]], candidates: dict[str, Candidate]) -> None:
        """Compiles the kernels of recfuse and the gathers side by side: `points` are (bags, pooling)."""
        if self.device.type != "cuda":
            return
        runs: list[Callable[[], object]] = []
        weights = {each.row_bytes: each.weights[0] for each in candidates.values()}
        for bags, pooling in points:
            requests = [(0, self.part(Cell(*self.weights[0].shape, bags, pooling, 0.0)))]
            runs += [
                partial(candidate.run, requests)
                for name, candidate in candidates.items()
                if "recfuse" in name
            ]
            few = requests[0][1][0][:64]
            runs += [
                partial(gather, shape, weight, few, every=every)
                for shape, weight, every in itertools.product(_SHAPES, weights.values(), (0, pooling))
            ]

        def run_one(run: Callable[[], object]) -> None:
            torch.cuda.set_device(self.device)
            torch.cuda.synchronize()  # this thread now has the device's context
            run()

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(run_one, runs))
        torch.cuda.synchronize()

    def measure(self, cell: Cell, candidates: dict[str, Candidate], rounds: int) -> CellRow:
        """All candidates and the ceilings in turns, after their outputs are checked."""
        count = max(min(BATCHES, LOOKUPS // (cell.bags * cell.pooling)), 2)
        requests = [(0, self.part(cell)) for _ in range(count)]
        passes = {name: candidate.run for name, candidate in candidates.items()}
        if cell.pooling == 1:
            passes[SELECT] = each(lambda table, indices, offsets: self.weights[0].index_select(0, indices))
        gathers: dict[str, str] = {}
        beside: dict[str, Pass] = {}
        for weight in (candidate.weights[0] for candidate in candidates.values()):
            for every in (0, cell.pooling):
                name = _gather_name(weight.shape[1] * weight.element_size(), bool(every))
                if name not in gathers:
                    beside[name], gathers[name] = self._gather(name, weight, cell, every, requests)
        indices, offsets = requests[0][1]
        some = [(0, (indices[: CHECKED * cell.pooling], offsets[: CHECKED + 1]))]
        right = {SELECT: self.weights} | {name: one.weights for name, one in candidates.items()}
        row = measure(
            f"{cell.table}, {cell.kind}, alpha {cell.alpha}", passes, [requests], self,
            lambda name, outputs: error_of_pass([outputs[0][:CHECKED]], right[name], some),
            lambda name: candidates[name].tolerance if name in candidates else 0.0,
            first={name: partial(run, requests[:1]) for name, run in passes.items()},
            beside=beside, rounds=rounds, eager=False,
        )  # fmt: skip
        cell_row = CellRow(**{**vars(row), "label": cell.kind}, point=cell, batches=count)
        cell_row.record = {
            **vars(cell), **row.record, "gathers": gathers, "notes": row.notes,
            "unique_rows": len(indices.unique()),
            "us": {name: cell_row.us(name) for name in row.result.timings},
        }  # fmt: skip
        return cell_row

    def _gather(
        self, name: str, weight: Tensor, cell: Cell, every: int, requests: list[tuple[int, Part]]
    ) -> tuple[Pass, str]:
        """Returns the shape that is fastest for the first law."""
        key = name, cell.kind
        if key not in self._gathers:
            first = [(weight, part[0]) for _, part in requests[:2]]
            self._gathers[key], _ = fastest_shape(first, self.device, _SHAPES, every)
        shape = self._gathers[key]
        run = each(lambda table, indices, offsets: gather(shape, weight, indices, every=every))
        return run, str(shape)


def _gather_name(row_bytes: int, writing: bool) -> str:
    return f"gather {row_bytes} B" + (", writing" if writing else "")


@dataclass(kw_only=True)
class CellRow(Row):
    """A cell, in µs a batch."""

    point: Cell
    batches: int

    digits = 2

    @property
    def unit(self) -> int:
        """Batches of a sample."""
        return self.batches

    @property
    def peer(self) -> str | None:
        """The fastest of FBGEMM's kernels."""
        names = [name for name in NAMES if "fbgemm" in name and name in self.result.timings]
        return self.result.fastest(names) if names else None

    def of_gather(self, name: str, writing: bool) -> float:
        """Returns the time of the fastest plain gather of the same rows, divided by that of a candidate."""
        row_bytes = self.point.dim * (2 if name.endswith("16") else 4)
        return self.us(_gather_name(row_bytes, writing)) / self.us(name)


@bench.figure("short", on=["cuda"], default=False)
def figure_short(setting: Setting) -> Iterator[Figure]:
    """The cells of each table in turn, and a summary."""
    quick, rows = setting.arguments.quick, []
    for size, dim in itertools.product(ROWS[:1] if quick else ROWS, reversed(DIMS)):
        table = TableSetting(setting, size, dim)
        candidates, notes = make_candidates(table, NAMES)
        kinds = list(itertools.product(BAGS[:2] if quick else BAGS, POOLINGS[:2] if quick else POOLINGS))
        table.compile_ahead(kinds, candidates)
        points = [(*kind, alpha) for kind, alpha in itertools.product(kinds, ALPHAS)]
        cells = [
            table.measure(Cell(size, dim, *point), candidates, 3 if quick else ROUNDS)
            for point in tqdm(points, desc=f"{size} x {dim}", leave=False)
        ]
        notes += dict.fromkeys(note for cell in cells for note in cell.notes)
        rows += cells
        records = [cell.record for cell in cells]
        yield Figure([_times(cells, notes)], {}, records, name=f"short {cells[0].point.table}")
        del table, candidates
        setting.release()
    yield Figure([summary(rows)], {}, [])


def _mean_and_least(ratios: Iterable[float | None]) -> str:
    """Returns mean and least of the cells of a kind; a dash if a peer is missing."""
    known = [ratio for ratio in ratios if ratio is not None]
    return f"{geometric_mean(known):.2f}x ({min(known):.2f})" if known else "-"


def summary(rows: list[CellRow]) -> Table:
    """Tabulates by kind of bags: geometric mean and least over tables and laws."""
    ours = [name for name in NAMES if name.startswith("recfuse")]
    table = Table(
        "Short bags, times faster: geometric mean (least) over tables and laws",
        [
            "bags x lookups", "over torch", "over FBGEMM's best", f"over {SELECT}",
            *(f"{name.removeprefix('recfuse')} over {what}".strip()
              for what in ("the gather", "the gather that writes") for name in ours),
        ],
    )  # fmt: skip
    kinds = dict.fromkeys(row.label for row in rows)
    for kind in (*kinds, "all"):
        of_kind = [row for row in rows if kind in (row.label, "all")]
        table.rows.append(
            [kind]
            + [_mean_and_least(row.ratio("recfuse", "torch") for row in of_kind)]
            + [_mean_and_least(row.peer and row.ratio("recfuse", row.peer) for row in of_kind)]
            + [_mean_and_least(row.ratio("recfuse", SELECT) for row in of_kind)]
            + [
                _mean_and_least(row.of_gather(name, writing) for row in of_kind if name in row.result.timings)
                for writing in (False, True)
                for name in ours
            ]
        )
    table.notes = [
        "The gather reads the same rows in the same order, and keeps nothing; the one that writes stores "
        "each bag's last row as it is, as many bytes as sums have. The fastest of "
        f"{len(_SHAPES)} shapes for each kind of bags."
    ]
    return table


def _times(rows: list[CellRow], notes: list[str]) -> Table:
    """Tabulates one table by kind of bags, with the laws in one cell."""
    columns = [
        "recfuse", "FBGEMM's best", "torch", SELECT, "gather", "gather that writes",
        "recfuse fp16", "recfuse bf16",
    ]  # fmt: skip
    laws = " / ".join(f"{alpha:g}" for alpha in ALPHAS)
    title = f"Short bags of {rows[0].point.table}, us a batch as a CUDA graph, alpha {laws}"
    table = Table(title, ["bags x lookups", *columns])
    for kind in dict.fromkeys(row.label for row in rows):
        line = [row for row in rows if row.label == kind]
        table.rows.append([kind, *(" / ".join(_us(row, name) for row in line) for name in columns)])
    table.notes = notes
    return table


def _us(row: CellRow, column: str) -> str:
    row_bytes = row.point.dim * 4
    name: Any = {
        "FBGEMM's best": row.peer,
        "gather": _gather_name(row_bytes, False),
        "gather that writes": _gather_name(row_bytes, True),
    }.get(column, column)
    return f"{row.us(name):.2f}" if name in row.result.timings else "-"
