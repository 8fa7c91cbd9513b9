"""The result of `recfuse.predict`."""

from __future__ import annotations

import html
import os
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from recfuse.perf.drawing import figure_of, write_trace
from recfuse.perf.models.regimes import Estimate, Timed
from recfuse.perf.tracing.operators import Operator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from recfuse.perf.calibration import Calibration

_WIDTH = 100
_ROWS = 12
_MOST_UNKNOWN = 0.05


@dataclass(frozen=True)
class Prediction:
    """Predicted time and memory of a step. Prints as a table; notebooks show it as a table.

    Attributes:
        gpu: the device.
        torch: minor version of torch of the calibration.
        training: whether the step trains.
        eager, compiled, graph: time of a step in each regime, with its 80 % interval; None if the device does
            not have the regime.
        active: time of the kernels of an eager step.
        host: time of the host for an eager step.
        kernels: number of kernels of an eager step.
        peak_bytes: the largest device memory of a step, with weights, states of optimizers and inputs.
        resident_bytes: the part of the peak that weights, states and inputs take.
        memory_bytes: memory of the device; 0: unknown.
        times: the operators with their times.
        notes: differences from the calibration, and unknown inputs.
        calibration: the calibration, with the measured points of this step.
        measured: the measured points of this step alone; None: it was not measured.

    Example:
        >>> table = recfuse.nn.EmbeddingBag(1000, 16, mode="sum")
        >>> prediction = recfuse.predict(table, torch.randint(1000, (64, 5)), gpu="H100")
        >>> prediction.gpu, prediction.fits
        ('H100', True)
    """

    gpu: str
    torch: str
    training: bool
    eager: Estimate
    compiled: Estimate | None
    graph: Estimate | None
    active: Estimate
    host: float
    kernels: float
    peak_bytes: int
    resident_bytes: int
    memory_bytes: int = 0
    times: Sequence[Timed] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()
    calibration: Calibration | None = field(default=None, repr=False)
    measured: Calibration | None = field(default=None, repr=False)

    @property
    def regimes(self) -> dict[str, Estimate]:
        """The regimes by name."""
        named = {"eager": self.eager, "compiled": self.compiled, "graph": self.graph}
        return {name: estimate for name, estimate in named.items() if estimate is not None}

    @property
    def fastest(self) -> str:
        """Name of the fastest regime."""
        regimes = self.regimes
        return min(regimes, key=lambda name: regimes[name].seconds)

    @property
    def bound(self) -> str:
        """The limit of an eager step, "host" or "device"."""
        return "host" if self.host > self.active.seconds else "device"

    @property
    def fits(self) -> bool:
        """True if the peak fits in the device's memory, or if that memory is unknown."""
        return not self.memory_bytes or self.peak_bytes <= self.memory_bytes

    @property
    def operators(self) -> list[Operator]:
        """The operators in their order."""
        return [timed.operator for timed in self.times]

    def by_kind(self) -> dict[str, tuple[int, float]]:
        """Return calls and seconds of the kernels of each kind, the longest first.

        Returns:
            dict: for each kind the number of calls and the seconds.
        """
        totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        for timed in self.times:
            if timed.operator.kind is not None:
                totals[timed.operator.kind][0] += 1
                totals[timed.operator.kind][1] += timed.kernel.us * 1e-6
        ordered = sorted(totals.items(), key=lambda item: -item[1][1])
        return {kind: (int(calls), seconds) for kind, (calls, seconds) in ordered}

    @property
    def unknown_share(self) -> float:
        """The share of the kernels' time that belongs to kinds without points."""
        total = sum(timed.kernel.us for timed in self.times)
        return (
            sum(timed.kernel.us for timed in self.times if not timed.kernel.known) / total if total else 0.0
        )

    def to_json(self, operators: bool = False) -> dict[str, Any]:
        """Return plain JSON values.

        Args:
            operators: include a list of the operators.
        """

        def interval(estimate: Estimate | None) -> list[float] | None:
            return None if estimate is None else [estimate.seconds, estimate.low, estimate.high]

        record: dict[str, Any] = {
            "gpu": self.gpu, "torch": self.torch, "training": self.training,
            "seconds": {name: interval(estimate) for name, estimate in self.regimes.items()},
            "active_seconds": interval(self.active), "host_seconds": self.host, "kernels": self.kernels,
            "bound": self.bound, "fastest": self.fastest, "peak_bytes": self.peak_bytes,
            "resident_bytes": self.resident_bytes, "unknown_share": self.unknown_share,
            "notes": list(self.notes),
            "kinds": {kind: {"calls": calls, "seconds": us} for kind, (calls, us) in self.by_kind().items()},
        }  # fmt: skip
        if operators:
            record["operators"] = [
                {"name": timed.operator.name, "phase": timed.operator.phase, "kind": timed.operator.kind,
                 "sizes": list(timed.operator.sizes), "us": timed.kernel.us, "host_us": timed.host_us}
                for timed in self.times
            ]  # fmt: skip
        return record

    def plot(self) -> Figure:
        """Draw the regimes and the kinds of kernels. Needs matplotlib (the extra ``bench``).

        Returns:
            Figure: matplotlib's figure.
        """
        return figure_of(
            self.gpu, self.regimes, {kind: seconds for kind, (_, seconds) in self.by_kind().items()}
        )

    def save_trace(
        self,
        path: str | os.PathLike[str],
        recorded: str | os.PathLike[str] | None = None,
        *,
        beside: str | os.PathLike[str] | None = None,
    ) -> None:
        """Write the eager step for Perfetto: a row for the host and a row for the device.

        Args:
            path: the file.
            recorded: a trace of torch.profiler, whose events are added to the file.
            beside: the deprecated name of ``recorded``.
        """
        if beside is not None:
            warnings.warn(
                'Prediction.save_trace: "beside" is a deprecated name. Use recorded.',
                DeprecationWarning,
                stacklevel=2,
            )
            recorded = beside
        write_trace(self.gpu, self.times, path, recorded)

    def _heads(self) -> list[str]:
        subject = "training step" if self.training else "inference"
        lines = [f"{subject} on {self.gpu}, calibrated with torch {self.torch}"]
        for name, estimate in self.regimes.items():
            mark = "  fastest" if len(self.regimes) > 1 and name == self.fastest else ""
            lines.append(
                f"  {name:<9} {_time(estimate.seconds):>9}  "
                f"80 %: {_time(estimate.low)} to {_time(estimate.high)}{mark}"
            )
        lines.append(
            f"  kernels   {_time(self.active.seconds):>9}  {self.kernels:.0f} launches; "
            f"host {_time(self.host)}: an eager step is bound by the {self.bound}"
        )
        resident = f"{_bytes(self.resident_bytes)} weights, states and inputs"
        peak = f"  memory    {_bytes(self.peak_bytes):>9}  of it {resident}"
        if not self.fits:
            peak += f"; does not fit: {_bytes(self.peak_bytes - self.memory_bytes)} too much"
        return [*lines, peak]

    def __str__(self) -> str:
        """Format the regimes, then the slowest kinds; at most 100 columns."""
        lines = self._heads()
        total = max(self.active.seconds, 1e-12)
        lines.append(f"  {'kind':<32} {'calls':>6} {'time':>10} {'share':>7}")
        for kind, (calls, seconds) in list(self.by_kind().items())[:_ROWS]:
            lines.append(f"  {kind[:32]:<32} {calls:>6} {_time(seconds):>10} {100 * seconds / total:>6.1f}%")
        if len(self.by_kind()) > _ROWS:
            lines.append(f"  and {len(self.by_kind()) - _ROWS} more kinds")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(line[:_WIDTH] for line in lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.4g} us" if seconds < 1e-3 else f"{seconds * 1e3:.4g} ms"


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


def outside_note(times: Sequence[Timed]) -> str | None:
    """Return a note on the kinds with sizes outside the measured range, if they take at least 5 %
    of the time.
    """
    total = sum(timed.kernel.us for timed in times)
    outside: dict[str, float] = defaultdict(float)
    for timed in times:
        if not timed.kernel.inside:
            outside[str(timed.operator.kind)] += timed.kernel.us
    if not total or sum(outside.values()) < _MOST_UNKNOWN * total:
        return None
    return f"sizes beyond those measured: {', '.join(sorted(outside, key=lambda kind: -outside[kind])[:4])}"


def unknown_note(times: Sequence[Timed]) -> str | None:
    """Return a note on the kinds without points, if they take at least 5 % of the time."""
    total = sum(timed.kernel.us for timed in times)
    unknown: dict[str, float] = defaultdict(float)
    for timed in times:
        if not timed.kernel.known:
            unknown[timed.operator.name] += timed.kernel.us
    if not total or sum(unknown.values()) < _MOST_UNKNOWN * total:
        return None
    names = ", ".join(sorted(unknown, key=lambda name: -unknown[name])[:4])
    share = 100 * sum(unknown.values()) / total
    return f"{share:.0f} % of the time is of operators that were not measured: {names}"
