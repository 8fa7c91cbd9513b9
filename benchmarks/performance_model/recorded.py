"""Predictions against recorded measurements, without a GPU."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recfuse.perf.calibration import Calibration, available
from recfuse.perf.choosing import Chosen
from recfuse.perf.models.fusion import fuse
from recfuse.perf.predict import from_operators
from recfuse.perf.prediction import Prediction
from recfuse.perf.tracing.operators import Operator

RECORD = Path(__file__).with_name("recorded_h100.json.gz")
_SHORT_US = 5.0


def read() -> dict[str, Any]:
    """Return the record."""
    with gzip.open(RECORD, "rt") as file:
        return json.load(file)  # type: ignore[no-any-return]


def calibration() -> Calibration:
    """Return the shipped calibration of the record's GPU."""
    return Calibration.load(available()["H100", "2.11"])


def operators_of(listed: Iterable[Sequence[Any]]) -> list[Operator]:
    """Return operators of a record."""
    operators = []
    for name, phase, kind, sizes, *graph in listed:
        operator = Operator(name, phase, kind, tuple(sizes))
        if graph:
            operator.fusable, operator.reads, operator.writes = (
                bool(graph[0]),
                tuple(graph[1]),
                tuple(graph[2]),
            )
        operators.append(operator)
    return operators


def errors(record: Mapping[str, Any], chosen: Chosen) -> dict[str, list[float]]:
    """Returns relative errors, or 1 and 0 for right and wrong, by quantity."""
    errors_by_group: dict[str, list[float]] = defaultdict(list)
    _of_kernels(record, chosen, errors_by_group)
    for target in record["targets"]:
        _of_target(target, chosen, errors_by_group)
    for swap in record["swaps"]:
        _of_swap(swap, chosen, errors_by_group)
    for one in record.get("memory", ()):
        _of_memory(one, errors_by_group)
    for one in record.get("limits", ()):
        errors_by_group["largest batch under a latency"].append(one["us"] * 1e-6 / one["limit"] - 1)
        off = abs(one["us"] * 1e-6 / one["limit"] - 1)
        errors_by_group[f"latency within 8 % of its limit, {one['regime']}"].append(float(off <= 0.08))
    for one in record.get("sizes", ()):
        errors_by_group["active, own sizes measured"].append(
            one["predicted_active_us"] / one["active_us"] - 1
        )
        if "graph_us" in one:
            errors_by_group["graph, own sizes measured"].append(
                one["predicted_graph_us"] / one["graph_us"] - 1
            )
    for one in record["compiled"]:
        operators = operators_of(one["ops"])
        predicted = from_operators(operators, chosen, False, exact=False)
        assert predicted.compiled is not None
        errors_by_group["compiled step"].append(predicted.compiled.seconds * 1e6 / one["us"] - 1)
        kernels = sum(operator.kind is not None for operator in fuse(operators))
        errors_by_group["compiled kernels, number"].append(kernels / one["kernels"] - 1)
    return errors_by_group


def _of_kernels(record: Mapping[str, Any], chosen: Chosen, errors: dict[str, list[float]]) -> None:
    kernels = chosen.calibration.kernels
    for kind, rows in record["held"].items():
        for *sizes, us, _ in rows:
            predicted = kernels.time(Operator("", "inference", kind, tuple(sizes)), exact=False).us
            if us >= _SHORT_US:
                errors["kernels of 5 us and more"].append(predicted / us - 1)
            else:
                errors["shorter kernels within .5 us"].append(float(abs(predicted - us) <= 0.5))


