"""Users and their candidates: the linear layer and attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from common.plots import Draw, Panels, machine
from common.results import RESULTS, find_table, read_runs
from common.roofline import plot
from drawings.panels import RESULTS_PATH, by_columns, by_rows, over, picture, renamed

LINEAR, ATTENTION = "h200/ikbo_linear", "h200/ikbo_attention"
IKBO = f"{LINEAR}/ikbo.json"
MAIN, SWEEPS = f"{ATTENTION}/main_bfloat16.json", f"{ATTENTION}/sweeps.json"
PAPER = "M 433, N 256, K 1178 + 866, CUDA graphs, back to back."
HEADS = "2,048 candidates, 2 heads of 128, bfloat16, CUDA graphs, back to back."
CONTESTANTS = (
    "^(packed cuDNN|varlen_attn|FA3 (batch|varlen|varlen joined)|Triton|recfuse( two calls| jagged)?)$"
)
BACK_TO_BACK = "CUDA graphs, back to back."
COPIED = "concatenated: users copied to candidates before the call."
EVEN = "FA3 batch, packed cuDNN: even groups alone."
GROUPS = "64+1: half of the users have one more."
RATE = "TFLOP/s"


def _over_torch(file: str, title: str) -> Callable[[], Panels]:
    """Returns how many times faster than torch's best form, in both types."""
    columns = {name: name for name in ("best torch", "recfuse", "Triton", "concatenated")}
    rows = "^(?!geo|least)"
    return lambda: {
        dtype: renamed(
            over(
                by_columns(find_table(file, f"{title}, {dtype}, back to back: us"), columns, rows),
                "best torch",
            ),
            r", K (\d+) \+ (\d+)",
            r"\n\1+\2",
        )
        for dtype in ("float16", "bfloat16")
    }


def _stages() -> Panels:
    modes = ("back to back", "with pauses")
    return {
        dtype: {
            mode: renamed(
                by_columns(
                    find_table(IKBO, f"Stages, {dtype}, {mode}"),
                    {"over broadcast + concat": mode},
                    "^(?!broadcast [+])",
                ),
                "path ",
            )[mode]
            for mode in modes
        }
        for dtype in ("float16", "bfloat16")
    }


def _rates(file: str, *titles: str, mode: str = "back to back") -> Callable[[], Panels]:
    """TFLOP/s of each contestant."""
    return lambda: {
        title.replace(", bfloat16", ""): by_rows(find_table(file, f"{title}, {mode}: TFLOP/s"), CONTESTANTS)
        for title in titles
    }


def _roofline(file: str, named: str, title: str) -> Draw:
    def draw(path: Path) -> None:
        (run,) = read_runs(RESULTS / file)
        plot(path, run["roofline"], named, title, machine(run["environment"]))

    return draw


def _named(file: str) -> str:
    """Returns the first shape of a run, whose points are labelled."""
    (run,) = read_runs(RESULTS / file)
    return next(iter(run["roofline"].values()))[0]["shape"]


CANDIDATES: dict[str, Draw] = {
    f"{RESULTS_PATH}/{LINEAR}/ikbo_main.png": picture(
        IKBO,
        "The paper's stages: times faster than broadcasting and concatenating",
        _stages,
        words=PAPER.split(", CUDA")[0] + ".",
    ),
    f"{RESULTS_PATH}/{LINEAR}/ikbo_batches.png": picture(
        IKBO,
        "Linear layer, batches: times faster than torch's best form",
        _over_torch(IKBO, "Batches"),
        words=f"Candidates on the axis. {PAPER} {COPIED}",
    ),
    f"{RESULTS_PATH}/{LINEAR}/ikbo_ratios.png": picture(
        IKBO,
        "Linear layer, candidates a user: times faster than torch's best form",
        _over_torch(IKBO, "Ratios"),
        words=f"Candidates a user on the axis. {PAPER} {COPIED}",
    ),
    f"{RESULTS_PATH}/{LINEAR}/ikbo_shapes.png": picture(
        IKBO,
        "Linear layer, other shapes: times faster than torch's best form",
        _over_torch(IKBO, "Shapes"),
        words=f"M x N, K of users + candidates; 1,024 candidates of 15 users. {BACK_TO_BACK} {COPIED}",
        columns=1,
    ),
    f"{RESULTS_PATH}/{LINEAR}/ikbo_roofline.png": lambda path: _roofline(
        IKBO, _named(IKBO), "Linear layer, every measured shape: TFLOP/s, torch's best form as baseline"
    )(path),
    f"{RESULTS_PATH}/{ATTENTION}/attention_main.png": picture(
        MAIN,
        "Attention over histories: TFLOP/s, FlashAttention-3 as baseline",
        _rates(MAIN, "64 candidates a user, bfloat16", "64+1 candidates a user, bfloat16"),
        unit=RATE,
        words=f"Length of histories on the axis. {HEADS} {GROUPS} {EVEN}",
    ),
    f"{RESULTS_PATH}/{ATTENTION}/attention_ratios.png": picture(
        SWEEPS,
        "Attention, candidates a user: TFLOP/s, FlashAttention-3 as baseline",
        _rates(SWEEPS, "Ratios, kv 1024, bfloat16"),
        unit=RATE,
        words=f"Candidates a user on the axis. {HEADS} {GROUPS} {EVEN}",
    ),
    f"{RESULTS_PATH}/{ATTENTION}/attention_queries.png": picture(
        SWEEPS,
        "Attention, queries a candidate: TFLOP/s, FlashAttention-3 as baseline",
        _rates(
            SWEEPS,
            *(
                f"Queries, kv {kv}, {users} candidates a user, bfloat16"
                for kv in (1024, 4096)
                for users in ("64", "64+1")
            ),
        ),
        unit=RATE,
        words=f"Queries a candidate on the axis. {HEADS} {GROUPS}",
    ),
    f"{RESULTS_PATH}/{ATTENTION}/attention_ragged.png": picture(
        SWEEPS,
        "Attention, ragged histories: TFLOP/s, FlashAttention-3 as baseline",
        _rates(SWEEPS, "Ragged kv, all of it, bfloat16", "Ragged kv, 50 to 100 %, bfloat16"),
        unit=RATE,
        words=f"Length of the longest history on the axis; a bar that is missing was not measured. {HEADS}",
    ),
    f"{RESULTS_PATH}/{ATTENTION}/attention_self.png": picture(
        SWEEPS,
        "Self and target attention: TFLOP/s, FlashAttention-3 as baseline",
        _rates(SWEEPS, "Self and target, bfloat16"),
        unit=RATE,
        words=f"Length of histories on the axis. {HEADS} joined: queries joined before the call.",
    ),
    f"{RESULTS_PATH}/{ATTENTION}/attention_roofline.png": lambda path: _roofline(
        SWEEPS,
        "2048 candidates, 64 a user, q 64, kv 1024, H 2, D 128",
        "Attention, every measured shape: TFLOP/s, best peer as baseline",
    )(path),
}
