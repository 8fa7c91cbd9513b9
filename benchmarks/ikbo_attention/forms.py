"""The contestants, by name: torch's attention in every form, FlashAttention-3, Triton's kernel, recfuse.

"repeated NAME": SDPA by a backend of torch over keys and values repeated for each candidate beforehand;
"broadcast + NAME": the same with the repetition in the call. "packed NAME": all candidates of a user as one
long query, in batch forms if all users have equally many candidates and keys. If a shape has self-attention,
each form runs once for users and once for candidates, unless its name says otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import recfuse
from common.points import RECFUSE, made_at_first_call
from ikbo_attention import bench
from ikbo_attention.problem import Inputs, Output, Problem, Shape

Run = Callable[[Inputs], Output]
Attend = Callable[[Inputs], Tensor]

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}  # fmt: skip
REPEATED = {f"repeated {name}": backend for name, backend in BACKENDS.items()}
BROADCAST = {f"broadcast + {name}": backend for name, backend in BACKENDS.items()}
PACKED = {f"packed {name}": backend for name, backend in BACKENDS.items() if name != "efficient"}
LOOP, VARLEN, TRITON = "user by user", "varlen_attn", "Triton"
FA3_BATCH, FA3_VARLEN, FA3_JOINED = "FA3 batch", "FA3 varlen", "FA3 varlen joined"
PATHS = {f"path {name}": name for name in ("packed", "fused")}
JAGGED, TWO_CALLS = "recfuse jagged", "recfuse two calls"

COPIES = (*REPEATED, *BROADCAST)
"""Forms that hold keys and values once a candidate."""
TORCH = (*COPIES, *PACKED, VARLEN, LOOP)
FA3 = (FA3_BATCH, FA3_VARLEN, FA3_JOINED)
OURS = (*PATHS, JAGGED, TWO_CALLS, RECFUSE)
PEERS = (*TORCH, *FA3, TRITON)

# Default contestants by figure; for other figures the first line. Figure `host`: forms whose call is only
# their operator, because a context manager selects a backend of SDPA.
IN_SWEEPS = (*PACKED, VARLEN, FA3_BATCH, FA3_VARLEN, TRITON, RECFUSE)
BY_FIGURE = {
    "main": (*COPIES, *IN_SWEEPS[:-1], *PATHS, RECFUSE),
    "ragged": (*IN_SWEEPS[:-1], JAGGED, RECFUSE),
    "self": (*IN_SWEEPS[:-1], FA3_JOINED, TWO_CALLS, RECFUSE),
    "host": (VARLEN, FA3_BATCH, FA3_VARLEN, TRITON, *PATHS, RECFUSE),
}
ON_THE_CPU = ("repeated flash", "broadcast + flash", "packed flash", LOOP, "path packed", *OURS[2:])
"""Forms that run there; the first four in every figure."""

MEANINGS = {
    "repeated NAME": "keys and values repeated for each candidate before the call, and that is not counted",
    "broadcast + NAME": "repeated in the call",
    "packed NAME": "a user's candidates as one long query in a batch: even groups alone",
    VARLEN: "torch's variable-length attention on that long query, its offsets made before the call",
    FA3_VARLEN: "FlashAttention-3's, in the same form",
    RECFUSE: "the operator as called: it groups the candidates by the map in every call",
}


def takes(name: str, shape: Shape, on_gpu: bool) -> bool:
    """Returns true if a form is meant for a shape and device."""
    if not on_gpu and name not in ON_THE_CPU:
        return False
    if name in COPIES:
        return not shape.is_ragged  # otherwise SDPA would need a mask
    return shape.is_even or name not in (*PACKED, FA3_BATCH)


def alone(*names: str) -> Callable[[Callable[..., Attend]], Callable[..., Attend]]:
    """Registers a form for candidates; with self-attention it runs once more, for users."""

    def register(make: Callable[..., Attend]) -> Callable[..., Attend]:
        def run(*arguments: Any) -> Run:
            attend = make(*arguments)
            return twice(attend) if arguments[-1].shape.own else attend

        bench.peer(*names)(run)
        return make

    return register


def by_backend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [batch, queries, heads, dim], k and v [batch, kv, kv_heads, dim]: as q."""
    with sdpa_kernel(backend):
        turned = (each.transpose(1, 2) for each in (q, k, v))
        return scaled_dot_product_attention(*turned, enable_gqa=q.shape[2] != k.shape[2]).transpose(1, 2)


@alone(*COPIES)
def repeated_form(name: str, problem: Problem) -> Attend:
    """SDPA with keys and values once a candidate, repeated in the call or before it."""
    counted = name in BROADCAST
    backend = (BROADCAST if counted else REPEATED)[name]

    def attend(i: Inputs) -> Tensor:
        users = i.cand_to_user
        return by_backend(backend, i.q, *((i.k[users], i.v[users]) if counted else i.repeated))

    return attend


