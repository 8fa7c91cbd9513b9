"""Tables that join figures of several result files, for the project's README and the pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import geometric_mean
from typing import Any

from common.results import RESULTS, find_table, read_runs, select
from common.table import Table, times

LOOP = "nn.EmbeddingBag in a loop"


def first_overview() -> Table:
    """Tabulates a figure for each kind of machine and work, and the case with the least gain."""
    table = Table("", ["", "compared with", "times faster", "least gain"])
    fused, cpu = "h200/fused_embedding_bag/fused_", "fused_embedding_bag.json"
    bags = _span("embedding_bag.json", "Geometric mean", "over torch")
    model = _span("dlrm.json", "DLRM", "ratio", "^total")
    weak = {LOOP: f"one table {bags}, a whole DLRM {model}"}
    for peer, column in ((LOOP, "nn.EmbeddingBag"), ("FBGEMM on all cores", "FBGEMM, a thread each")):
        ratio = _span(cpu, "Speed of recfuse over each peer", column, "^geo")
        least = _span(cpu, "Speed of recfuse over each peer", column).partition(" to ")[0]
        table.rows.append(["CPU: 750 to 1,200 tables", peer, ratio, weak.get(peer, f"model A: {least}")])
    over = [row[4] for row in fused_overview().rows]
    equal = _span(f"{fused}equal_skewed.json", "recfuse, float32", "over fbgemm v2", "2048 recfuse$")
    whole = _span(f"{fused}end_to_end.json", "ms of a whole model as a CUDA graph", "recfuse over fbgemm v2")
    table.rows.append(
        ["H200: the same models", "FBGEMM", over[-1], f"equal tables {equal}, whole models {whole}"]
    )
    steps = "h200/training_sgd.json", "How many times faster is a step"
    first = _span(*steps, "recfuse over fbgemm", "^A-512, sgd")
    least = _span(*steps, "recfuse over fbgemm", "^mlperf-16384, sgd")
    called = _span(*steps, "recfuse over fbgemm, as called", "sgd")
    table.rows.append(["H200: a training step, SGD", "FBGEMM", f"{first} (A)",
                       f"MLPerf's tables, batch 16384: {least}; without a CUDA graph {called}"])  # fmt: skip
    file, title = "h200/embedding_columns.json", "bucketize columns, 101 x 8 tables, batch 256: recfuse"
    few, many = (_span(file, title, "over similar columns joined", f"^{count} ") for count in (100, 1000))
    called = find_table("h200/embedding_columns_dict.json", title.replace("recfuse", "µs as called"))
    us = select(called, ["recfuse, dict"], "^1000 ").rows[0][1].partition(" ")[0]
    weak = f"100 columns: {few}; a dict of 1,000 tensors takes the host {float(us):.0f} µs"
    table.rows.append(["H200: 1,000 feature columns", "torch, joined by hand", many, weak])
    linear = ikbo_overview().rows
    least = min((cell for row in linear for cell in row[8:]), key=lambda cell: float(cell.rstrip("x")))
    work, weak = (
        "H200: linear layer over candidates",
        f"two candidates a user, small or long layers: {least}; small batches are slower",
    )
    table.rows.append([work, "torch's best form", linear[0][6], weak])
    rows = [row for row in attention_overview().rows if "bfloat16" in row[0]]
    uneven = sorted(_ratio(row[1]) for row in rows if row[0].startswith("64+1"))
    weak = f"16,384 events: {times(min(_ratio(row[-1]) for row in rows))}"
    work = "H200: attention over 512 events, uneven groups"
    table.rows.append([work, "FlashAttention-3", " to ".join(map(times, uneven)), weak])
    return table


def _ratio(cell: str) -> float:
    """Times faster, of a cell with a rate before it."""
    return float(cell.partition("(")[2].rstrip("x)"))


def _span(file: str, title: str, column: str, rows: str = "") -> str:
    """Returns the range of a column, without rows of means, or its only value."""
    cells = select(find_table(file, title), [column], rows).rows
    ratios = sorted(float(row[1].rstrip("x")) for row in cells if rows or not row[0].startswith("geo"))
    return " to ".join(times(ratio) for ratio in dict.fromkeys((ratios[0], ratios[-1])))


def fused_overview() -> Table:
    """Models A to E at 512 on the H200, and over the published sizes."""
    folder = RESULTS / "h200" / "fused_embedding_bag"
    (run,), (peers,) = (read_runs(folder / f"fused_{name}.json") for name in ("models", "peers"))
    columns = ["model", LOOP, "FBGEMM", "recfuse", "over FBGEMM", "over FBGEMM, published sizes"]
    table, ratios = Table("", columns), []
    for model, sizes in run["sizes"].items():
        us = run["models"][f"{model} 512"]["us"]
        both = us["fbgemm v2"] / us["recfuse"], sizes["ratios"]["recfuse over fbgemm v2"]["geometric_mean"]
        ratios.append(both)
        spent = peers["models"][f"{model} 512"]["us"]["torch"], us["fbgemm v2"], us["recfuse"]
        table.rows.append([model, *(f"{cell:.0f}" for cell in spent), *map(times, both)])
    means = [times(geometric_mean(column)) for column in zip(*ratios, strict=True)]
    table.rows.append(["geometric mean", "", "", "", *means])
    return table


def bag_overview() -> Table:
    """One table on the H200 at each hotness."""
    (run,) = read_runs(RESULTS / "h200/embedding_bag.json")
    columns = ["hotness", "torch", "FBGEMM", "plain gather", "recfuse", "over torch", "over FBGEMM"]
    table = Table("", [*columns, "recfuse, fp16 table"])
    for hotness in run["main"]:
        us = run[f"main {hotness}"]["us"]
        fbgemm = min(us["fbgemm v1"], us["fbgemm v2"])
        spent = us["torch"], fbgemm, us["gather 512 B"], us["recfuse"]
        ratios = us["torch"] / us["recfuse"], fbgemm / us["recfuse"]
        cells = [f"{cell:.1f}" for cell in spent] + [f"{ratio:.1f}x" for ratio in ratios]
        table.rows.append([hotness, *cells, f"{us['recfuse fp16']:.1f}"])
    return table


def dlrm_overview() -> Table:
    """The whole DLRM on the H200."""
    (run,) = read_runs(RESULTS / "h200/dlrm.json")
    medians = {
        name: {trace: result["timings"][name]["median_s"] for trace, result in run["measured"].items()}
        for name in ("nn.EmbeddingBag", "recfuse")
    }
    table = Table("", ["ms", *run["measured"]])
    for name, seconds in medians.items():
        table.rows.append([name, *(f"{each * 1e3:.1f}" for each in seconds.values())])
    ratios = [medians["nn.EmbeddingBag"][trace] / medians["recfuse"][trace] for trace in run["measured"]]
    table.rows.append(["times faster", *(f"{ratio:.1f}x" for ratio in ratios)])
    return table


def host_overview() -> Table:
    """The host's time of a call, in each process."""
    runs = read_runs(RESULTS / "h200/fused_embedding_bag/fused_host.json")
    table = Table("", ["us of the host, median (least)", *(f"process {n}" for n in range(1, len(runs) + 1))])
    for rows in zip(*(run["tables"][0]["rows"] for run in runs), strict=True):
        table.rows.append([rows[0][0], *(f"{median} ({least})" for _, median, _, least in rows)])
    return table


