"""A target attention: its shape, least work, inputs in every form, and outputs in float64.

out[b] = softmax(q[b] . k[user(b)]^T / sqrt(dim)) . v[user(b)], per head
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

MAPPINGS = ("sorted", "shuffled")
# Bytes of inputs that are rotated through at least: several times a GPU's last-level cache.
_ROTATED_BYTES = 1 << 28
_MOST_INPUTS = 4
# Number of candidates and users whose outputs are computed in float64.
_CHECKED = 8


def group_bounds(group: str) -> tuple[int, int]:
    """Returns the least and the greatest number of candidates per user; ValueError for other texts.

    "64": 64 each; "64+1": half of the users have one more, in no order; "1..127": any number between.
    """
    if ".." in group:
        low, high = map(int, group.split(".."))
    else:
        low, more = map(int, group.split("+")) if "+" in group else (int(group), 0)
        high = low + more
    if not 1 <= low <= high:
        raise ValueError(f"found {group!r}; expected N, N+M or N..M with N of at least 1")
    return low, high


@dataclass(frozen=True)
class Shape:
    """Users with `group` candidates each, about `candidates` in total."""

    candidates: int = 2048
    group: str = "64+1"
    queries: int = 64
    kv: int = 1024
    heads: int = 2
    kv_heads: int = 2
    dim: int = 128
    least_kv: int = 100  # per cent of `kv` that the shortest history may have; 100: all have kv
    own: int = 0  # queries of a user's self-attention over the same keys

    @property
    def users(self) -> int:
        """At least one."""
        low, high = group_bounds(self.group)
        typical = (low + high) // 2 if ".." in self.group else low
        return max(1, self.candidates // typical)

    @cached_property
    def counts(self) -> list[int]:
        """Candidates of each user."""
        low, high = group_bounds(self.group)
        if ".." in self.group:
            chooser = random.Random(1)
            return [chooser.randint(low, high) for _ in range(self.users)]
        counts = [low + (high - low) * (number % 2) for number in range(self.users)]
        random.Random(1).shuffle(counts)
        return counts

    @cached_property
    def lengths(self) -> list[int]:
        """Keys of each user."""
        chooser = random.Random(2)
        least = max(1, self.kv * self.least_kv // 100)
        return [chooser.randint(least, self.kv) for _ in range(self.users)]

    @property
    def is_even(self) -> bool:
        """All users have equally many candidates and keys, as batch forms require."""
        return len(set(self.counts)) == 1 and not self.is_ragged

    @property
    def is_ragged(self) -> bool:
        """Histories have different lengths."""
        return self.least_kv < 100

    @property
    def flop(self) -> int:
        """Two products for each query, head and key, of existing keys only."""
        pairs = sum(
            (count * self.queries + self.own) * length
            for count, length in zip(self.counts, self.lengths, strict=True)
        )
        return 4 * self.heads * self.dim * pairs

    def least_bytes(self, dtype: torch.dtype) -> int:
        """Each query, key and value once, and the output."""
        rows = 2 * self.heads * (sum(self.counts) * self.queries + self.users * self.own)
        keys = 2 * self.kv_heads * sum(self.lengths)
        return dtype.itemsize * self.dim * (rows + keys) + 8 * sum(self.counts)

    def __str__(self) -> str:
        """Returns the form in titles."""
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads} over {self.kv_heads}"
        kv = f"{self.kv * self.least_kv // 100} to {self.kv}" if self.is_ragged else str(self.kv)
        own = f", {self.own} queries of the user" if self.own else ""
        return (
            f"{sum(self.counts)} candidates, {self.group} a user, q {self.queries}, kv {kv}, "
            f"H {heads}, D {self.dim}{own}"
        )


@dataclass
class Inputs:
    """A set of inputs, and the forms of them that other contestants produce outside of the timed region."""

    q: Tensor  # [candidates, queries, heads, dim]
    k: Tensor  # [users, kv, kv_heads, dim]
    v: Tensor
    cand_to_user: Tensor  # int64 [candidates]
    counts: Sequence[int]  # candidates of each user
    lengths: Sequence[int]  # keys of each user
    q_user: Tensor | None = None  # [users, own, heads, dim]

    @property
    def has_lengths(self) -> bool:
        """The lengths differ from the allotted length."""
        return min(self.lengths) < self.k.shape[1]

    @cached_property
    def kv_lengths(self) -> Tensor | None:
        """int64 [users]; None if every user has all keys."""
        return torch.tensor(self.lengths, device=self.q.device) if self.has_lengths else None

    @cached_property
    def order(self) -> Tensor | None:
        """Candidates ordered by user; None if they have that order."""
        users = self.cand_to_user
        return None if bool((users[1:] >= users[:-1]).all()) else users.argsort(stable=True)

    @cached_property
    def inverse(self) -> Tensor | None:
        """The position of each candidate in `order`."""
        return None if self.order is None else self.order.argsort()

    def grouped(self) -> Tensor:
        """Queries concatenated by user: [rows, heads, dim]. In a timed call: a copy if they are in another
        order."""
        return (self.q if self.order is None else self.q[self.order]).flatten(0, 1)

    def ungrouped(self, out: Tensor) -> Tensor:
        """Outputs of `grouped` rows by candidate."""
        out = out.view(self.q.shape)
        return out if self.inverse is None else out[self.inverse]

    @cached_property
    def cuts(self) -> Tensor:
        """int32 [users + 1]: where candidates of a user begin in that order."""
        return _cuts(self.counts, self.q.device)

    @cached_property
    def row_cuts(self) -> Tensor:
        """The same in rows of `grouped`."""
        return self.cuts * self.q.shape[1]

    @cached_property
    def key_cuts(self) -> Tensor:
        """int32 [users + 1]: where keys of a user begin in `jagged`."""
        return _cuts(self.lengths, self.q.device)

    @property
    def most_rows(self) -> int:
        """Most rows of any user."""
        return max(self.counts) * self.q.shape[1]

    @cached_property
    def jagged(self) -> tuple[Tensor, Tensor]:
        """Keys and values concatenated by user: [sum of lengths, kv_heads, dim]."""
        if not self.has_lengths:
            return self.k.flatten(0, 1), self.v.flatten(0, 1)
        is_valid = torch.arange(self.k.shape[1], device=self.q.device) < self.kv_lengths[:, None]
        return self.k[is_valid], self.v[is_valid]

    @cached_property
    def repeated(self) -> tuple[Tensor, Tensor]:
        """Keys and values once for each candidate."""
        return self.k[self.cand_to_user], self.v[self.cand_to_user]

    @cached_property
    def own(self) -> Inputs:
        """The users' self-attention as a target attention: one candidate a user."""
        users = torch.arange(len(self.k), device=self.q.device)
        own = Inputs(self.q_user, self.k, self.v, users, [1] * len(self.k), self.lengths)
        own.jagged, own.key_cuts = self.jagged, self.key_cuts
        return own

    @cached_property
    def joined(self) -> tuple[Tensor, Tensor, int]:
        """Queries of each user and of its candidates in one tensor; begins of the users; most rows of any
        user."""
        own, rows = self.q_user.shape[1], self.q.shape[1]
        parts = self.grouped().split([count * rows for count in self.counts])
        pairs = [torch.cat(pair) for pair in zip(self.q_user, parts, strict=True)]
        cuts = _cuts([len(pair) for pair in pairs], self.q.device)
        return torch.cat(pairs), cuts, own + self.most_rows

    def apart(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Splits the output of `joined` into those of users and of candidates."""
        own = self.q_user.shape[1]
        parts = out.split([own + count * self.q.shape[1] for count in self.counts])
        of_users = torch.stack([part[:own] for part in parts])
        return of_users, self.ungrouped(torch.cat([part[own:] for part in parts]))


Output = Tensor | tuple[Tensor, Tensor]  # with self-attention: of users, and of candidates


def _cuts(sizes: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)


class Problem:
    """Inputs of a shape, seeded, and outputs of some of them in float64."""

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int, mapping: str = "sorted"
    ) -> None:
        """`mapping`: candidates grouped by user, or in random order."""
        self.shape, self.dtype, self.device = shape, dtype, device
        self.notes: list[str] = []  # the choices of contestants
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, dtype=dtype, device=device, generator=generator)

        sets = 1
        if device.type == "cuda":
            sets = min(max(1, -(-_ROTATED_BYTES // shape.least_bytes(dtype))), _MOST_INPUTS)
        self.inputs = []
        users = torch.arange(shape.users, device=device)
        users = users.repeat_interleave(torch.tensor(shape.counts, device=device))
        for _ in range(sets):
            if mapping == "shuffled":
                users = users[torch.randperm(len(users), device=device, generator=generator)]
            q = normal(len(users), shape.queries, shape.heads, shape.dim)
            k, v = (normal(shape.users, shape.kv, shape.kv_heads, shape.dim) for _ in range(2))
            own = normal(shape.users, shape.own, shape.heads, shape.dim) if shape.own else None
            self.inputs.append(Inputs(q, k, v, users, shape.counts, shape.lengths, own))

    def checked(self, count: int) -> list[int]:
        """Returns the first, the last and some other numbers below `count`."""
        return torch.linspace(0, count - 1, min(_CHECKED, count)).round().long().tolist()

    def parts(self, output: Output) -> tuple[Tensor, ...]:
        """Returns the output of candidates, or of users and of candidates."""
        if self.shape.own and isinstance(output, Tensor):
            return self.inputs[0].apart(output)
        return output if isinstance(output, tuple) else (output,)

    def whole(self, output: Output) -> Tensor:
        """Returns all values of an output in one row."""
        return torch.cat([part.flatten() for part in self.parts(output)])

    def sampled(self, output: Output) -> Tensor:
        """Returns the values of an output that are compared with float64, in one row."""
        parts = self.parts(output)
        return torch.cat([part[self.checked(len(part))].flatten() for part in parts])

    @cached_property
    def right(self) -> Tensor:
        """Their values for the first inputs, in float64."""
        inputs = self.inputs[0]
        parts = [(inputs.q, inputs.cand_to_user.tolist())]
        if inputs.q_user is not None:
            parts.insert(0, (inputs.q_user, list(range(len(inputs.k)))))
        return torch.cat([self._right(q[at], users[at]) for q, users in parts for at in self.checked(len(q))])

    def _right(self, q: Tensor, user: int) -> Tensor:
        """Returns the output of one item, q [queries, heads, dim]."""
        inputs, share = self.inputs[0], self.shape.heads // self.shape.kv_heads
        length = inputs.lengths[user]
        k, v = (each[user, :length].double().repeat_interleave(share, 1) for each in (inputs.k, inputs.v))
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * self.shape.dim**-0.5
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten()


def as_even(shape: Shape) -> Shape:
    """Returns the shape with equally many candidates for every user."""
    return replace(shape, group=str(group_bounds(shape.group)[0]))
