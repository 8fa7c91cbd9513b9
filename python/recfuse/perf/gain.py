"""The predicted gain of a swap."""

from __future__ import annotations

import math
from dataclasses import dataclass

from recfuse.perf.prediction import Prediction


@dataclass(frozen=True)
class Gain:
    """A model before and after a swap, predicted on one GPU.

    Attributes:
        before, after: the predictions.
    """

    before: Prediction
    after: Prediction

    @property
    def ratios(self) -> dict[str, float]:
        """The speedup of the swap, by regime."""
        after = self.after.regimes
        return {
            name: estimate.seconds / after[name].seconds
            for name, estimate in self.before.regimes.items()
            if name in after
        }

    def interval(self, regime: str) -> tuple[float, float]:
        """Return an 80 % interval of the ratio, assuming independent errors of both predictions."""
        spreads = [
            math.log(prediction.regimes[regime].high / prediction.regimes[regime].seconds)
            for prediction in (self.before, self.after)
        ]
        half = math.exp(math.hypot(*spreads))
        return self.ratios[regime] / half, self.ratios[regime] * half

    def __str__(self) -> str:
        """Format a line per regime."""
        lines = [f"predicted on {self.after.gpu}:"]
        for name, ratio in self.ratios.items():
            low, high = self.interval(name)
            us = [1e6 * prediction.regimes[name].seconds for prediction in (self.before, self.after)]
            times = f"{us[0]:,.0f} us to {us[1]:,.0f} us"
            lines.append(f"  {name:<9} {ratio:5.2f}x  80 %: {low:.2f}x to {high:.2f}x  {times}")
        return "\n".join(lines)