def ikbo_overview() -> Table:
    """The linear layer over users and candidates on the H200: the paper's shape, and the minimum of the
    sweeps."""
    columns = ["type, mode", "broadcast + concat", "best torch", "Triton", "recfuse", "of a matmul's rate"]
    sweeps = ("batches", "ratios", "shapes")
    least = (f"least over torch, {sweep}" for sweep in sweeps)
    table = Table("", [*columns, "over torch", "over Triton", *least])
    paths = sorted((RESULTS / "h200" / "ikbo_linear").glob("*.json"))
    runs = [run for path in paths for run in read_runs(path)]
    # Some sweeps have a run of their own, with the main shape in it again.
    for run in (run for run in runs if "batches" in run):
        for dtype, point in run["main"].items():
            for mode, us in point["us"].items():
                best = us[point["best_torch"][mode]]
                share = point["flop"] / us["recfuse"] * 1e6 / point["matmul_flop_per_s"][mode]
                spent = us["broadcast + concat"], best, us["Triton"], us["recfuse"]
                lowest = (_least_over_torch(runs, sweep, dtype, mode) for sweep in sweeps)
                ratios = [best / us["recfuse"], us["Triton"] / us["recfuse"], *lowest]
                cells = [*(f"{cell:.0f}" for cell in spent), f"{share:.0%}", *map(times, ratios)]
                table.rows.append([f"{dtype}, {mode}", *cells])
    return table


def _least_over_torch(runs: Sequence[dict[str, Any]], figure: str, dtype: str, mode: str) -> float | None:
    """The least ratio over the points of a sweep; None if no run has it."""
    ratios = [
        point["us"][mode][point["best_torch"][mode]] / point["us"][mode]["recfuse"]
        for run in runs
        for point in run.get(figure, {}).get(dtype, {}).values()
    ]
    return min(ratios, default=None)


def attention_overview() -> Table:
    """TFLOP/s of attention to users' histories on the H200, and times faster than the best peer."""
    cells: dict[str, dict[str, str]] = {}
    for path in sorted((RESULTS / "h200" / "ikbo_attention").glob("*.json")):
        (run,) = read_runs(path)
        for dtype, sweeps in run.get("main", {}).items():
            for title, points in sweeps.items():
                for kv, point in points.items():
                    for mode, us in point["us"].items():
                        peer = point["best_peer"][mode]
                        if "recfuse" in us and peer:
                            rate = point["flop"] / us["recfuse"] / 1e6
                            text = f"{rate:.0f} ({times(us[peer] / us['recfuse'])})"
                            cells.setdefault(f"{title}, {dtype}, {mode}", {})[kv] = text
    columns = sorted({kv for row in cells.values() for kv in row}, key=int)
    table = Table("", ["TFLOP/s (over the best peer) at kv", *columns])
    table.rows = [[label, *(row.get(kv, "-") for kv in columns)] for label, row in cells.items()]
    return table


OVERVIEWS: dict[str, Callable[[], Table]] = {
    "first": first_overview,
    "fused": fused_overview,
    "bag": bag_overview,
    "dlrm": dlrm_overview,
    "host": host_overview,
    "ikbo": ikbo_overview,
    "attention": attention_overview,
}
WORDED = {"first"}
"""Overviews whose cells are words."""
