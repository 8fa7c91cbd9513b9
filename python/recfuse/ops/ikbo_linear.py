"""``ikbo_linear``: a linear layer over users and their candidates, each user computed once; its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function, has_torch_function_variadic

from recfuse.errors import ArgumentValueError
from recfuse.ops.ikbo.linear_gradients import call_chain, call_linear
from recfuse.ops.library import (
    autocast,
    below_autograd,
    check_tensor,
    is_autocast,
    is_transformed,
    needs_derivatives,
    register_fake,
)

_ops = torch.ops.recfuse
_linear = _ops.ikbo_linear.default
_chain = _ops.ikbo_linear_chain.default
_call_linear = _linear._op  # what calling _linear does, without its frame in Python

Path = Literal["decomposed", "aligned", "broadcast", "fused", "concatenated", "small"]
"""How a call is computed, in the order of the operator's numbers."""
PATHS: tuple[Path, ...] = get_args(Path)
MOST_LEVELS = 4
"""Of a chain; as many as the library's RF_IKBO_MOST_LEVELS."""
Activation = Literal["none", "relu", "gelu", "silu"]
"""What is made of the sum; gelu is the exact one, torch's default."""


def ikbo_linear(
    w_user: Tensor,
    w_cand: Tensor,
    x_user: Tensor,
    x_cand: Tensor,
    cand_to_user: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    path: str = "auto",
    bounds_check: str = "on",
) -> Tensor:
    """A linear layer over the features of users and of candidates, where a user has many candidates.

    ``activation(w_cand @ x_cand[b] + w_user @ x_user[cand_to_user[b]] + bias)``: what
    ``torch.cat((w_user, w_cand), 1) @ torch.cat((x_user[cand_to_user], x_cand), 1)`` is, with each user's
    part computed once and added to all of its candidates'. float16, bfloat16, float32 (on a GPU in TF32 where
    torch's own matmul is) and float64, all tensors of one dtype (autocast brings them to one), on the CPU or
    on one CUDA device. Any strides.

    Args:
        w_user: ``[M, Ku]``, of any strides: two views of one weight ``[M, Ku + Kc]`` will do.
        w_cand: ``[M, Kc]``.
        x_user: ``[U, Ku, N]``, or ``[U, Ku]``.
        x_cand: ``[B, Kc, N]``, or ``[B, Kc]``.
        cand_to_user: int32 or int64 ``[B]``: the user of each candidate, in any order; users may have none.
        bias: ``[M]``, or None.
        activation: "none", "relu", "gelu" (exact) or "silu", of the sum.
        path: how it is computed; the results agree up to rounding. "decomposed": a matmul of torch each for
            users and candidates, the users' part written out for each candidate, an addition; "aligned": the
            same with rows of the weights padded to 16 bytes on a GPU; "broadcast": these matmuls and one
            kernel that adds from the users' part; "fused": one kernel in all, on GPUs that have it, else
            refused; "small": the same in many small pieces, for few items; "concatenated": users' features
            copied beside their candidates' and one matmul of torch, on the CPU and for inputs of two
            dimensions. "auto": the best of those that take the call;
            :func:`ikbo_linear_path` says which.
        bounds_check: "on" checks ``cand_to_user``; "off" trusts it: a bad one is then undefined behaviour.

    Returns:
        ``[B, M, N]``, or ``[B, M]`` for inputs of two dimensions, contiguous, of the inputs' dtype. Sums are
        in float32 or better; "broadcast" rounds the users' part and the candidates' part to the dtype first.

    Raises:
        ValueError, TypeError: a bad argument.
        IndexError: an element of ``cand_to_user`` outside ``[0, U)``. On a GPU it counts as a user of zeros
            with no gradient, and is raised by a later call with that weight, or by :func:`check`.
        NotImplementedError: ``path="fused"`` or "small" where it is not possible; forward-mode derivatives.

    Gradients are torch's matmuls, and sums over each user's candidates in float32 by its ``index_add``, which
    is deterministic on a GPU where ``torch.use_deterministic_algorithms`` asks for it; they can be
    differentiated again. With gradients wanted, the activation is torch's own, applied to the rounded sum.

    Source: IKBO (in-kernel broadcast optimization), section 2, linear compression.
    """
    options = _options(activation, path, bounds_check)
    if has_torch_function_variadic(w_user, w_cand, x_user, x_cand, cand_to_user, bias):
        tensors = w_user, w_cand, x_user, x_cand, cand_to_user, bias
        return handle_torch_function(ikbo_linear, tensors, *tensors[:5], bias=bias, **options)
    if not (
        isinstance(w_user, Tensor)
        and isinstance(w_cand, Tensor)
        and isinstance(x_user, Tensor)
        and isinstance(x_cand, Tensor)
        and isinstance(cand_to_user, Tensor)
        and (bias is None or isinstance(bias, Tensor))
    ):
        names = "w_user", "w_cand", "x_user", "x_cand", "cand_to_user", "bias"
        _check_tensors("ikbo_linear", names, (w_user, w_cand, x_user, x_cand, cand_to_user, bias))
    transformed = is_transformed()
    if is_autocast(x_cand, transformed):
        w_user, w_cand, x_user, x_cand, bias = autocast((w_user, w_cand, x_user, x_cand, bias))
    if transformed:
        return _linear(w_user, w_cand, x_user, x_cand, cand_to_user, bias, **options)
    if needs_derivatives((w_user, w_cand, x_user, x_cand, cand_to_user, bias)):
        return call_linear(w_user, w_cand, x_user, x_cand, cand_to_user, bias, **options)
    with below_autograd():
        return _call_linear(w_user, w_cand, x_user, x_cand, cand_to_user, bias, **options)


