"""Checks before timing: errors of outputs, and the end of a run that has a wrong output."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from common.settings import fail

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative to the largest value: float32 sums in another order, then one rounding to the output's type."""


def difference(output: Tensor, right: Tensor) -> Tensor:
    """Returns the largest difference, relative to the largest right value; NaN if any value is NaN."""
    return (output.double() - right).abs().max() / right.abs().max().clamp(min=1e-30)


def largest(differences: Iterable[Tensor]) -> float:
    """Returns the largest difference, or 0 without any. NaN if any is NaN: torch's max keeps it, Python's
    may lose it."""
    values = list(differences)
    return torch.stack(values).max().item() if values else 0.0


def relative_error(output: Tensor, right: Tensor) -> float:
    """`difference` as a number; infinite where shapes differ."""
    return difference(output, right).item() if output.shape == right.shape else float("inf")


def largest_difference(candidates: Mapping[str, Callable[[Any], Tensor]], batch: Any, baseline: str) -> float:
    """Largest difference of any candidate's output from the baseline's."""
    right = candidates[baseline](batch)
    return largest(difference(run(batch), right) for run in candidates.values())


def check_agreement(parser: argparse.ArgumentParser, differences: Sequence[float], allowed: float) -> None:
    """End the program with status 1 where a difference exceeds `allowed` or is not a number."""
    if not all(error <= allowed for error in differences):
        fail(parser, f"the outputs do not agree, since the largest difference above exceeds {allowed}")


def check_error(parser: argparse.ArgumentParser, name: str, error: float, allowed: float) -> None:
    """End the program with status 1 where an output is wrong."""
    if not error <= allowed:
        message = f"{name}: the outputs differ from sums in float64 by {error:.1e}, allowed {allowed:.0e}"
        fail(parser, message)


def left_out(label: str, name: str, error: Exception) -> str:
    """Returns a note on a peer that does not run on this machine; raises if recfuse does not run."""
    if name.startswith("recfuse"):
        raise error
    return f"{label}: {name} is left out: {str(error).partition(chr(10))[0]}"


def checked(
    parser: argparse.ArgumentParser,
    label: str,
    calls: Mapping[str, Callable[[], Any]],
    error_of: Callable[[str, Any], float],
    allowed: Callable[[str], float],
) -> tuple[dict[str, float], list[str]]:
    """Returns the error of each candidate that runs here, by name, and notes on the others.

    Ends the program with status 1 if an output is wrong.
    """
    errors, notes = {}, []
    for name, call in calls.items():
        try:
            output = call()
        except Exception as error:
            notes.append(left_out(label, name, error))
            continue
        errors[name] = error_of(name, output)
        check_error(parser, f"{label}, {name}", errors[name], allowed(name))
    return errors, notes
