"""Many tables in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from common.plots import Draw, Panels
from common.results import RESULTS, find_table, read_runs
from drawings.panels import RESULTS_PATH, by_columns, picture, renamed, table_of, value

FOLDER = "h200/fused_embedding_bag"
MODELS, PEERS, EQUAL = (f"{FOLDER}/fused_{name}.json" for name in ("models", "peers", "equal_skewed"))
ABLATIONS, MUTATIONS = f"{FOLDER}/fused_ablations.json", f"{FOLDER}/fused_12.json"
SETTING = "Models A to E of RecFlex (750 to 1,200 features), CUDA graphs."
PEERS_OF = ("fbgemm v1", "fbgemm v2")
OVER = {f"over {peer}": f"over {peer}" for peer in PEERS_OF}
TUNED = "recfuse tuned"


def _over_fbgemm(file: str, title: str, number: int = 1, shorter: str = "") -> Callable[[], Panels]:
    """Returns how many times faster than FBGEMM's two kernels, untuned and tuned."""
    return lambda: {
        ours: renamed(by_columns(find_table(file, title, number), OVER, f" {ours}$"), shorter)
        for ours in ("recfuse", TUNED)
    }


def _sizes(kind: str) -> Callable[[], Panels]:
    table = table_of(MODELS, f"How many times faster, {kind}")
    return lambda: {
        ours: by_columns(table(), {f"{ours} over {peer}": f"over {peer}" for peer in PEERS_OF}, part=2)
        for ours in ("recfuse", TUNED)
    }


def _spent() -> Panels:
    """µs per batch of 512: peers, recfuse, and the time of a plain kernel for the same bytes."""
    series: dict[str, dict[str, float]] = {
        "nn.EmbeddingBag": {},
        "fbgemm v2": {},
        "recfuse": {},
        "gather or copy": {},
    }
    (run,), (peers,) = read_runs(RESULTS / MODELS), read_runs(RESULTS / PEERS)
    loop = {subject: result["us"]["torch"] for subject, result in peers["models"].items()}
    us = {subject: result["us"] for subject, result in run["models"].items()}
    limits = find_table(MODELS, "recfuse, float32")
    for row in limits.rows:
        cells = dict(zip(limits.columns, row, strict=True))
        if row[0].endswith(" 512") and row[1] == "recfuse" and row[0] in loop:
            model = row[0].removesuffix(" 512")
            series["nn.EmbeddingBag"][model] = loop[row[0]]
            series["fbgemm v2"][model] = us[row[0]]["fbgemm v2"]
            series["recfuse"][model] = us[row[0]]["recfuse"]
            series["gather or copy"][model] = max(
                value(cells[name]) or 0 for name in ("us at copy speed", "us of gather")
            )
    return {"": series}


def _features() -> Panels:
    table = find_table(MODELS, "Bytes of rows a second")
    times: dict[str, dict[str, float]] = {"fbgemm v2": {}, "recfuse": {}}
    for row in table.rows:
        if row[2] in times:
            times[row[2]][f"{row[0]}: {row[1]} features"] = value(row[3]) or 0.0
    return {"": times}


def _occupancy() -> Panels:
    table = find_table(ABLATIONS, "Occupancy")
    occupancy: dict[str, dict[str, dict[str, float]]] = {"recfuse": {}, TUNED: {}}
    for row in table.rows:
        whole = value(row[-1]) or 0.0
        occupancy[row[1]][row[0]] = {
            warps: whole / us
            for warps, cell in zip(table.columns[2:-1], row[2:-1], strict=True)
            if (us := value(cell)) is not None
        }
    return occupancy


def _mutations() -> Panels:
    (run,) = read_runs(RESULTS / MUTATIONS)
    dims = {row[0]: row[1] for row in find_table(MUTATIONS, "Figure 12").rows}
    return {
        "": {
            f"feature {feature} (dim {dims[feature]})": _ranked(times) for feature, times in run["12"].items()
        }
    }


