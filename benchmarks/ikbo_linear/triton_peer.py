"""The peer in Triton: the candidates' product with the user part added before the store.

The user part R = W_user . X_user [users, m, n] is torch's matmul of padded operands, as in the paper's third
stage (section 2.3). The kernel then computes out[b] = W_cand . X_cand[b] + R[cand_to_user[b]]:

  tile      a program computes tiles [block_m, block_n] of one candidate; adjacent programs share a candidate
            and a column tile, so that X hits L2 for all tiles of rows except the first
  operands  by tensor descriptors (the copy engine), W [m, k] and X [candidates, k, n]: the tails in m, n and
            k are zeros, and no tile reads the next candidate's rows
  product   fp32 accumulators over k in steps of block_k, `num_stages` steps in flight
  epilogue  reads R's tile by the candidate's user, adds it in fp32, and rounds the sum once
  programs  one a tile, or as many as SMs, each with every n-th tile (persistent)

Every call pads W, like recfuse; the producer of X pads X. Configurations are timed at each shape, and the
fastest is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from common.calls import fastest_config
from ikbo_linear.problem import ALIGNED, Inputs, Problem, padded_columns


@dataclass(frozen=True)
class Config:
    """A configuration of the kernel."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    persistent: bool

    def __str__(self) -> str:
        """Short, for notes and result files."""
        shape = f"{self.block_m} x {self.block_n} x {self.block_k}"
        kind = "persistent" if self.persistent else "a tile each"
        return f"{shape}, {self.num_warps} warps, {self.num_stages} stages, {kind}"


CONFIGS = (
    Config(128, 256, 64, 8, 3, True),
    Config(128, 256, 64, 8, 4, False),
    Config(256, 128, 64, 8, 3, True),
    Config(128, 128, 64, 8, 4, True),
    Config(128, 128, 64, 4, 4, False),
    Config(128, 128, 64, 4, 3, False),
    Config(64, 256, 64, 4, 4, False),
    Config(64, 128, 64, 4, 4, False),
    Config(64, 64, 64, 4, 4, False),
)


# Specialised only for n being a multiple of 16, so that rows are stored in 16 bytes.
@triton.jit(do_not_specialize=["tiles", "m", "k"])
def add_user_part(
    w, x, base, users, out, tiles, m, n, k,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, persistent: tl.constexpr,
):  # fmt: skip
    """w, x: descriptors of [m, k], [candidates, k, n]; base [users, m, n]; out [candidates, m, n]."""
    row_tiles = tl.cdiv(m, block_m)
    item_tiles = row_tiles * tl.cdiv(n, block_n)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=persistent):
        item = tile // item_tiles
        row = tile % item_tiles % row_tiles * block_m
        column = tile % item_tiles // row_tiles * block_n
        total = tl.zeros((block_m, block_n), tl.float32)
        for step in range(0, k, block_k):
            a = w.load([row, step])
            b = x.load([item, step, column]).reshape(block_k, block_n)
            total = tl.dot(a, b, total)
        rows = row + tl.arange(0, block_m)[:, None]
        columns = column + tl.arange(0, block_n)[None, :]
        inside = (rows < m) & (columns < n)
        offsets = rows * n + columns
        user = tl.load(users + item).to(tl.int64)
        total += tl.load(base + user * m * n + offsets, mask=inside, other=0.0).to(tl.float32)
        place = out + item.to(tl.int64) * m * n + offsets
        tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def launch(config: Config, w: Tensor, x: Tensor, base: Tensor, users: Tensor, programs: int) -> Tensor:
    """w [m, k], x [candidates, k, n], rows of whole 16 bytes; base [users, m, n]. `programs`: SMs."""
    (candidates, k, n), m = x.shape, len(w)
    out = torch.empty((candidates, m, n), dtype=x.dtype, device=x.device)
    tiles = candidates * -(-m // config.block_m) * -(-n // config.block_n)
    grid = (min(tiles, programs) if config.persistent else tiles,)
    add_user_part[grid](
        TensorDescriptor.from_tensor(w, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(x, [1, config.block_k, config.block_n]),
        base, users, out, tiles, m, n, k,
        block_m=config.block_m, block_n=config.block_n, block_k=config.block_k,
        persistent=config.persistent, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def check(problem: Problem) -> None:
    """NotImplementedError where the kernel does not fit."""
    if problem.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError(
            f"the Triton kernel: dtype is {problem.dtype}; expected float16 or bfloat16"
        )
    if problem.device.type != "cuda" or torch.cuda.get_device_capability(problem.device)[0] < 9:
        raise NotImplementedError("the Triton kernel reads by tensor descriptors, which need a GPU of sm_90")
    if problem.shape.n % ALIGNED:
        raise NotImplementedError(
            f"the Triton kernel: n is {problem.shape.n}; expected a multiple of {ALIGNED}"
        )


def triton_run(problem: Problem) -> Callable[[Inputs], Tensor]:
    """The whole call: pads W, computes the user part by torch, then runs the kernel in its best
    configuration."""
    check(problem)
    weights = problem.weights
    programs = torch.cuda.get_device_properties(problem.device).multi_processor_count

    def run(config: Config, inputs: Inputs) -> Tensor:
        x_user, x_cand = inputs.padded
        base = torch.matmul(padded_columns(weights.user), x_user)
        return launch(config, padded_columns(weights.cand), x_cand, base, inputs.cand_to_user, programs)

    inputs, device = problem.inputs[0], problem.device
    best = fastest_config(lambda config: run(config, inputs), CONFIGS, device, min_time=1e-3)
    problem.notes.append(f"Triton: {best}")
    return lambda inputs: run(best, inputs)