def _of_target(target: Mapping[str, Any], chosen: Chosen, errors: dict[str, list[float]]) -> None:
    training = target["optimizer"] is not None
    predicted = from_operators(operators_of(target["ops"]), chosen, training, target["peak"], exact=False)
    is_named, dtype = not target["model"].startswith("random"), target["dtype"]
    group = ("named" if dtype == "float32" else f"named {dtype}") if is_named else f"random {dtype}"
    mode = "training" if training else "inference"
    label = group if target["optimizer"] in (None, "sgd") else "Adam, Adagrad"
    errors[f"active, {label}"].append(predicted.active.seconds * 1e6 / target["active_us"] - 1)
    errors[f"eager {mode}"].append(predicted.eager.seconds * 1e6 / target["us"] - 1)
    errors[f"eager {mode}: measured again"].append(target["again_us"] / target["us"] - 1)
    errors[f"eager {mode}: sum of kernels"].append(predicted.active.seconds * 1e6 / target["us"] - 1)
    _hold(errors, predicted, target)
    bound = "host" if target["us"] > 1.1 * target["active_us"] else "device"
    errors["host- or device-bound right"].append(float(predicted.bound == bound))
    if "active_again_us" in target:
        errors["active: measured again"].append(target["active_again_us"] / target["active_us"] - 1)
    if target.get("memory"):
        errors[f"peak memory, {mode}"].append(target["peak"] / target["memory"] - 1)
    if "graph_us" in target:
        assert predicted.graph is not None
        errors[f"graph, {group}"].append(predicted.graph.seconds * 1e6 / target["graph_us"] - 1)
        faster = (predicted.graph.seconds < predicted.eager.seconds) == (target["graph_us"] < target["us"])
        errors["faster of eager and graph right"].append(float(faster))


def _of_memory(one: Mapping[str, Any], errors: dict[str, list[float]]) -> None:
    gradients = "sparse" if one["sizes"]["sparse"] else "dense"
    optimizer = "SGD" if one["optimizer"] == "sgd" else "Adam"
    errors[f"peak memory, {gradients} gradients, {optimizer}"].append(one["peak"] / one["memory"] - 1)


def _hold(errors: dict[str, list[float]], predicted: Prediction, target: Mapping[str, Any]) -> None:
    for name, estimate, key in (("active", predicted.active, "active_us"), ("eager", predicted.eager, "us"),
                                ("graph", predicted.graph, "graph_us")):  # fmt: skip
        if key in target and estimate is not None:
            held = estimate.low <= target[key] * 1e-6 <= estimate.high
            errors[f"80 % intervals hold, {name}"].append(float(held))


def _of_swap(swap: Mapping[str, Any], chosen: Chosen, errors: dict[str, list[float]]) -> None:
    loop, swapped = (
        from_operators(operators_of(swap[form]["ops"]), chosen, False) for form in ("loop", "swapped")
    )
    for regime, key in (("eager", "us"), ("graph", "graph_us")):
        if key not in swap["loop"] or regime not in loop.regimes:
            continue
        predicted = loop.regimes[regime].seconds / swapped.regimes[regime].seconds
        measured = swap["loop"][key] / swap["swapped"][key]
        errors[f"swap gain, {regime}"].append(predicted / measured - 1)
        errors[f"swap faster or slower right, {regime}"].append(float((predicted > 1) == (measured > 1)))


def summary(values: Sequence[float], name: str) -> tuple[str, ...]:
    """Return name, number, and GMAE, MAPE, P90 and bias, or the share that is right, in percent."""
    if "right" in name or "hold" in name or "within" in name:
        return name, str(len(values)), f"{100 * np.mean(values):.0f} %", "", "", ""
    absolute = np.maximum(np.abs(np.array(values)), 1e-4)
    geometric = float(np.exp(np.log(absolute).mean()))
    numbers = (geometric, absolute.mean(), np.percentile(absolute, 90))
    return name, str(len(values)), *(f"{100 * one:.1f}" for one in numbers), f"{100 * np.mean(values):+.1f}"


COLUMNS = ("error of", "n", "GMAE, %", "MAPE, %", "P90, %", "bias, %")
"""Of a row of `summary`."""


def table(errors: Mapping[str, Sequence[float]]) -> str:
    """Return the errors as Markdown."""
    lines = [
        f"| {' | '.join(COLUMNS)} |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [f"| {' | '.join(summary(values, name))} |" for name, values in sorted(errors.items())]
    return "\n".join(lines)
