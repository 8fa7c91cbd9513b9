"""The header of a call: facts that all ranks of a group compare before they exchange lookups.

Every rank takes part in the exchange of headers, also a rank whose arguments are wrong, so that an error of a
rank is an error of every rank, and no rank waits for another.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from recfuse.errors import ArgumentValueError, IndexRangeError, OffsetError

# The largest number of counts of a module by group: headers of a group have one size, so that ranks that call
# different modules can say so. Every rank of a group shards the same modules, so that it has the same number.
_counts_of_groups: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
# The states of a header.
GOOD = 0
RAISED = 1
BAD_INDEX = 2
BAD_OFFSET = 3
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since 2.13
WEIGHT_DTYPES = (None, torch.float32, torch.float16, torch.bfloat16)


class Bad(NamedTuple):
    """The first bad index, or bad offset, of a batch. ``position`` is the place of an index in its bag."""

    feature: int = 0
    bag: int = 0
    position: int = 0
    value: int = 0


class Header(NamedTuple):
    """The facts of a rank's batch."""

    module: int  # number of the sharded module
    state: int = GOOD
    bags: int = 0
    with_gradients: int = 0
    weights: int = 0  # position in WEIGHT_DTYPES
    trains_weights: int = 0  # 1 if the weights require a gradient
    bad: Bad = Bad()
    counts: tuple[int, ...] = ()  # of lookups, as of `Counts`

    def flat(self, counts: int) -> list[int]:
        """Return the numbers of the header, with room for a number of counts."""
        return [*self[:6], *self.bad, *self.counts, *(0,) * (counts - len(self.counts))]

    @staticmethod
    def of(numbers: Sequence[int]) -> Header:
        """Return the header with these numbers."""
        return Header(*numbers[:6], Bad(*numbers[6:10]), tuple(numbers[10:]))


class Names(NamedTuple):
    """Names for errors."""

    module: str
    features: Sequence[str]
    rows: Sequence[int]  # of each feature's table


def enlarge_headers(counts: int, group: Any) -> None:
    """Make room for a number of counts in the headers of a group."""
    _counts_of_groups[group] = max(counts, _counts_of_groups.get(group, 0))


def exchange_headers(own: Header, group: Any, device: torch.device) -> list[Header]:
    """Return the headers of all ranks. Waits for all ranks, and for the device."""
    ranks = dist.get_world_size(group)
    numbers = torch.tensor(own.flat(_counts_of_groups[group]), dtype=torch.int64, device=device)
    gathered = torch.empty(ranks * len(numbers), dtype=torch.int64, device=device)
    _all_gather(gathered, numbers, group=group)
    return [Header.of(row) for row in gathered.view(ranks, -1).tolist()]


def check_headers(
    headers: Sequence[Header], rank: int, names: Names, error: Exception | None, group: Any
) -> None:
    """Raise on every rank if a rank has raised, or has given a batch of another form.

    ``error`` is the error of this rank, if it has raised.

    Raises:
        ValueError: ranks that call different modules, or differ in gradients or weights. IndexError: a bad
            index or offset. Other errors: those of a rank's arguments, which the rank itself raises.
    """
    where = f"recfuse.distributed: module {names.module!r}"
    first = headers[0]
    for number, header in enumerate(headers):
        if header.module != first.module:
            raise ArgumentValueError(
                f"{where}: rank {number} is in a call of sharded module {header.module}, rank 0 of "
                f"{first.module}; expected the same calls in the same order on every rank"
            )
    if any(header.state == RAISED for header in headers):
        _raise_first(headers, rank, where, error, group)
    for number, header in enumerate(headers):
        if header.state == BAD_INDEX:
            raise _bad_index(where, number, header.bad, names)
        if header.state == BAD_OFFSET:
            raise OffsetError(
                f"{where}: rank {number}: offset {header.bad.position} is {header.bad.value}; expected "
                "offsets that ascend from 0 to the number of indices"
            )
        if header.with_gradients != first.with_gradients:
            raise ArgumentValueError(
                f"{where}: rank {number} has gradients {_mode(header)}, rank 0 {_mode(first)}; expected the "
                "same torch.no_grad() on every rank"
            )
        if header.weights != first.weights:
            raise ArgumentValueError(
                f"{where}: rank {number} has per_sample_weights {WEIGHT_DTYPES[header.weights]}, rank 0 "
                f"{WEIGHT_DTYPES[first.weights]}; expected the same dtype, or None, on every rank"
            )
        if header.trains_weights != first.trains_weights:
            raise ArgumentValueError(
                f"{where}: rank {number} has per_sample_weights with requires_grad "
                f"{bool(header.trains_weights)}, rank 0 {bool(first.trains_weights)}; expected the same on "
                "every rank"
            )


def _mode(header: Header) -> str:
    return "enabled" if header.with_gradients else "disabled"


def _bad_index(where: str, rank: int, bad: Bad, names: Names) -> IndexRangeError:
    return IndexRangeError(
        f"{where}: rank {rank}: feature {names.features[bad.feature]!r}: bag {bad.bag}: "
        f"place {bad.position}: index is {bad.value}; expected [0, {names.rows[bad.feature]})"
    )


def _raise_first(
    headers: Sequence[Header], rank: int, where: str, error: Exception | None, group: Any
) -> NoReturn:
    """Gather the texts of the errors; raise the own error, or that of the first rank that has one."""
    texts: list[Any] = [None] * len(headers)
    own = None if error is None else f"{type(error).__name__}: {error}"
    dist.all_gather_object(texts, own, group=group)
    if error is not None:
        raise error
    number = next(at for at, text in enumerate(texts) if text is not None)
    raise ArgumentValueError(f"{where}: rank {number} has raised: {texts[number]}")
