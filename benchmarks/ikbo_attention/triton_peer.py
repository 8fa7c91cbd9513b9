"""The peer in Triton: FlashAttention-2's loop with the broadcast inside.

  tile      block_m packed rows of one user's candidates, and one head; programs of a user and head are
            adjacent, so that its keys and values hit L2
  queries   by pointer, through the order of the candidates: any map, any number of queries
  keys      by tensor descriptors (the copy engine), `num_stages` blocks of block_n in flight
  softmax   running maximum and sum in fp32, base 2; weights rounded to the type of the values
  tail      the last block of a user's keys is masked; values beyond them count with weight zero

The order of candidates and the begins of users are computed before the call. Configurations are timed at each
shape, and the fastest is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from common.calls import fastest_config
from ikbo_attention.problem import Inputs, Problem


@dataclass(frozen=True)
class Config:
    """A configuration of the kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        """Short, for notes and result files."""
        return f"{self.block_m} x {self.block_n}, {self.num_warps} warps, {self.num_stages} stages"


CONFIGS = (
    Config(128, 128, 8, 2),
    Config(128, 128, 8, 3),
    Config(128, 64, 8, 3),
    Config(128, 64, 4, 3),
    Config(64, 128, 4, 2),
)


@triton.jit
def accumulated(x, k, v, user, column, step, length, scale, high, total, out,
                block_n: tl.constexpr, dim: tl.constexpr, masked: tl.constexpr):  # fmt: skip
    """Adds one block of keys to the running maximum `high` (scaled), the sum of weights `total`, and
    `out`."""
    keys = k.load([user, step, column]).reshape(block_n, dim)
    scores = tl.dot(x, keys.T)
    if masked:
        scores = tl.where(step + tl.arange(0, block_n)[None, :] < length, scores, float("-inf"))
    higher = tl.maximum(high, tl.max(scores, 1) * scale)
    weights = tl.math.exp2(scores * scale - higher[:, None])  # one multiply-add each
    shrink = tl.math.exp2(high - higher)
    total = total * shrink + tl.sum(weights, 1)
    values = v.load([user, step, column]).reshape(block_n, dim)
    out = tl.dot(weights.to(values.dtype), values, out * shrink[:, None])
    return higher, total, out


# Not specialised for sizes that happen to be multiples of 16.
@triton.jit(do_not_specialize=["queries", "heads", "share"])
def attend(
    q, k, v, out, order, cuts, lengths, scale, queries, heads, share,
    block_m: tl.constexpr, block_n: tl.constexpr, dim: tl.constexpr,
):  # fmt: skip
    """q, out [candidates, queries, heads, dim]; k, v: descriptors of [users, kv, kv_heads * dim].

    order [candidates]: candidates by user; cuts [users + 1] into it; lengths [users]; share: heads that read
    one head of keys.
    """
    head, user = tl.program_id(1), tl.program_id(2)
    first = tl.load(cuts + user)
    rows = (tl.load(cuts + user + 1) - first) * queries
    start = tl.program_id(0) * block_m
    if start < rows:
        row = start + tl.arange(0, block_m)
        inside = row < rows
        candidate = tl.load(order + first + row // queries, mask=inside, other=0).to(tl.int64)
        place = ((candidate * queries + row % queries) * heads + head) * dim
        offsets = place[:, None] + tl.arange(0, dim)[None, :]
        x = tl.load(q + offsets, mask=inside[:, None], other=0.0)
        column = head // share * dim
        length = tl.load(lengths + user)
        whole = length // block_n * block_n
        high = tl.full((block_m,), -1e30, tl.float32)
        total = tl.zeros((block_m,), tl.float32)
        result = tl.zeros((block_m, dim), tl.float32)
        for step in range(0, whole, block_n):
            high, total, result = accumulated(
                x, k, v, user, column, step, length, scale, high, total, result, block_n, dim, False
            )
        if whole < length:
            high, total, result = accumulated(
                x, k, v, user, column, whole, length, scale, high, total, result, block_n, dim, True
            )
        result = tl.where(total > 0, 1 / total, 0.0)[:, None] * result
        tl.store(out + offsets, result.to(out.dtype.element_ty), mask=inside[:, None])


def launch(config: Config, i: Inputs) -> Tensor:
    """The whole call; `prepared` has its additional inputs."""
    order, lengths = prepared(i)
    users, _, kv_heads, dim = i.k.shape
    heads = i.q.shape[2]
    out = torch.empty_like(i.q)
    block = [1, config.block_n, dim]
    attend[(triton.cdiv(i.most_rows, config.block_m), heads, users)](
        i.q,
        *(TensorDescriptor.from_tensor(each.flatten(2), block) for each in (i.k, i.v)),
        out, order, i.cuts, lengths, math.log2(math.e) / math.sqrt(dim), i.q.shape[1], heads,
        heads // kv_heads, block_m=config.block_m, block_n=config.block_n, dim=dim,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def prepared(i: Inputs) -> tuple[Tensor, Tensor]:
    """int32: candidates by user, and keys of each user; cached for each set of inputs."""
    cached = vars(i).get("_triton")
    if cached is None:
        order = torch.arange(len(i.q), device=i.q.device) if i.order is None else i.order
        lengths = torch.tensor(i.lengths, dtype=torch.int32, device=i.q.device)
        cached = vars(i)["_triton"] = order.int(), lengths
    return cached


def check(problem: Problem) -> None:
    """NotImplementedError where the kernel does not fit."""
    if problem.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError(
            f"the Triton kernel: dtype is {problem.dtype}; expected float16 or bfloat16"
        )
    if problem.device.type != "cuda" or torch.cuda.get_device_capability(problem.device)[0] < 9:
        raise NotImplementedError("the Triton kernel reads by tensor descriptors, which need a GPU of sm_90")
    if problem.shape.dim & (problem.shape.dim - 1) or problem.shape.dim < 16:
        raise NotImplementedError(
            f"the Triton kernel: dim is {problem.shape.dim}; expected a power of two of at least 16"
        )


def triton_run(problem: Problem) -> Callable[[Inputs], Tensor]:
    """The kernel in its best configuration."""
    check(problem)
    inputs, device = problem.inputs[0], problem.device
    best = fastest_config(lambda config: launch(config, inputs), CONFIGS, device, min_time=5e-4)
    problem.notes.append(f"Triton: {best}")
    return lambda inputs: launch(best, inputs)
