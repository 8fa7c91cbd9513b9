"""Arguments that are numbers or tensors: checked, with errors that name them; and brought to a GPU."""

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


def integer(where: str, value: Any, least: int, most: int) -> int:
    """A whole number from `least` to `most`, as an int; `where` names it, as in "traces: rows".

    Raises:
        TypeError: no whole number. ValueError: one outside of the bounds.
    """
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ArgumentTypeError(f"{where} is {a_type(value)}, must be a whole number")
    if not least <= number <= most:
        shown = str(number) if abs(number) < 10**_SHOWN_DIGITS else f"over {_SHOWN_DIGITS} digits long"
        raise ArgumentValueError(f"{where} is {shown}, allowed is [{_text(least)}, {_text(most)}]")
    return number


def real(where: str, value: Any) -> float:
    """A number as a float, NaN and infinite ones too.

    Raises:
        TypeError: no number.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ArgumentTypeError(f"{where} is {a_type(value)}, must be a number")
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def wrong_type(where: str, value: Any, needed: str) -> ArgumentTypeError:
    """The error about a value, named by `where`, that is of another type than needed."""
    return ArgumentTypeError(f"{where} is {a_type(value)}, must be {needed}")


def row_indices(where: str, values: Any) -> NDArray[np.integer]:
    """A one-dimensional array of integers.

    Raises:
        TypeError: other values. ValueError: another number of dimensions.
    """
    check_storages(*where.rsplit(": ", 1), (values,))
    found = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if found.ndim == 0:
        raise ArgumentTypeError(f"{where} is {a_type(values)}, must be an array of integers")
    if found.ndim != 1:
        raise ArgumentValueError(f"{where} has the shape {found.shape}, must be one-dimensional")
    if found.size and found.dtype.kind not in "iu":
        raise ArgumentTypeError(f"{where} is of {found.dtype}, must be of integers")
    return found if found.dtype.kind in "iu" else found.astype(np.int64)


def path_of(path: Any, function: str) -> str:
    """The path of a file; TypeError, ValueError for what names none."""
    try:
        found = os.fsdecode(path)
    except TypeError as error:
        raise ArgumentTypeError(
            f"{function}: path is {a_type(path)}, must be a str or an os.PathLike"
        ) from error
    if "\0" in found:
        raise ArgumentValueError(f"{function}: path {found[:100]!r} has a NUL character")
    return found


def _text(bound: int) -> str:
    """2^64 - 1 as such, smaller ones in digits."""
    return f"2^{bound.bit_length()} - 1" if bound > 2**53 and bound & (bound + 1) == 0 else str(bound)


# What a captured graph copies from at each of its replays.
_captured: list[Tensor] = []


def integers_on(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 ``[len(values)]`` on a device, with no wait for it."""
    if device.type != "cuda" or torch.compiler.is_compiling() or not torch.cuda.is_initialized():
        return torch.tensor(values, dtype=torch.int64, device=device)
    pinned = torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=True)
    if torch.cuda.is_current_stream_capturing():
        _captured.append(pinned)
    return pinned.to(device, non_blocking=True)
