"""Errors of predictions, from recorded steps; and measurements that are recorded."""

from __future__ import annotations

import argparse
import json

from common.report import Figure
from common.settings import Setting
from common.table import Table
from performance_model import baselines, bench, recorded
from performance_model.live import Recorder
from performance_model.traces import Traces
from recfuse.perf.calibrating.run import Calibrator
from recfuse.perf.calibration import Calibration
from recfuse.perf.choosing import Chosen

FILES = ("calibrate", "measure")
"""Figures that write a file of their own."""


@bench.check
def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Adds the figures that flags select."""
    selected = [name for name in (*FILES, "recorded", "baselines") if getattr(arguments, name)]
    named = [name for name in arguments.figures if name in arguments.named]
    if selected:
        arguments.figures = list(dict.fromkeys([*named, *selected]))
    for name in FILES:
        if name in arguments.figures and getattr(arguments, name) is None:
            parser.error(f"--{name} FILE is missing, which the figure {name} writes")


def figure_of_errors(title: str, errors: dict[str, list[float]]) -> Figure:
    """Returns the errors as a figure."""
    rows = [list(recorded.summary(values, name)) for name, values in sorted(errors.items())]
    return Figure([Table(title, recorded.COLUMNS, rows)], {}, errors)


@bench.figure("recorded")
def figure_recorded(setting: Setting) -> Figure:
    """Predictions of recfuse.predict; with --calibrate and --measure of the steps in these files."""
    record, calibration = recorded.read(), recorded.calibration()
    if setting.arguments.measure is not None and setting.arguments.calibrate is not None:
        record = json.loads(setting.arguments.measure.read_text())
        calibration = Calibration.load(setting.arguments.calibrate)
    errors = recorded.errors(record, Chosen(calibration))
    return figure_of_errors("Errors of predictions of recorded steps", errors)


@bench.figure("baselines", default=False)
def figure_baselines(setting: Setting) -> Figure:
    """Predictions of other estimators."""
    errors = baselines.errors(recorded.read(), Chosen(recorded.calibration()))
    return figure_of_errors("Errors of other estimators on recorded steps", errors)


@bench.figure("calibrate", default=None)
def figure_calibrate(setting: Setting) -> Figure:
    """A calibration of this device."""
    arguments = setting.arguments
    seconds = arguments.seconds or 180.0
    calibration = Calibrator(arguments.device, arguments.calibrate, is_tiny(setting), seconds).run()
    row = [repr(calibration), ", ".join(calibration.groups), str(calibration.facts.get("seconds"))]
    return Figure([Table("Calibration", ["calibration", "groups", "seconds"], [row])], {}, row)


@bench.figure("measure", default=None)
def figure_measure(setting: Setting) -> Figure:
    """Steps that the calibration has not seen."""
    arguments = setting.arguments
    ahead, seconds = Traces(arguments.processes or 0), arguments.seconds or 240.0
    recorder = Recorder(arguments.device, arguments.measure, seconds, is_tiny(setting), ahead)
    ahead.submit(recorder.jobs(arguments.parts))
    ahead.wait(0.25 * seconds)
    recorder.run(arguments.parts)
    counts = {name: len(value) for name, value in recorder.record.items() if isinstance(value, list)}
    counts["held"] = sum(map(len, recorder.record["held"].values()))
    rows = [[name, str(count)] for name, count in counts.items()]
    notes = [f"{job}: {error}" for job, error in recorder.record["errors"]]
    return Figure([Table("Measurements", ["kind", "number"], rows, notes)], {}, counts)


def is_tiny(setting: Setting) -> bool:
    """Few and small sizes."""
    return bool(setting.arguments.tiny or setting.arguments.quick)
