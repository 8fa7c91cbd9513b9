"""One table, the whole DLRM, and training."""

from __future__ import annotations

from pathlib import Path

from common.plots import Draw, drawn, finish, machine
from common.results import RESULTS, find_table, read_runs
from drawings.panels import RESULTS_PATH, by_columns, by_rows, over, picture, value

MAIN, FIGURES, DLRM = "h200/embedding_bag.json", "h200/embedding_bag_figures.json", "h200/dlrm.json"
SETTING = "500,000 x 128 float32, batch 2048 x 150 lookups, CUDA graphs."
PREFETCHING = (
    "RPF, SMPF, LMPF, L1DPF: rows prefetched into registers, shared memory, local memory, L1. "
    "OptMT: the best number of warps an SM. L2P: hot rows pinned in L2."
)
HOTNESS = ("one_item", "high", "medium", "low", "random")
STAGES = {"embeddings": "#dd7a1f", "interaction": "#7d5ba6", "top MLP": "#4a7fb5", "bottom MLP": "#2f4b7c"}
SIDES = ("nn.EmbeddingBag", "recfuse")


def _figure(number: int, title: str, words: str = PREFETCHING) -> Draw:
    """Schemes as bars over hotness or mixes, as times faster than torch."""
    panels = lambda: {"": by_rows(find_table(FIGURES, f"Figure {number}"), "^(?!torch)", part=2)}  # noqa: E731
    return picture(FIGURES, f"{title}: times faster than torch", panels, words=f"{SETTING} {words}")


def _lines(title: str, rows: str = r"^\d", number: int = 1) -> dict[str, dict[str, float]]:
    """Returns a line per level of hotness over the rows of a table."""
    columns = {hotness: hotness for hotness in HOTNESS}
    return by_columns(find_table(FIGURES, title, number), columns, rows, part=2)


def _main() -> dict[str, dict[str, dict[str, float]]]:
    columns = ("torch", "fbgemm v1", "fbgemm v2", "recfuse", "recfuse tuned", "recfuse fp16")
    table = find_table(MAIN, "us a table as a CUDA graph")
    return {"": over(by_columns(table, {name: name for name in columns}), "torch")}


def _stages(path: Path) -> None:
    """Each call as a stack of its stages, before and after the swap."""
    table = find_table(DLRM, "Stages")
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows if row[0] in HOTNESS}
    spent = {
        (hotness, side): {stage: value(rows[hotness][f"{stage}, {side}"]) or 0.0 for stage in STAGES}
        for hotness in HOTNESS
        for side in SIDES
    }
    with drawn(path, [[list(key), times] for key, times in spent.items()]) as plt:
        figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
        places = {key: number // 2 * 1.0 + number % 2 * 0.42 for number, key in enumerate(spent)}
        for key, times in spent.items():
            bottom = 0.0
            for stage, ms in times.items():
                axis.bar(places[key], ms, 0.38, bottom, color=STAGES[stage], label=stage)
                bottom += ms
            axis.text(places[key], bottom + 0.2, f"{bottom:.1f}", ha="center", fontsize=9)
        axis.set_xticks(
            list(places.values()),
            ["before" if side == SIDES[0] else "after" for _, side in places],
            fontsize=9,
        )
        for number, hotness in enumerate(HOTNESS):
            axis.text(
                number + 0.21,
                -0.15,
                hotness,
                ha="center",
                transform=axis.get_xaxis_transform(),
                fontweight="bold",
            )
        axis.grid(axis="x", visible=False)
        axis.set_ylabel("ms a batch")
        title = "A whole DLRM before recfuse.swap (nn.EmbeddingBag) and after it: ms by stage"
        note = f"{machine(read_runs(RESULTS / DLRM)[0]['environment'])} 250 tables of {SETTING}".replace(
            ", CUDA graphs", ""
        )
        finish(figure, title, note + " Five levels of hotness: from one row for all lookups to random rows.")


def _losses(path: Path) -> None:
    from training.convergence import plot

    (run,) = read_runs(RESULTS / "training_losses.json")
    plot(path, run["convergence"], machine(run["environment"]))


BAGS: dict[str, Draw] = {
    f"{RESULTS_PATH}/h200/main.png": picture(
        MAIN,
        "One table: times faster than torch",
        _main,
        words=f"{SETTING} 16 tables in turn. fp16: against torch's float32 table.",
    ),
    f"{RESULTS_PATH}/h200/figure_6.png": picture(
        FIGURES,
        "Figure 6, warps an SM: times faster than torch",
        lambda: {
            "no prefetching": _lines("Figure 6: warps an SM, no"),
            "recfuse's default": _lines("Figure 6: warps an SM, rec"),
        },
        words=SETTING,
        lines="warps an SM",
    ),
    f"{RESULTS_PATH}/h200/figure_9.png": picture(
        FIGURES,
        "Figure 9, rows ahead into shared memory (SMPF): times faster than torch",
        lambda: {"": _lines("Figure 9")},
        words=SETTING,
        lines="prefetch distance, rows",
    ),
    f"{RESULTS_PATH}/h200/figure_11.png": picture(
        FIGURES,
        "Figure 11, pooling factors and pinning: times faster than torch",
        lambda: {
            h: by_rows(find_table(FIGURES, f"Figure 11: pooling factors, {h}"), "^(?!torch)", part=2)
            for h in HOTNESS
        },
        words=f"{SETTING} Up to 30 MB pinned in L2, by a kernel before the lookup or beside the one before.",
        lines="pooling factor (lookups a bag)",
        columns=3,
    ),
    f"{RESULTS_PATH}/h200/figure_12.png": _figure(12, "Figure 12, schemes"),
    f"{RESULTS_PATH}/h200/figure_15.png": _figure(15, "Figure 15, where rows wait, at the best occupancy"),
    f"{RESULTS_PATH}/h200/figure_16.png": _figure(16, "Figure 16, where rows wait, and pinning"),
    f"{RESULTS_PATH}/h200/figure_17.png": _figure(17, "Figure 17, mixes of hotness over 40 tables"),
    f"{RESULTS_PATH}/h200/dlrm_stages.png": _stages,
    f"{RESULTS_PATH}/training_losses.png": _losses,
}
