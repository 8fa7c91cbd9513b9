"""Calibrate a device, measure steps that the calibration has not seen, and compare predictions with them.

python benchmarks/performance_model.py --recorded          compares with recorded steps, without a GPU
python benchmarks/performance_model.py --baselines         the same errors of other estimators, without a GPU
python benchmarks/performance_model.py --calibrate FILE    measures points and probes: 180 s at most
python benchmarks/performance_model.py --measure FILE      measures held-out steps: 240 s at most
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from performance_model import baselines, recorded
from performance_model.live import PARTS, Recorder
from performance_model.traces import Traces
from recfuse.perf.calibrating.run import Calibrator
from recfuse.perf.choosing import Chosen


def main() -> None:
    """Runs the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=("cpu", "cuda"))
    parser.add_argument(
        "--calibrate", metavar="FILE", type=Path, help="calibrate into a file; goes on with it"
    )
    parser.add_argument("--measure", metavar="FILE", type=Path, help="measure held-out steps into a file")
    parser.add_argument("--recorded", action="store_true", help="print the errors of recorded steps")
    parser.add_argument(
        "--baselines", action="store_true", help="print the errors of other estimators on recorded steps"
    )
    parser.add_argument("--seconds", type=float, help="the most that each takes (default: 180, 240)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what --measure measures")
    parser.add_argument("--processes", type=int, default=0, help="processes that trace before --measure")
    parser.add_argument("--tiny", action="store_true", help="few and small sizes: shows that it runs")
    arguments = parser.parse_args()
    if arguments.recorded:
        print(recorded.table(recorded.errors(recorded.read(), Chosen(recorded.calibration()))))
    if arguments.baselines:
        print(recorded.table(baselines.errors(recorded.read(), Chosen(recorded.calibration()))))
    if arguments.calibrate:
        seconds = arguments.seconds or 180.0
        calibration = Calibrator(arguments.device, arguments.calibrate, arguments.tiny, seconds).run()
        print(
            f"{calibration!r}, groups {', '.join(calibration.groups)}; {calibration.facts.get('seconds')} s"
        )
    if arguments.measure:
        ahead, seconds = Traces(arguments.processes), arguments.seconds or 240.0
        recorder = Recorder(arguments.device, arguments.measure, seconds, arguments.tiny, ahead)
        ahead.submit(recorder.jobs(arguments.parts))
        ahead.wait(0.25 * seconds)
        recorder.run(arguments.parts)
        counts = {name: len(value) for name, value in recorder.record.items() if isinstance(value, list)}
        print(f"{counts}, {sum(map(len, recorder.record['held'].values()))} kernels held out")
        for what, error in recorder.record["errors"]:
            print(f"{what}: {error}")


if __name__ == "__main__":
    main()
