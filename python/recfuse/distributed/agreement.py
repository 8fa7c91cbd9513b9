"""The agreement of ranks before they shard: one gather of a description, and an error on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from recfuse.errors import ArgumentValueError

Description = list[tuple[str, str]]


def agree(own: Description, error: Exception | None, group: Any, where: str) -> None:
    """Compare the descriptions of all ranks; a collective call.

    ``error`` is the error of this rank, if it has raised before; every rank then raises.

    Raises:
        ValueError: the first difference, with the rank; or the error of a rank.
    """
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(
        found, (own, None if error is None else f"{type(error).__name__}: {error}"), group=group
    )
    if error is not None:
        raise error
    for rank, (_, text) in enumerate(found):
        if text is not None:
            raise ArgumentValueError(f"{where}: rank {rank} has raised: {text}")
    first = found[0][0]
    for rank, (other, _) in enumerate(found[1:], 1):
        if (difference := _first_difference(first, other)) is not None:
            name, expected, value = difference
            raise ArgumentValueError(
                f"{where}: rank {rank} has {name} {value}, rank 0 has {expected}; expected the same on every "
                "rank"
            )


def _first_difference(first: Sequence[Any], other: Sequence[Any]) -> tuple[str, str, str] | None:
    for (name, value), (other_name, other_value) in zip(first, other, strict=False):
        if name != other_name:
            return "as next fact", f"{name} ({value})", f"{other_name} ({other_value})"
        if value != other_value:
            return name, value, other_value
    if len(first) != len(other):
        return "a number of facts", str(len(first)), str(len(other))
    return None


def generator_state(device: torch.device) -> str:
    """Return a text of the state of the generator that draws new tables on a device."""
    state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    return hashlib.sha256(state.numpy().tobytes()).hexdigest()[:16]
