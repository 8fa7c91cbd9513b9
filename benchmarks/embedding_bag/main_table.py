"""The main table of the GPU benchmark: every candidate at every hotness, and the ceilings of the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from common import measure as turns
from common.calls import EAGER
from common.ceilings import fastest_shape, gather
from common.report import Figure, Panels, Row
from common.table import Table, times
from embedding_bag import bench
from embedding_bag.candidates import BASELINE, TUNED, Candidate, make_candidates, tune, tuned_candidate
from embedding_bag.setting import BagSetting, Pass, Workload, each, error_of_pass, inputs_of, tables_of

LAUNCH = "launch"


@dataclass(kw_only=True)
class HotnessRow(Row):
    """One hotness, in µs a table: measurements and references."""

    workload: Workload
    candidates: dict[str, Candidate]
    gathers: dict[int, str]  # name of the gather for each row size

    digits = 2

    @property
    def unit(self) -> int:
        """Tables of a sample."""
        return tables_of(self.result, self.workload)


@bench.figure("main", on=["cuda"])
def figure_main(setting: BagSetting) -> Iterator[Figure]:
    """Each hotness in turn, then their tables."""
    arguments, rows = setting.arguments, []
    fixed, left_out = make_candidates(setting, [name for name in arguments.candidates if name != TUNED])
    for hotness in arguments.hotness:
        rows.append(measure(setting, hotness, fixed))
        yield Figure([], {}, rows[-1].record, name=f"main {hotness}")
    notes = [*left_out, *(note for row in rows for note in row.notes)]
    labels = [row.label for row in rows]
    yield Figure(tabulate(rows, notes, setting), over_torch(rows), labels, name="main", plot="main")


def measure(setting: BagSetting, hotness: str, fixed: dict[str, Candidate]) -> HotnessRow:
    """Times the candidates `fixed`, the tuned one, the gathers and a launch, at one hotness."""
    arguments = setting.arguments
    workload = setting.workload(hotness, batches=arguments.num_batches)
    candidates, record = dict(fixed), {"hotness": hotness, "unique_rows": workload.unique_rows()}
    if TUNED in arguments.candidates:
        plan = tune(setting, hotness)
        record["plan"] = plan.report()
        candidates[TUNED] = tuned_candidate(setting, plan, workload)
    beside, gathers, tiny = {}, {}, torch.zeros(1, device=setting.device)
    for candidate in candidates.values():
        if candidate.row_bytes not in gathers:
            name = gathers[candidate.row_bytes] = f"gather {candidate.row_bytes} B"
            beside[name], record[name] = _gather_pass(candidate, workload, setting)
    beside[LAUNCH] = each(lambda table, indices, offsets: tiny.zero_())
    requests, cache = workload.requests[0], arguments.cache
    row = turns.measure(
        hotness, {name: candidate.run for name, candidate in candidates.items()},
        inputs_of(workload, cache), setting,
        lambda name, outputs: error_of_pass(outputs, candidates[name].weights, requests),
        lambda name: candidates[name].tolerance,
        first={name: partial(candidate.run, requests) for name, candidate in candidates.items()},
        beside=beside, cache=cache, eager=cache == "warm", after=setting.unpin,
    )  # fmt: skip
    candidates = {name: candidates[name] for name in row.record["relative_error"]}
    hotness_row = HotnessRow(**vars(row), workload=workload, candidates=candidates, gathers=gathers)
    hotness_row.record = {
        **record,
        **row.record,
        "us": {name: hotness_row.us(name) for name in row.result.timings},
    }
    hotness_row.record["share_of_gather"], hotness_row.record["share_of_floor"] = _shares(
        hotness_row, setting.copy_speed
    )
    return hotness_row


def _gather_pass(candidate: Candidate, workload: Workload, setting: BagSetting) -> tuple[Pass, str]:
    """Returns the fastest gather of the rows of this workload, in its order, and its shape."""
    weights = candidate.weights
    requests = [(weights[table], indices) for table, (indices, _) in workload.requests[0]]
    shape, _ = fastest_shape(requests, setting.device)
    return each(lambda table, indices, offsets: gather(shape, weights[table], indices)), str(shape)


def _shares(row: HotnessRow, copy_speed: float) -> tuple[dict[str, float], dict[str, float]]:
    """Returns for each candidate the time of the gather, and of the least bytes at copy speed, divided by
    its own time."""
    of_gather, of_floor = {}, {}
    for name, candidate in row.candidates.items():
        if name in row.result.timings:
            of_gather[name] = row.us(row.gathers[candidate.row_bytes]) / row.us(name)
            floor = row.workload.least_bytes(candidate.row_bytes) / copy_speed * 1e6
            of_floor[name] = floor / row.us(name)
    return of_gather, of_floor


def tabulate(rows: list[HotnessRow], notes: list[str], setting: BagSetting) -> list[Table]:
    """Tabulates times by candidate, as graphs and eager, and the ratios of recfuse."""
    arguments = setting.arguments
    shape = (
        f"{len(setting.weights)} tables in turn, {arguments.rows:,} x {arguments.dims[0]}, "
        f"batch {arguments.batch_size} x {arguments.num_indices_per_lookup}, {arguments.cache} L2"
    )
    names = list(rows[0].candidates)
    extra = [*rows[0].gathers.values(), LAUNCH]
    spread = f"median ± IQR of {arguments.rounds}"
    title = f"us a table as a CUDA graph, {shape} ({spread})"
    graphs = turns.tabulate(title, "hotness", rows, [*names, *extra])
    graphs.notes = [
        f"{LAUNCH}: a kernel that writes four bytes, the cost of one more launch.",
        "Largest error, as a share of the largest value, against sums in float64 of the same table: "
        + ", ".join(
            f"{max(row.record['relative_error'].get(name, 0.0) for row in rows):.0e} ({name})"
            for name in names
        )
        + ".",
        *dict.fromkeys(notes),
    ]
    tables = [graphs]
    if arguments.cache == "warm":
        title = f"us a table as called, host included, {shape} ({spread})"
        tables.append(turns.tabulate(title, "hotness", rows, names, EAGER))
    return [*tables, _summary(rows, shape, setting.copy_speed)]


def _summary(rows: list[HotnessRow], shape: str, copy_speed: float) -> Table:
    """Ratios and shares of recfuse's candidates: a row for each hotness and candidate."""
    peers = [name for name in rows[0].candidates if not name.startswith("recfuse")]
    columns = ["hotness", "candidate", *(f"over {name}" for name in peers), f"over {BASELINE}, as called"]
    columns += ["over recfuse fp32", "TB/s", "of gather", "least MB", "of copy speed"]
    table = Table(f"recfuse, {shape}", columns)
    for row in rows:
        for name, candidate in row.candidates.items():
            if name in peers or name not in row.result.timings:
                continue
            gathered = row.workload.lookups * candidate.row_bytes
            table.rows.append(
                [row.label, name]
                + [times(row.ratio(name, peer)) for peer in peers]
                + [times(row.ratio(name + EAGER, BASELINE + EAGER)), times(row.ratio(name, "recfuse"))]
                + [f"{gathered / row.us(name) / 1e6:.2f}", f"{row.record['share_of_gather'][name]:.0%}"]
                + [f"{row.workload.least_bytes(candidate.row_bytes) / 1e6:.1f}"]
                + [f"{row.record['share_of_floor'][name]:.0%}"]
            )
    table.notes = [
        'Ratios are of graph replays, except those with "as called". TB/s: bytes of the rows looked up.',
        "of gather: the time of the fastest plain gather of the same rows in the same order, over the time.",
        f"of copy speed: least MB at {copy_speed / 1e12:.2f} TB/s, the speed of a large copy, over the time; "
        "what L2 keeps from pass to pass need not move at all.",
    ]
    return table


def over_torch(rows: list[HotnessRow]) -> Panels:
    """For a plot: how many times faster than torch each candidate is, by hotness, of graph replays."""
    series = {
        name: {row.label: ratio for row in rows if (ratio := row.ratio(name, BASELINE)) is not None}
        for name in rows[0].candidates
        if name != BASELINE
    }
    return {f"times faster than {BASELINE}": series}