def ikbo_linear_chain(
    weights: Sequence[Tensor],
    inputs: Sequence[Tensor],
    maps: Sequence[Tensor],
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    path: str = "auto",
    bounds_check: str = "on",
) -> Tensor:
    """:func:`ikbo_linear` over two to four levels, the broadest first: users, vendors, items, say.

    Args:
        weights: ``[M, K_l]`` for each level.
        inputs: ``[count_l, K_l, N]`` for each level, or all ``[count_l, K_l]``.
        maps: int32 or int64 ``[count_l+1]`` for each level but the last: ``maps[l]`` gives each item of level
            ``l + 1`` its item of level ``l``.
        bias, activation, path, bounds_check: as of :func:`ikbo_linear`.

    Returns:
        ``[count of the last level, M, N]`` or ``[.., M]``. Every level's sum is rounded to the dtype, but
        with ``path="fused"``.

    Raises:
        As :func:`ikbo_linear`.
    """
    weights, inputs, maps = list(weights), list(inputs), list(maps)
    tensors = *weights, *inputs, *maps, bias
    options = _options(activation, path, bounds_check)
    if has_torch_function(tensors):
        return handle_torch_function(ikbo_linear_chain, tensors, weights, inputs, maps, bias=bias, **options)
    names = [f"{name}[{at}]" for name, given in (("weights", weights), ("inputs", inputs), ("maps", maps))
             for at in range(len(given))]  # fmt: skip
    _check_tensors("ikbo_linear_chain", (*names, "bias"), tensors)
    if not weights:  # of which the dispatcher would know no device
        raise ArgumentValueError(
            f"recfuse.ikbo_linear_chain: weights has 0 tensors, must have 2 to {MOST_LEVELS}: one for each "
            "level, the broadest first"
        )
    transformed = is_transformed()
    if inputs and is_autocast(inputs[0], transformed):
        *both, bias = autocast((*weights, *inputs, bias))
        weights, inputs = both[: len(weights)], both[len(weights) :]
    if transformed:
        return _chain(weights, inputs, maps, bias, **options)
    return call_chain(weights, inputs, maps, bias, **options)


def ikbo_linear_path(
    w_user: Tensor,
    w_cand: Tensor,
    x_user: Tensor,
    x_cand: Tensor,
    cand_to_user: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    path: str = "auto",
    bounds_check: str = "on",
) -> Path:
    """The path that :func:`ikbo_linear` takes with these arguments; raises as it does, and runs nothing."""
    options = _options(activation, path, bounds_check)
    path_of = _ops._ikbo_linear_path.default
    return PATHS[path_of(w_user, w_cand, x_user, x_cand, cand_to_user, bias, **options)]


def ikbo_linear_chain_path(
    weights: Sequence[Tensor],
    inputs: Sequence[Tensor],
    maps: Sequence[Tensor],
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    path: str = "auto",
    bounds_check: str = "on",
) -> Path:
    """The path that :func:`ikbo_linear_chain` takes with these arguments."""
    options = _options(activation, path, bounds_check)
    path_of = _ops._ikbo_linear_chain_path.default
    return PATHS[path_of(list(weights), list(inputs), list(maps), bias, **options)]


def _options(activation: str, path: str, bounds_check: str) -> dict[str, str]:
    """Those that are not the defaults: the operator takes time to read them."""
    options = {}
    if activation != "none":
        options["activation"] = activation
    if path != "auto":
        options["path"] = path
    if bounds_check != "on":
        options["bounds_check"] = bounds_check
    return options


def _check_tensors(operator: str, names: Sequence[str], tensors: Sequence[Any]) -> None:
    """Raises where one is no tensor; the last may be None."""
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is not None or name != "bias":
            check_tensor(operator, name, tensor)


# ---- shapes


def _shape(weights: Sequence[Tensor], inputs: Sequence[Tensor], maps: Sequence[Tensor]) -> Tensor:
    torch._check(
        2 <= len(weights) <= MOST_LEVELS and len(inputs) == len(weights) == len(maps) + 1,
        lambda: (
            f"recfuse.ikbo_linear_chain: {len(weights)} weights, {len(inputs)} inputs and {len(maps)} maps, "
            f"must be 2 to {MOST_LEVELS} weights, as many inputs and one map less"
        ),
    )
    dims = inputs[0].dim()
    for level, (weight, given) in enumerate(zip(weights, inputs, strict=True)):
        torch._check(
            weight.dim() == 2 and given.dim() == dims and dims in (2, 3),
            lambda: (
                "recfuse.ikbo_linear: a weight must have 2 dimensions, inputs 2 or 3, all as many; one has "
                f"{weight.dim()} and {given.dim()}"  # noqa: B023  (called at once)
            ),
        )
        torch._check(weight.shape[0] == weights[0].shape[0])
        torch._check(weight.shape[1] == given.shape[1])
        torch._check(given.shape[2:] == inputs[0].shape[2:])
        if level > 0:
            torch._check(maps[level - 1].dim() == 1)
            torch._check(maps[level - 1].shape[0] == given.shape[0])
    return inputs[-1].new_empty((inputs[-1].shape[0], weights[0].shape[0], *inputs[-1].shape[2:]))


@register_fake("ikbo_linear")
def _(*tensors: Tensor, **_: Any) -> Tensor:
    return _shape(tensors[:2], tensors[2:4], tensors[4:5])


@register_fake("ikbo_linear_chain")
def _(
    weights: Sequence[Tensor],
    inputs: Sequence[Tensor],
    maps: Sequence[Tensor],
    bias: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Tensor:
    return _shape(weights, inputs, maps)
