"""Tables that join figures of several result files, for the project's README and the pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import geometric_mean
from typing import Any

from common.results import RESULTS, read_runs
from common.table import Table, times

LOOP = "nn.EmbeddingBag in a loop"


def fused_overview() -> Table:
    """Models A to E at 512 on the H200, and over the published sizes."""
    folder = RESULTS / "h200" / "fused_embedding_bag"
    (run,), (peers,) = (read_runs(folder / f"fused_{name}.json") for name in ("models", "peers"))
    columns = ["model", LOOP, "FBGEMM", "recfuse", "over FBGEMM", "over it on the published sizes"]
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
        name: {trace: found["timings"][name]["median_s"] for trace, found in run["measured"].items()}
        for name in ("nn.EmbeddingBag", "recfuse")
    }
    table = Table("", ["ms", *run["measured"]])
    for name, seconds in medians.items():
        table.rows.append([name, *(f"{each * 1e3:.1f}" for each in seconds.values())])
    ratios = [medians["nn.EmbeddingBag"][trace] / medians["recfuse"][trace] for trace in run["measured"]]
    table.rows.append(["times faster", *(f"{ratio:.1f}x" for ratio in ratios)])
    return table


def host_overview() -> Table:
    """What the host spends on a call, in each process."""
    runs = read_runs(RESULTS / "h200/fused_embedding_bag/fused_host.json")
    table = Table("", ["us of the host, median (least)", *(f"process {n}" for n in range(1, len(runs) + 1))])
    for rows in zip(*(run["tables"][0]["rows"] for run in runs), strict=True):
        table.rows.append([rows[0][0], *(f"{median} ({least})" for _, median, _, least in rows)])
    return table


def ikbo_overview() -> Table:
    """The linear layer over users and candidates on the H200: the paper's shape, and the least of sweeps."""
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
    """Of the points of a sweep; None where no run has it."""
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
    "fused": fused_overview,
    "bag": bag_overview,
    "dlrm": dlrm_overview,
    "host": host_overview,
    "ikbo": ikbo_overview,
    "attention": attention_overview,
}