def in_a_batch(batch: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Attend:
    """Makes a batch form of attention on the long queries of users."""

    def attend(i: Inputs) -> Tensor:
        q = i.grouped().unflatten(0, (len(i.k), -1))
        return i.ungrouped(batch(q, i.k, i.v).reshape(i.q.shape))

    return attend


@alone(*PACKED)
def packed_form(name: str, problem: Problem) -> Attend:
    """SDPA on long queries."""
    return in_a_batch(functools.partial(by_backend, PACKED[name]))


def user_by_user(i: Inputs) -> Tensor:
    """SDPA for each user in turn."""
    outputs = []
    rows = i.grouped().split([count * i.q.shape[1] for count in i.counts])
    for user, (q, length) in enumerate(zip(rows, i.lengths, strict=True)):
        # With a batch of one: the fast backends require four dims.
        turned = (each[None].transpose(1, 2) for each in (q, i.k[user, :length], i.v[user, :length]))
        out = scaled_dot_product_attention(*turned, enable_gqa=q.shape[1] != i.k.shape[2])
        outputs.append(out.transpose(1, 2)[0])
    return i.ungrouped(torch.cat(outputs))


@alone(VARLEN)
def torch_varlen(problem: Problem) -> Attend:
    """torch.nn.attention.varlen."""
    from torch.nn.attention.varlen import varlen_attn

    def attend(i: Inputs) -> Tensor:
        k, v = i.jagged
        options = {"enable_gqa": True} if i.q.shape[2] != k.shape[1] else {}
        lengths = i.row_cuts, i.key_cuts, i.most_rows, max(i.lengths)
        return i.ungrouped(varlen_attn(i.grouped(), k, v, *lengths, **options))

    return attend


@alone(LOOP)
def loop_form(problem: Problem) -> Attend:
    """The same user by user."""
    return user_by_user


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@alone(FA3_BATCH)
def fa3_batch(problem: Problem) -> Attend:
    """FlashAttention-3's batch form, of the package fa3-fwd."""
    from fa3_fwd_interface import flash_attn_func

    return in_a_batch(lambda q, k, v: _first(flash_attn_func(q, k, v)))


@alone(FA3_VARLEN)
def fa3_varlen(problem: Problem) -> Attend:
    """Its form for different lengths."""
    from fa3_fwd_interface import flash_attn_varlen_func

    def attend(i: Inputs) -> Tensor:
        lengths = i.row_cuts, i.key_cuts, i.most_rows, max(i.lengths)
        return i.ungrouped(_first(flash_attn_varlen_func(i.grouped(), *i.jagged, *lengths)))

    return attend


@bench.peer(FA3_JOINED)
def fa3_joined(problem: Problem) -> Run:
    """One call for users and candidates, whose queries and outputs are in one tensor: [rows, heads, dim]."""
    from fa3_fwd_interface import flash_attn_varlen_func

    def attend(i: Inputs) -> Tensor:
        q, cuts, most = i.joined
        return _first(flash_attn_varlen_func(q, *i.jagged, cuts, i.key_cuts, most, max(i.lengths)))

    return attend


@alone(TRITON)
def triton_form(problem: Problem) -> Attend:
    """The kernel of `triton_peer.py`."""
    from ikbo_attention.triton_peer import triton_run

    return triton_run(problem)


def recfuse_form(path: str, i: Inputs) -> Tensor:
    """recfuse's operator by a path."""
    return recfuse.ikbo_attention(i.q, i.k, i.v, i.cand_to_user, kv_lengths=i.kv_lengths, path=path)


def recfuse_self(path: str, i: Inputs) -> Output:
    """Users and candidates in one launch."""
    return recfuse.ikbo_attention(
        i.q, i.k, i.v, i.cand_to_user, kv_lengths=i.kv_lengths, q_user=i.q_user, path=path
    )


def recfuse_jagged(i: Inputs) -> Tensor:
    """Keys and values without gaps."""
    return recfuse.ikbo_attention(i.q, *i.jagged, i.cand_to_user, kv_offsets=i.key_cuts)


def path_taken(problem: Problem) -> str:
    """Returns the path of path="auto"."""
    i = problem.inputs[0]
    return recfuse.ikbo_attention_path(i.q, i.k, i.v, i.cand_to_user, kv_lengths=i.kv_lengths)


def twice(attend: Attend) -> Run:
    """Makes a run of two calls: for users, and for candidates."""
    return lambda i: (attend(i.own), attend(i))


@bench.peer(*PATHS)
def path_form(name: str, problem: Problem) -> Run:
    """recfuse by a path."""
    return functools.partial(recfuse_self if problem.shape.own else recfuse_form, PATHS.get(name, "auto"))


@alone(JAGGED)
def jagged_form(problem: Problem) -> Attend:
    """recfuse without gaps between users' keys."""
    return recfuse_jagged


@alone(TWO_CALLS)
def two_calls_form(problem: Problem) -> Attend:
    """recfuse, a call for users and a call for candidates."""
    return functools.partial(recfuse_form, "auto")


bench.peer(RECFUSE)(functools.partial(path_form, RECFUSE))
NAMES = tuple(bench.peers)
"""In the order in which they are shown."""


def make_runs(problem: Problem, names: Iterable[str]) -> dict[str, Run]:
    """Returns contestants by name. Those that cannot run here raise when they are called."""
    return {name: made_at_first_call(functools.partial(bench.peers[name], problem)) for name in names}
