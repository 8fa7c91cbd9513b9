"""Arguments that are numbers or tensors: checks with errors that name them, and copies to a GPU."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recfuse._storage import check_storages
from recfuse.errors import ArgumentTypeError, ArgumentValueError, a_type

_SHOWN_DIGITS = 40


def integer(prefix: str, value: Any, least: int, most: int) -> int:
    """Return a whole number from `least` to `most` as an int; `prefix` names it, as in "traces: rows".

    Raises:
        TypeError: no whole number. ValueError: a number outside of the bounds.
    """
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ArgumentTypeError(f"{prefix} is {a_type(value)}; expected a whole number")
    if not least <= number <= most:
        shown = str(number) if abs(number) < 10**_SHOWN_DIGITS else f"over {_SHOWN_DIGITS} digits long"
        raise ArgumentValueError(f"{prefix} is {shown}; expected [{_text(least)}, {_text(most)}]")
    return number


def real(prefix: str, value: Any) -> float:
    """Return a number as a float, including NaN and infinities.

    Raises:
        TypeError: no number.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ArgumentTypeError(f"{prefix} is {a_type(value)}; expected a number")
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def wrong_type(prefix: str, value: Any, needed: str) -> ArgumentTypeError:
    """Return the error for a value of a wrong type; `prefix` names the value."""
    return ArgumentTypeError(f"{prefix} is {a_type(value)}; expected {needed}")


def row_indices(prefix: str, values: Any) -> NDArray[np.integer]:
    """Return a one-dimensional array of integers.

    Raises:
        TypeError: other values. ValueError: another number of dimensions.
    """
    check_storages(*prefix.rsplit(": ", 1), (values,))
    rows = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if rows.ndim == 0:
        raise ArgumentTypeError(f"{prefix} is {a_type(values)}; expected an array of integers")
    if rows.ndim != 1:
        raise ArgumentValueError(f"{prefix} has the shape {rows.shape}; expected one dimension")
    if rows.size and rows.dtype.kind not in "iu":
        raise ArgumentTypeError(f"{prefix} is of {rows.dtype}; expected integers")
    return rows if rows.dtype.kind in "iu" else rows.astype(np.int64)


def path_of(path: Any, function: str) -> str:
    """Return the path of a file; raise TypeError or ValueError for values that are no path."""
    try:
        name = os.fsdecode(path)
    except TypeError as error:
        raise ArgumentTypeError(
            f"{function}: path is {a_type(path)}; expected a str or an os.PathLike"
        ) from error
    if "\0" in name:
        raise ArgumentValueError(f"{function}: path {name[:100]!r} has a NUL character")
    return name


def _text(bound: int) -> str:
    """Return a bound as text: large bounds as 2^64 - 1, others in digits."""
    return f"2^{bound.bit_length()} - 1" if bound > 2**53 and bound & (bound + 1) == 0 else str(bound)


# Memory from which a captured graph copies in each replay.
_captured: list[Tensor] = []


def integers_on(values: Sequence[int], device: torch.device) -> Tensor:
    """Return int64 ``[len(values)]`` on a device, without a wait for the device."""
    if device.type != "cuda" or torch.compiler.is_compiling() or not torch.cuda.is_initialized():
        return torch.tensor(values, dtype=torch.int64, device=device)
    pinned = torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=True)
    if torch.cuda.is_current_stream_capturing():
        _captured.append(pinned)
    return pinned.to(device, non_blocking=True)
