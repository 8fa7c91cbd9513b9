"""Embedding columns, from raw values to pooled rows."""

from __future__ import annotations

from collections.abc import Callable

from common.plots import Draw, Panels
from common.results import find_table
from drawings.panels import RESULTS_PATH, by_columns, picture

MICRO, MODELS = "embedding_columns_micro.json", "embedding_columns.json"
GPU = "h200/embedding_columns.json"
OVER = {
    "times faster": "torch's best, column by column",
    "over similar columns joined": "similar columns joined by hand",
}
SETTING = (
    "Axes: columns on the left, samples of a batch elsewhere. Joined by hand: the author of the model writes "
    "one operator for all columns of a kind."
)


def _over_torch(micro: str, models: str) -> Callable[[], Panels]:
    """Equal columns by their number, and the models by batch."""
    tables = {
        "bucketize columns, batch 256": (micro, "bucketize columns, 101 x 8 tables, batch 256: recfuse"),
        "model E": (models, "E, columns: recfuse"),
        "model F": (models, "F, columns: recfuse"),
    }
    return lambda: {title: by_columns(find_table(*table), OVER) for title, table in tables.items()}


COLUMNS: dict[str, Draw] = {
    f"{RESULTS_PATH}/embedding_columns.png": picture(
        MODELS,
        "Embedding columns on two cores: times faster than torch",
        _over_torch(MICRO, MODELS),
        words=SETTING,
        columns=3,
    ),
    f"{RESULTS_PATH}/{GPU.removesuffix('json')}png": picture(
        GPU,
        "Embedding columns on one H200, CUDA graphs: times faster than torch",
        _over_torch(GPU, GPU),
        words=f"{SETTING} Compiled torch is not among torch's forms here.",
        logarithmic=True,
        columns=3,
    ),
}
