"""The contestants, by name: torch's forms of the same product, Triton's kernel, and recfuse's paths.

"NAME baddbmm": torch.baddbmm adds the candidates' product to the gathered user part, instead of a product and
an addition. "compiled NAME": the form under torch.compile(mode="max-autotune-no-cudagraphs"); the harness
replays every contestant as a CUDA graph.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

import recfuse
from common.points import RECFUSE, made_at_first_call
from ikbo_linear import bench
from ikbo_linear.problem import Inputs, Problem, padded_columns

Run = Callable[[Inputs], Tensor]

BROADCAST, CONCATENATED = "broadcast + concat", "concatenated"
DECOMPOSED, PADDED, IN_CALL, PITCHED = "decomposed", "padded", "padded in call", "pitched"
TRITON = "Triton"
STAGES = {f"path {name}": name for name in ("decomposed", "aligned", "broadcast", "fused")}
"""recfuse's paths that are the paper's stages."""
PATHS = {**STAGES, "path small": "small"}

BADDBMM = " baddbmm"
DECOMPOSITIONS = tuple(
    name + suffix for name in (DECOMPOSED, PADDED, IN_CALL, PITCHED) for suffix in ("", BADDBMM)
)
FORMS = (BROADCAST, CONCATENATED, *DECOMPOSITIONS)
COMPILABLE = (BROADCAST, CONCATENATED, DECOMPOSED, PADDED, PADDED + BADDBMM, IN_CALL)
COMPILED = "compiled "
IN_SWEEPS = (
    BROADCAST, CONCATENATED, PADDED, PADDED + BADDBMM, PITCHED, PITCHED + BADDBMM, TRITON, RECFUSE,
)  # fmt: skip

MEANINGS = {
    BROADCAST: "users' rows are repeated and concatenated in the call, then one matmul",
    CONCATENATED: "one matmul; its input is concatenated before the call, and that is not counted",
    DECOMPOSED: "two matmuls, the user part gathered and added",
    PADDED: "the same with K padded to a multiple of 8: inputs by their producer, weights before the call",
    IN_CALL: "the same with weights padded in the call, so that they are never stale",
    PITCHED: "no padding of K: rows of the weights start at 16 bytes, made before the call",
}


def is_separate(name: str) -> bool:
    """Returns true if a form of torch's takes users and candidates separately, like recfuse."""
    return name.removeprefix(COMPILED) in (BROADCAST, *DECOMPOSITIONS)


def added(weights: tuple[Tensor, Tensor], x_user: Tensor, x_cand: Tensor, users: Tensor) -> Tensor:
    """Two products and an addition."""
    return torch.matmul(weights[1], x_cand) + torch.matmul(weights[0], x_user)[users]


def accumulated(weights: tuple[Tensor, Tensor], x_user: Tensor, x_cand: Tensor, users: Tensor) -> Tensor:
    """The candidates' product added to the gathered user part."""
    gathered = torch.matmul(weights[0], x_user)[users]
    return gathered.baddbmm_(weights[1].expand(len(x_cand), -1, -1), x_cand)


@bench.peer(*FORMS)
def torch_form(name: str, problem: Problem) -> Run:
    """One of `FORMS`."""
    weights = problem.weights
    if name == BROADCAST:
        whole = weights.whole
        return lambda i: torch.matmul(whole, torch.cat((i.x_user[i.cand_to_user], i.x_cand), 1))
    if name == CONCATENATED:
        whole = weights.whole
        return lambda i: torch.matmul(whole, i.concatenated)
    kind = name.removesuffix(BADDBMM)
    product = accumulated if name.endswith(BADDBMM) else added
    pair = {PADDED: weights.padded, PITCHED: weights.pitched}.get(kind, (weights.user, weights.cand))
    if kind in (DECOMPOSED, PITCHED):
        return lambda i: product(pair, i.x_user, i.x_cand, i.cand_to_user)
    if kind == PADDED:
        return lambda i: product(pair, *i.padded, i.cand_to_user)
    return lambda i: product((padded_columns(pair[0]), padded_columns(pair[1])), *i.padded, i.cand_to_user)


@bench.peer(*(COMPILED + name for name in COMPILABLE))
def compiled_form(name: str, problem: Problem) -> Run:
    """A form under torch.compile; inputs computed in advance are arguments, as in the eager form."""
    weights, name = problem.weights, name.removeprefix(COMPILED)

    def compiled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return torch.compile(dynamic=False, mode="max-autotune-no-cudagraphs")(call)

    if name == BROADCAST:
        joined = compiled(lambda w, user, cand, users: torch.matmul(w, torch.cat((user[users], cand), 1)))
        return lambda i: joined(weights.whole, i.x_user, i.x_cand, i.cand_to_user)
    if name == CONCATENATED:
        whole = compiled(torch.matmul)
        return lambda i: whole(weights.whole, i.concatenated)
    if name == DECOMPOSED:
        split = compiled(added)
        return lambda i: split((weights.user, weights.cand), i.x_user, i.x_cand, i.cand_to_user)
    if name == IN_CALL:
        padding = compiled(lambda w, *rest: added((padded_columns(w[0]), padded_columns(w[1])), *rest))
        return lambda i: padding((weights.user, weights.cand), *i.padded, i.cand_to_user)
    product = compiled(accumulated if name.endswith(BADDBMM) else added)
    return lambda i: product(weights.padded, *i.padded, i.cand_to_user)


@bench.peer(TRITON)
def triton_form(problem: Problem) -> Run:
    """The kernel of `triton_peer.py`."""
    from ikbo_linear.triton_peer import triton_run

    return triton_run(problem)


@bench.peer(*PATHS, RECFUSE)
def recfuse_form(name: str, problem: Problem) -> Run:
    """recfuse's operator by a path, with unmodified weights and inputs."""
    weights, path = problem.weights, PATHS.get(name, "auto")
    return lambda i: recfuse.ikbo_linear(
        weights.user, weights.cand, i.x_user, i.x_cand, i.cand_to_user, path=path
    )


NAMES = tuple(bench.peers)
"""In the order in which they are shown."""


def path_taken(problem: Problem) -> str:
    """Returns the path of path="auto"."""
    weights, inputs = problem.weights, problem.inputs[0]
    return recfuse.ikbo_linear_path(
        weights.user, weights.cand, inputs.x_user, inputs.x_cand, inputs.cand_to_user
    )


def make_runs(problem: Problem, names: Iterable[str]) -> dict[str, Run]:
    """Returns contestants by name. Those that cannot run here raise when they are called."""
    if any(name.startswith(COMPILED) for name in names):
        torch.compiler.reset()  # otherwise earlier shapes count as recompilations
        with contextlib.suppress(ImportError, AttributeError):
            from torch._inductor import config, select_algorithm

            select_algorithm.PRINT_AUTOTUNE = False  # it would print a table of candidates for each product
            config.max_autotune_report_choices_stats = False
    return {name: made_at_first_call(functools.partial(bench.peers[name], problem)) for name in names}
