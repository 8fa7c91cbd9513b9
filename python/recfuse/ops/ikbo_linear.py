"""``ikbo_linear``: a linear layer over users and their candidates, which computes each user once."""

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
_call_linear = _linear._op  # as a call of _linear, without its Python frame

Path = Literal["decomposed", "aligned", "broadcast", "fused", "concatenated", "small"]
"""The implementations, in the order of the operator's numbers."""
PATHS: tuple[Path, ...] = get_args(Path)
MOST_LEVELS = 4
"""The most levels of a chain, equal to the library's RF_IKBO_MOST_LEVELS."""
Activation = Literal["none", "relu", "gelu", "silu"]
"""The function that is applied to the sum; gelu is exact, as torch's default."""


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
    """Apply a linear layer to the features of users and of candidates, where a user has many candidates.

    It computes ``activation(w_cand @ x_cand[b] + w_user @ x_user[cand_to_user[b]] + bias)``, which is
    ``torch.cat((w_user, w_cand), 1) @ torch.cat((x_user[cand_to_user], x_cand), 1)`` with each user's part
    computed once and added to all of its candidates.

    Args:
        w_user: ``[M, Ku]``, for example a view of a weight ``[M, Ku + Kc]``.
        w_cand: ``[M, Kc]``.
        x_user: ``[U, Ku, N]``, or ``[U, Ku]``.
        x_cand: ``[B, Kc, N]``, or ``[B, Kc]``.
        cand_to_user: int32 or int64 ``[B]``, the user of each candidate, in any order; users may have no
            candidate.
        bias: ``[M]``, or None.
        activation: "none", "relu", "gelu" (exact) or "silu", applied to the sum. Default: "none".
        path: the implementation; results agree up to rounding. "decomposed": torch's matmul for users and for
            candidates, a copy of the users' part for each candidate, and an addition. "aligned": the same,
            with rows of the weights padded to 16 bytes on a GPU. "broadcast": these matmuls, and a kernel
            that adds the users' part. "fused": a single kernel, on GPUs that have it, else it raises.
            "small": the same with small tasks, for few candidates. "concatenated": users' features copied
            next to their candidates', and one matmul of torch, on the CPU and for inputs of two dimensions.
            "auto": the fastest path that accepts the call; :func:`ikbo_linear_path` returns it. Default:
            "auto".
        bounds_check: "on" checks ``cand_to_user``; "off" makes a bad value undefined behaviour. Default:
            "on".

    Shape:
        - w_user, w_cand: ``[M, Ku]``, ``[M, Kc]``; all tensors have one dtype and any strides.
        - x_user, x_cand: ``[U, Ku, N]``, ``[B, Kc, N]``, or without N.
        - output: ``[B, M, N]``, or ``[B, M]``, contiguous, in the dtype of the inputs.

    Returns:
        Tensor: ``[B, M, N]``, or ``[B, M]`` for inputs of two dimensions. Sums are in float32 or better;
        "broadcast" first rounds the users' and the candidates' part to the dtype.

    Raises:
        TypeError: a bad argument.
        ValueError: a bad argument.
        IndexError: an element of ``cand_to_user`` outside ``[0, U)``. On a GPU it counts as a user of zeros
            without gradient; a later call with that weight, or :func:`check`, raises it.
        NotImplementedError: ``path="fused"`` or "small" if it is not possible; forward-mode derivatives.

    Example:
        >>> w_user, w_cand = torch.randn(64, 128).split((96, 32), dim=1)
        >>> users, candidates = torch.randn(4, 96), torch.randn(16, 32)
        >>> recfuse.ikbo_linear(w_user, w_cand, users, candidates, torch.arange(16) // 4).shape
        torch.Size([16, 64])

    Note:
        float16, bfloat16, float32 (on a GPU in TF32 if torch's matmul is) and float64, on the CPU or on one
        CUDA device; autocast converts to one dtype. Gradients use torch's matmuls and, for sums over a user's
        candidates, its ``index_add`` in float32, deterministic on a GPU with
        ``torch.use_deterministic_algorithms``. Second derivatives work. With gradients, the activation is
        torch's, applied to the rounded sum.

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
    """Apply :func:`ikbo_linear` to two to four levels, the broadest first: for example users, vendors, items.

    Args:
        weights: ``[M, K_l]`` for each level.
        inputs: ``[count_l, K_l, N]`` for each level, or all ``[count_l, K_l]``.
        maps: int32 or int64 ``[count_l+1]`` for each level but the last: ``maps[l]`` has the item of level
            ``l`` for each item of level ``l + 1``.
        bias, activation, path, bounds_check: as in :func:`ikbo_linear`.

    Returns:
        Tensor: ``[count of the last level, M, N]``, or without N. The sum of every level is rounded to the
        dtype, except with ``path="fused"``.

    Raises:
        ValueError: as :func:`ikbo_linear`, and so are other errors.

    Example:
        >>> weights = torch.randn(8, 12).split((4, 4, 4), dim=1)  # users, vendors, items
        >>> inputs = torch.randn(2, 4), torch.randn(4, 4), torch.randn(16, 4)
        >>> maps = torch.arange(4) // 2, torch.arange(16) // 4
        >>> recfuse.ikbo_linear_chain(weights, inputs, maps).shape
        torch.Size([16, 8])

    Note:
        Devices, dtypes and gradients are those of :func:`ikbo_linear`.

    Source: IKBO (in-kernel broadcast optimization), section 2, multi-stage fusion.
    """
    weights, inputs, maps = list(weights), list(inputs), list(maps)
    tensors = *weights, *inputs, *maps, bias
    options = _options(activation, path, bounds_check)
    if has_torch_function(tensors):
        return handle_torch_function(ikbo_linear_chain, tensors, weights, inputs, maps, bias=bias, **options)
    names = [f"{name}[{at}]" for name, tensors in (("weights", weights), ("inputs", inputs), ("maps", maps))
             for at in range(len(tensors))]  # fmt: skip
    _check_tensors("ikbo_linear_chain", (*names, "bias"), tensors)
    if not weights:  # the dispatcher would find no device
        raise ArgumentValueError(
            f"recfuse.ikbo_linear_chain: weights has 0 tensors; expected 2 to {MOST_LEVELS}, a tensor for "
            "each level, the broadest first"
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
    """Return the path that :func:`ikbo_linear` takes with these arguments; runs nothing.

    Args:
        w_user, w_cand, x_user, x_cand, cand_to_user, bias, activation, path, bounds_check: as there.

    Returns:
        str: the path.

    Raises:
        ValueError: as :func:`ikbo_linear`, and so are other errors.

    Example:
        >>> w_user, w_cand = torch.randn(64, 128).split((96, 32), dim=1)
        >>> users, candidates = torch.randn(4, 96), torch.randn(16, 32)
        >>> recfuse.ikbo_linear_path(w_user, w_cand, users, candidates, torch.arange(16) // 4)
        'broadcast'
    """
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
    """Return the path that :func:`ikbo_linear_chain` takes with these arguments; runs nothing.

    Args:
        weights, inputs, maps, bias, activation, path, bounds_check: as there.

    Returns:
        str: the path.

    Raises:
        ValueError: as :func:`ikbo_linear_chain`, and so are other errors.

    Example:
        >>> weights = torch.randn(8, 8).split((4, 4), dim=1)
        >>> inputs, maps = (torch.randn(4, 4), torch.randn(16, 4)), (torch.arange(16) // 4,)
        >>> recfuse.ikbo_linear_chain_path(weights, inputs, maps)
        'broadcast'
    """
    options = _options(activation, path, bounds_check)
    path_of = _ops._ikbo_linear_chain_path.default
    return PATHS[path_of(list(weights), list(inputs), list(maps), bias, **options)]


def _options(activation: str, path: str, bounds_check: str) -> dict[str, str]:
    """Return the options that differ from the defaults; the operator needs time to read each."""
    options = {}
    if activation != "none":
        options["activation"] = activation
    if path != "auto":
        options["path"] = path
    if bounds_check != "on":
        options["bounds_check"] = bounds_check
    return options


def _check_tensors(operator: str, names: Sequence[str], tensors: Sequence[Any]) -> None:
    """Raise TypeError if an argument is no tensor; the bias may be None."""
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is not None or name != "bias":
            check_tensor(operator, name, tensor)


# ---- shapes


def _shape(weights: Sequence[Tensor], inputs: Sequence[Tensor], maps: Sequence[Tensor]) -> Tensor:
    torch._check(
        2 <= len(weights) <= MOST_LEVELS and len(inputs) == len(weights) == len(maps) + 1,
        lambda: (
            f"recfuse.ikbo_linear_chain: weights has {len(weights)} tensors, inputs {len(inputs)} and maps "
            f"{len(maps)}; expected 2 to {MOST_LEVELS} weights, as many inputs and one map less"
        ),
    )
    dims = inputs[0].dim()
    for level, (weight, x) in enumerate(zip(weights, inputs, strict=True)):
        torch._check(
            weight.dim() == 2 and x.dim() == dims and dims in (2, 3),
            lambda: (
                "recfuse.ikbo_linear: the dimensions of a weight and its input are "
                f"{weight.dim()} and {x.dim()}; "  # noqa: B023  (called at once)
                "expected 2 of the weight, and the same 2 or 3 of all inputs"
            ),
        )
        torch._check(weight.shape[0] == weights[0].shape[0])
        torch._check(weight.shape[1] == x.shape[1])
        torch._check(x.shape[2:] == inputs[0].shape[2:])
        if level > 0:
            torch._check(maps[level - 1].dim() == 1)
            torch._check(maps[level - 1].shape[0] == x.shape[0])
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
