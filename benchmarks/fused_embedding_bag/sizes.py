"""A stream of batches of the published sizes: each batch's time on the device, and ratios batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import geometric_mean
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from common.report import Figure, Panels
from common.table import Table, times
from fused_embedding_bag import bench
from fused_embedding_bag.candidates import (
    DEFAULT,
    HALF_OUTPUTS,
    ONE_WARP,
    SLOW,
    TUNED,
    V1,
    V2,
    make_runs,
)
from fused_embedding_bag.models import candidate_names, checked, figure_of_models
from fused_embedding_bag.setting import FusedSetting
from fused_embedding_bag.streams import Stream, time_stream

_MEANS = ("of_medians", "geometric_mean", "of_sums")  # of a model's batches


@bench.figure("sizes", on=["cuda"])
def figure_sizes(setting: FusedSetting) -> Figure:
    """Models over the test batches."""
    return figure_of_sizes(setting, torch.float32)


@bench.figure("half", on=["cuda"])
def figure_half(setting: FusedSetting) -> Iterator[Figure]:
    """Half tables: batches of one size, and the test batches."""
    yield figure_of_models(setting, setting.arguments.models, torch.float16)
    yield replace(figure_of_sizes(setting, torch.float16), name="half sizes")


def figure_of_sizes(setting: FusedSetting, dtype: torch.dtype) -> Figure:
    """Models A to E over the test batches."""
    arguments, notes, streams = setting.arguments, [], {}
    names = [name for name in candidate_names(arguments.candidates, dtype) if name not in SLOW]
    records: dict[str, Any] = {}
    for name in tqdm(arguments.models, desc="sizes", leave=False):
        subject = setting.subject(name)
        runs, more = make_runs(subject, names, dtype)
        # A usual size first, because the first call calibrates.
        runs, errors, further = checked(subject, runs, arguments.batch_sizes[0], dtype)
        notes += [*more, *further]
        streams[name] = time_stream(runs, subject.test_batches, subject.device, arguments.repeats)
        records[name] = {
            "sizes": [batch.size for batch in subject.test_batches],
            "lookups": [len(batch.indices) for batch in subject.test_batches],
            "relative_error": errors,
            "streams": {candidate: stream.to_json() for candidate, stream in streams[name].items()},
        }
    kind = (
        f"{str(dtype).removeprefix('torch.')} tables, {arguments.test_batches} batches of the published sizes"
    )
    tables, panels = _tables(streams, kind)
    tables[0].notes += dict.fromkeys(notes)
    for name, ratios in _ratios(streams).items():
        records[name]["ratios"] = ratios
    return Figure(tables, panels, records)


def _best(streams: dict[str, Stream], peer: str) -> Stream | None:
    """Returns the stream of a peer with the faster of its output types, by the sum over batches."""
    times = [streams[name] for name in (peer, peer + HALF_OUTPUTS) if name in streams]
    return min(times, key=lambda stream: stream.medians.sum(), default=None)


def _ratios(by_model: dict[str, dict[str, Stream]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns for each model: "CANDIDATE over PEER" -> ratios by batch, their mean, and the ratio of the
    sums."""
    ratios: dict[str, dict[str, dict[str, Any]]] = {}
    for model, streams in by_model.items():
        ratios[model] = {}
        for ours in (DEFAULT, TUNED):
            for peer in (V1, V2, ONE_WARP):
                best = _best(streams, peer)
                if ours not in streams or best is None:
                    continue
                each = best.medians / streams[ours].medians
                ratios[model][f"{ours} over {peer}"] = {
                    "each": each.tolist(),
                    "geometric_mean": geometric_mean(each.tolist()),
                    "least": float(each.min()),
                    "of_sums": float(best.medians.sum() / streams[ours].medians.sum()),
                    "of_medians": float(np.median(best.medians) / np.median(streams[ours].medians)),
                }
    return ratios


def _tables(by_model: dict[str, dict[str, Stream]], kind: str) -> tuple[list[Table], Panels]:
    """Times, and ratios."""
    names = list(dict.fromkeys(name for streams in by_model.values() for name in streams))
    spent = Table(f"us a batch on the device / ms of all as called, {kind}", ["model", *names])
    for model, streams in by_model.items():
        cells = [
            f"{np.median(streams[name].medians) * 1e6:.1f} / {np.median(streams[name].called_s) * 1e3:.1f}"
            if name in streams
            else "-"
            for name in names
        ]
        spent.rows.append([model, *cells])
    spent.notes = [
        "The median over batches of the median over repeats; batches follow one another without a pause,"
        " each between two events."
    ]
    ratios = _ratios(by_model)
    pairs = list(dict.fromkeys(pair for model_ratios in ratios.values() for pair in model_ratios))
    table = Table(f"How many times faster, {kind}", ["model", *pairs])
    for model, model_ratios in ratios.items():
        cells = [
            " / ".join(times(entry[key]) for key in _MEANS) + f" ({times(entry['least'])})"
            if (entry := model_ratios.get(pair))
            else "-"
            for pair in pairs
        ]
        table.rows.append([model, *cells])
    means = []
    for pair in pairs:
        values = [model_ratios[pair] for model_ratios in ratios.values() if pair in model_ratios]
        means.append(" / ".join(times(geometric_mean(entry[key] for entry in values)) for key in _MEANS))
    table.rows.append(["geometric mean", *means])
    table.notes = [
        "The ratio of the medians over batches / the geometric mean of the ratios of single batches / the"
        " ratio of sums (the least ratio of a batch)."
    ]
    panels = {
        kind: {
            pair: {
                model: model_ratios[pair]["geometric_mean"]
                for model, model_ratios in ratios.items()
                if pair in model_ratios
            }
            for pair in pairs
        }
    }
    return [spent, table], panels if pairs else {}
