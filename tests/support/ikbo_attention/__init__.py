"""Attention of candidates over their users' keys: random calls in any layout, reference, and comparing."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import recfuse
from support.ikbo import LAYOUTS
from support.reference import assert_close_to_reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)
MAPS = ("random", "grouped", "cyclic", "one user")
KV_LAYOUTS = tuple(name for name in LAYOUTS if name != "expanded")
"""Of keys and values: layouts that keep users separate."""


def reference(q, k, v, cand_to_user, scale=None, kv_lengths=None, kv_offsets=None):
    """Returns out [B, Sq, H, D] and lse [B, H, Sq] in plain PyTorch, in the tensors' own dtype, user by
    user; zeros and -inf for candidates without keys. Differentiable any number of times."""
    heads, dim = q.shape[2:]
    share = heads // max(k.shape[-2], 1)
    scale = (dim**-0.5 if dim else 1.0) if scale is None else scale
    users = k.shape[0] if kv_offsets is None else kv_offsets.numel() - 1
    lengths, ends = (None if one is None else one.tolist() for one in (kv_lengths, kv_offsets))
    out, lse = torch.zeros_like(q), q.new_full((q.shape[0], heads, q.shape[1]), -torch.inf)
    for user in range(users):
        if kv_offsets is None:
            end = k.shape[1] if lengths is None else lengths[user]
            keys, values = k[user, :end], v[user, :end]
        else:
            keys, values = (one[ends[user] : ends[user + 1]] for one in (k, v))
        rows = (cand_to_user == user).nonzero()[:, 0]
        if keys.shape[0] == 0 or rows.numel() == 0:
            continue
        scores = torch.einsum("bshd,thd->bhst", q[rows], keys.repeat_interleave(share, 1)) * scale
        found = torch.einsum("bhst,thd->bshd", scores.softmax(-1), values.repeat_interleave(share, 1))
        out = out.index_put((rows,), found)
        lse = lse.index_put((rows,), scores.logsumexp(-1))
    return out, lse


@dataclass(frozen=True)
class Case:
    """A call, of Sq queries a candidate."""

    sq: int = 3
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    users: int = 4
    candidates: int = 11
    positions: int = 17
    """Keys of a user, or with lengths or jagged: at most."""
    dtype: torch.dtype = torch.float32
    map_dtype: torch.dtype = torch.int64
    map: str = "random"
    lengths: bool = False
    """Users have kv_lengths, from 0 on; positions past them are NaN."""
    jagged: bool = False
    """Keys and values have kv_offsets; before the first and past the last are NaN."""
    scale: float | None = None
    q_layout: str = "plain"
    kv_layout: str = "plain"
    self_queries: int | None = None
    """Of each user, in the same call."""
    peak: float = 1.0
    """Of the queries: above 1 a few keys have all the weight."""

    def but(self, **changes: Any) -> Case:
        """Returns the same with other values of some fields."""
        return replace(self, **changes)


NOTHING: tuple[dict[str, Any], ...] = (
    {"candidates": 0},
    {"candidates": 0, "users": 0},
    {"sq": 0},
    {"positions": 0},
    {"positions": 0, "jagged": True},
    {"heads": 0, "kv_heads": 0},
    {"dim": 0},
    {"self_queries": 0},
    {"self_queries": 2, "candidates": 0},
    {"self_queries": 2, "sq": 0},
    {"self_queries": 2, "users": 0, "candidates": 0},
    {"users": 1, "candidates": 1, "sq": 1, "positions": 1, "dim": 1, "heads": 1, "kv_heads": 1},
)
"""The empty sizes of a case; the last is empty nowhere."""


def random_case(draw: random.Random, largest: int = 40, **fixed: Any) -> Case:
    """Returns a random small case, sometimes empty."""

    def size(*usual: int) -> int:
        return draw.choice((*usual, draw.randint(1, largest), draw.randint(1, largest)))

    kv_heads = draw.randint(1, 3)
    form = draw.choice(("dense", "lengths", "lengths", "jagged", "jagged"))
    given = {
        "sq": size(1, 1, 2, 16),
        "heads": kv_heads * draw.randint(1, 4),
        "kv_heads": kv_heads,
        "dim": draw.choice((1, 8, 31, 32, 64, 64, 96, 128, 128, 136, 256)),
        "users": draw.randint(1, 9),
        "candidates": size(0, 1, 2, 8),
        "positions": draw.choice((0, 1, 2, 8, 63, 64, 65, 128, 129, draw.randint(1, 5 * largest))),
        "dtype": draw.choice(DTYPES),
        "map_dtype": draw.choice((torch.int32, torch.int64)),
        "map": draw.choice(MAPS),
        "lengths": form == "lengths",
        "jagged": form == "jagged",
        "scale": draw.choice((None, None, 0.3, 1e-6)),
        "q_layout": draw.choice(("plain", "plain", *LAYOUTS)),
        "kv_layout": draw.choice(("plain", "plain", *KV_LAYOUTS)),
        "self_queries": draw.choice((None, None, 0, 1, draw.randint(1, largest))),
        "peak": draw.choice((0.5, 1.0, 1.0, 8.0)),
    }
    return Case(**{**given, **fixed})


class Problem:
    """The tensors of a case. `k` and `v` are NaN wherever no user has a key."""

    def __init__(self, case: Case, device: Any = "cpu") -> None:
        self.case, self.device = case, device
        self.lengths = self.offsets = None
        sizes = (case.positions,) * case.users
        if case.lengths or case.jagged:
            sizes = tuple(random.randint(0, case.positions) for _ in range(case.users))
            if case.users > 1:  # one user without keys, and one with all
                sizes = (case.positions, *sizes[1:-1], 0)
        if case.jagged:
            ends = torch.tensor((2, *sizes)).cumsum(0)
            self.offsets = ends.to(device, case.map_dtype)
            shape: tuple[int, ...] = (int(ends[-1]) + 3,)
        else:
            shape = case.users, case.positions
        self.k, self.v = (self._kv(shape, sizes) for _ in range(2))
        if case.lengths:
            self.lengths = torch.tensor(sizes, dtype=case.map_dtype, device=device)
        self.q = self._queries(case.candidates, case.sq)
        self.q_user = None if case.self_queries is None else self._queries(case.users, case.self_queries)
        self.map = self._map().to(device, case.map_dtype)

    def _queries(self, count: int, queries: int) -> Tensor:
        case = self.case
        drawn = torch.randn(count, queries, case.heads, case.dim, dtype=torch.float64) * case.peak
        return LAYOUTS[case.q_layout](drawn.to(case.dtype).to(self.device))

    def _kv(self, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        case = self.case
        drawn = torch.randn(*shape, case.kv_heads, case.dim, dtype=torch.float64)
        if case.jagged:
            drawn[:2] = drawn[len(drawn) - 3 :] = torch.nan
        else:
            for user, size in enumerate(sizes):
                drawn[user, size:] = torch.nan
        return LAYOUTS[case.kv_layout](drawn.to(case.dtype).to(self.device))

    def _map(self) -> Tensor:
        users, candidates = self.case.users, self.case.candidates
        if self.case.map == "cyclic":
            return torch.arange(candidates) % max(users, 1)
        if self.case.map == "one user":
            return torch.full((candidates,), max(users - 2, 0))
        found = torch.randint(0, max(users, 1), (candidates,))
        return found.sort().values if self.case.map == "grouped" else found

    def options(self) -> dict[str, Any]:
        """Returns arguments of the function in addition to q, k, v and the map."""
        given = {"scale": self.case.scale, "kv_lengths": self.lengths, "kv_offsets": self.offsets}
        return given if self.q_user is None else {**given, "q_user": self.q_user}

    def tensors(self) -> list[Tensor]:
        """Those that may have gradients."""
        return [self.q, self.k, self.v, *([] if self.q_user is None else [self.q_user])]

    def run(self, **options: Any) -> Any:
        """The function."""
        return recfuse.ikbo_attention(self.q, self.k, self.v, self.map, **{**self.options(), **options})

    def path(self, **options: Any) -> str:
        """Returns the path of "auto"."""
        given = self.options()
        return recfuse.ikbo_attention_path(self.q, self.k, self.v, self.map, **{**given, **options})

    def sides(self) -> list[tuple[Tensor, Tensor]]:
        """Returns queries and their users, in the order of results: of users, if any, then of candidates."""
        own = torch.arange(self.case.users, device=self.map.device)
        return [*([] if self.q_user is None else [(self.q_user, own)]), (self.q, self.map)]

    def expected(self, tensors: list[Tensor] | None = None) -> list[tuple[Tensor, Tensor]]:
        """out and lse in float64 for each side; or of other tensors, in their order."""
        q, k, v, *rest = self.tensors() if tensors is None else tensors
        wide = k.double(), v.double()
        found = [*rest, q]
        return [
            reference(one.double(), *wide, users, self.case.scale, self.lengths, self.offsets)
            for one, (_, users) in zip(found, self.sides(), strict=True)
        ]

    def allowed(self, q: Tensor, users: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tolerances of an output and a log-sum-exp.

        Scores are sums in float32 or better, so the relative error of a weight is the error of its score;
        weights are rounded to the dtype once before the product with values, and so is the output.
        """
        case = self.case
        wide = torch.float64 if case.dtype == torch.float64 else torch.float32
        eps, unit = torch.finfo(case.dtype).eps, torch.finfo(wide).eps
        scale = abs(case.dim**-0.5 if case.scale is None else case.scale) if case.dim else 1.0
        k, v = self.k.double().nan_to_num(0, 0, 0), self.v.double().nan_to_num(0, 0, 0)
        norm = q.double().nan_to_num(0, 0, 0).norm(dim=-1) * (k.norm(dim=-1).amax() if k.numel() else 0.0)
        score = (4 * unit * (1 + scale * norm)).movedim(1, 2)  # [B, H, Sq]
        given = q.double(), self.k.double(), self.v.double().abs()
        magnitude, lse = reference(*given, users, case.scale, self.lengths, self.offsets)
        relative = 1.25 * eps + 2 * score.movedim(1, 2)[..., None] + 16 * unit
        largest = float(v.abs().amax()) if v.numel() else 0.0
        small = torch.finfo(case.dtype).smallest_normal * eps * (2 + case.positions) * (1 + largest)
        lse_unit = torch.finfo(torch.float32).eps
        if case.dtype in HALVES and q.is_cpu:  # torch's exp has the precision of halves there
            score = score + 2.0**-13
        return relative * magnitude + small, score + 4 * lse_unit * (1 + lse.nan_to_num(0, 0, 0).abs())

    def specified(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Returns for each side: out, lse, and their tolerances."""
        pairs = zip(self.expected(), self.sides(), strict=True)
        return [(*wanted, *self.allowed(*side)) for wanted, side in pairs]

    def check(self, got: Any, lse: Any = None, specified: Any = None) -> None:
        """Compares the result with the reference: a tensor, or those of users and candidates; and lse."""
        outs = [got] if isinstance(got, Tensor) else list(got)
        lses = [None] * len(outs) if lse is None else [lse] if isinstance(lse, Tensor) else list(lse)
        wanted = self.specified() if specified is None else specified
        for out, sums, (want, want_lse, allowed, allowed_lse) in zip(outs, lses, wanted, strict=True):
            assert out.dtype == self.case.dtype and out.is_contiguous() and out.device == want.device
            assert_close_to_reference(out, want, allowed)
            if sums is not None:
                assert sums.dtype == torch.float32 and sums.is_contiguous()
                assert_close_to_reference(sums, want_lse, allowed_lse)

    def check_all(self, specified: Any = None, **options: Any) -> None:
        """Runs it with and without lse, and compares both."""
        plain, both = self.run(**options), self.run(return_lse=True, **options)
        half = len(both) // 2
        self.check(both[:half], both[half:], specified)
        for one, other in zip([plain] if isinstance(plain, Tensor) else plain, both[:half], strict=True):
            assert torch.equal(one, other)
