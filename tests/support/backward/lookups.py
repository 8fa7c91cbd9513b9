"""Lookups that tests of the backward's kernels have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def spoil(draw: np.random.Generator, bad: str, indices: NDArray[Any], offsets: NDArray[Any]) -> None:
    """Makes some of them bad, if "index" or "offset" is in `bad`."""
    if "index" in bad:
        wrong = draw.random(indices.size) < 0.1
        indices[wrong] = draw.choice([-1, 2**31 - 1, -(2**31), 10**6], int(wrong.sum()))
    if "offset" in bad:
        for place in draw.integers(0, offsets.size, 3):
            offsets[place] = draw.choice([-5, 2**30, offsets[place] + 20, offsets[place] - 20])