def _ranked(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Speed against the tuned schedule's, the fastest first."""
    return {str(rank): times["s"][0] / each for rank, each in enumerate(sorted(times["s"]))}


def _blocks() -> Panels:
    columns = {"over average": "over static, average", "over maximum": "over static, maximum"}
    table = find_table(ABLATIONS, "Figure 13")
    return {
        title: by_columns(table, columns, part=part)
        for part, title in ((1, "batches of the published sizes"), (2, "a request of 2,560"))
    }


def _stages() -> Panels:
    table = find_table(ABLATIONS, "Figure 11")
    return {"": by_columns(table, {"two-stage over separate": "recfuse tuned"})}


FUSED: dict[str, Draw] = {
    f"{RESULTS_PATH}/{FOLDER}/{name}.png": draw
    for name, draw in {
        "fused_us": picture(
            MODELS,
            "Models A to E: µs a batch, baselines nn.EmbeddingBag and FBGEMM",
            _spent,
            unit="µs a batch (log scale)",
            logarithmic=True,
            words="Batch 512, float32, CUDA graphs. Lower is better. nn.EmbeddingBag: in a loop. Gather "
            "or copy: the longer of a plain gather of the same rows and of a copy of the least bytes: the "
            "hardware's limit for rows that no cache holds.",
        ),
        "fused_models": picture(
            MODELS,
            "Models A to E: times faster than FBGEMM",
            _over_fbgemm(MODELS, "recfuse, float32"),
            words=f"{SETTING} float32. The number after a model is the batch.",
        ),
        "fused_sizes": picture(
            MODELS,
            "128 batches of the published sizes, float32: times faster than FBGEMM",
            _sizes("float32"),
            words=f"{SETTING} Geometric mean over single batches.",
        ),
        "fused_half": picture(
            MODELS,
            "float16 tables: times faster than FBGEMM",
            _over_fbgemm(MODELS, "recfuse, float16"),
            words=f"{SETTING} float16 tables and output. The number after a model is the batch.",
        ),
        "fused_half_sizes": picture(
            MODELS,
            "128 batches of the published sizes, float16: times faster than FBGEMM",
            _sizes("float16"),
            words=f"{SETTING} Geometric mean over single batches.",
        ),
        "fused_features": picture(
            MODELS,
            "A, D and F (ten thousand features): bytes of rows a second, FBGEMM v2 as baseline",
            _features,
            unit="TB/s of rows looked up",
            words="Batch 512, CUDA graphs.",
        ),
        "fused_equal": picture(
            EQUAL,
            "32 equal tables of 500,000 x 128: times faster than FBGEMM",
            _over_fbgemm(EQUAL, "recfuse, float32", 1, " 2048$"),
            words="Batch 2048 x 150 lookups in one launch, CUDA graphs.",
        ),
        "fused_skewed": picture(
            EQUAL,
            "Skewed lookups (zipf): times faster than FBGEMM",
            _over_fbgemm(EQUAL, "recfuse, float32", 2, r"-zipf1\.0"),
            words="Models D and E with zipf-distributed lookups, CUDA graphs; rows10: ten times the rows. "
            "The last number is the batch.",
        ),
        "fused_11": picture(
            ABLATIONS,
            "Figure 11, tuned in two stages: times faster than each feature tuned alone",
            _stages,
            words=SETTING,
        ),
        "fused_12": picture(
            MUTATIONS,
            "Figure 12, other schedules for one feature of model A: times faster than the tuned schedule",
            _mutations,
            unit="times faster",
            lines="schedules of the feature, the fastest first",
        ),
        "fused_13": picture(
            ABLATIONS,
            "Figure 13, blocks shared out for each batch: times faster than a static mapping",
            _blocks,
            words=SETTING,
        ),
        "fused_occupancy": picture(
            ABLATIONS,
            "Warps an SM: times faster than the default",
            _occupancy,
            unit="times faster",
            lines="warps an SM",
            words=f"{SETTING} Batch 512.",
        ),
    }.items()
}
