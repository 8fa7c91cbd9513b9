"""Steps and hashes of the values of columns, in plain PyTorch; see ``reference``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recfuse.errors import ArgumentTypeError
from recfuse.nn.columns.steps import (
    LEAST,
    MOST,
    Affine,
    Cast,
    Clip,
    ClipInteger,
    Modulo,
    Step,
    ToBucket,
    ToHash,
    ToWord,
)

# ---- the hash: XXH64 (specification of xxHash) of one or two integers, in int64 that wrap around

_PRIMES = (
    0x9E3779B185EBCA87 - 2**64,
    0xC2B2AE3D27D4EB4F - 2**64,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63 - 2**64,
    0x27D4EB2F165667C5,
)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift to the right, as an unsigned integer."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _rotated(bits: Tensor, by: int) -> Tensor:
    return (bits << by) | _shifted(bits, 64 - by)


def hash_integers(words: Sequence[Tensor], seed: int) -> Tensor:
    """Return XXH64 of the bytes of 1 to 3 int64, low byte first, as the bits of an int64."""
    start = (seed + _PRIMES[4] + 8 * len(words)) % 2**64
    hashed = torch.full_like(words[0], start - 2**64 if start >= 2**63 else start)
    for word in words:
        hashed = hashed ^ (_rotated(word * _PRIMES[1], 31) * _PRIMES[0])
        hashed = _rotated(hashed, 27) * _PRIMES[0] + _PRIMES[3]
    hashed = (hashed ^ _shifted(hashed, 33)) * _PRIMES[1]
    hashed = (hashed ^ _shifted(hashed, 29)) * _PRIMES[2]
    return hashed ^ _shifted(hashed, 32)


def scaled(bits: Tensor, buckets: int) -> Tensor:
    """Return the high half of the product of an unsigned 64-bit integer and ``buckets``, below 2^31."""
    high, low = _shifted(bits, 32), bits & 0xFFFFFFFF
    return (high * buckets + ((low * buckets) >> 32)) >> 32


# ---- steps


def stepped(step: Step, values: Tensor) -> Tensor:
    """Return the result of a step on values, float32 or int64.

    Raises:
        TypeError: the values are floats, and the step takes integers.
    """
    if isinstance(step, (ClipInteger, Modulo, ToHash, ToWord)):
        if values.is_floating_point():
            raise ArgumentTypeError(f"step {step.kind} takes integers, not floats. Put a Cast before it.")
        return _integers(step, values)
    if isinstance(step, Cast):
        return _cast(values)
    floats = values.to(torch.float32)
    if isinstance(step, Affine):
        scale, offset = torch.tensor([step.scale, step.offset], dtype=torch.float32, device=values.device)
        return floats * scale + offset
    if isinstance(step, Clip):
        least, most = step.bounds()
        return torch.clamp(floats, least, most)
    if isinstance(step, ToBucket):
        boundaries = torch.from_numpy(step.float32).to(values.device)
        return torch.bucketize(floats, boundaries, right=step.right)
    return torch.log1p(floats.double()).float()


def _integers(step: Step, values: Tensor) -> Tensor:
    if isinstance(step, ClipInteger):
        least, most = step.bounds()
        return values.clamp(min=least).clamp(max=most)
    if isinstance(step, Modulo):
        return torch.remainder(values, step.divisor)
    if isinstance(step, ToHash):
        return scaled(hash_integers([values], step.seed), step.num_buckets)
    words = torch.from_numpy(step.int64).to(values.device)  # type: ignore[attr-defined]
    if words.numel() == 0:
        return torch.full_like(values, -1)
    rising, places = words.sort()
    at = torch.searchsorted(rising, values).clamp(max=words.numel() - 1)
    return torch.where(rising[at] == values, places[at], -1)


def _cast(values: Tensor) -> Tensor:
    if not values.is_floating_point():
        return values
    inside = (values >= -(2.0**63)) & (values < 2.0**63)
    cast = torch.where(inside, values, 0.0).to(torch.int64)
    return torch.where(inside, cast, torch.where(values >= 2.0**63, MOST, LEAST))
