"""The performance model: predictions of steps, compared with steps that a device has run.

recorded   errors of predictions of recorded steps; needs no GPU
baselines  the same errors of other estimators; needs no GPU
calibrate  measures points and probes into --calibrate FILE: 180 s at most
measure    measures steps that the calibration has not seen into --measure FILE: 240 s at most

--recorded, --baselines, --calibrate FILE and --measure FILE select these figures. --recorded with both files
compares predictions of that calibration with those steps.
"""

from pathlib import Path

from common.registry import Benchmark
from common.settings import comma_list, positive

PARTS = ("held", "memory", "named", "random", "swaps", "limits", "sizes", "compiled")
"""Measurements, in their order."""

bench = Benchmark("performance_model", __doc__, ["figures"], device=None)
flag = bench.flag
# fmt: off
flag("--recorded", bool, text="the figure recorded")
flag("--baselines", bool, text="the figure baselines")
flag("--calibrate", Path, text="calibrate into a file; goes on with it", metavar="FILE")
flag("--measure", Path, text="measure held-out steps into a file", metavar="FILE")
flag("--seconds", float, text="the most that each takes (default: 180, 240)")
flag("--parts", comma_list, list(PARTS), "of the figure measure", allowed=PARTS, metavar="PARTS")
flag("--processes", positive, text="processes that trace before the measurement")
flag("--tiny", bool, text="few and small sizes: shows that it runs")
# fmt: on
