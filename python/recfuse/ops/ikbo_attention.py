"""``ikbo_attention``: attention of candidates over keys and values of their users, without copies."""

from __future__ import annotations

from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from recfuse._arguments import real
from recfuse.ops.ikbo.attention_gradients import call_attention, operator_of
from recfuse.ops.library import (
    autocast,
    check_tensor,
    is_autocast,
    is_transformed,
    register_fake,
)

_ops = torch.ops.recfuse
_TENSORS = "q", "k", "v", "cand_to_user", "kv_lengths", "kv_offsets", "q_user"
_OPTIONAL = 4
"""The position of the first tensor that may be None."""

AttentionPath = Literal["packed", "fused"]
"""The implementations, in the order of the operator's numbers."""
ATTENTION_PATHS: tuple[AttentionPath, ...] = get_args(AttentionPath)


@overload
def ikbo_attention(
    q: Tensor, k: Tensor, v: Tensor, cand_to_user: Tensor, *, scale: float | None = ...,
    kv_lengths: Tensor | None = ..., kv_offsets: Tensor | None = ..., q_user: None = ...,
    return_lse: Literal[False] = ..., path: str = ..., bounds_check: str = ...,
) -> Tensor: ...  # fmt: skip


@overload
def ikbo_attention(
    q: Tensor, k: Tensor, v: Tensor, cand_to_user: Tensor, *, scale: float | None = ...,
    kv_lengths: Tensor | None = ..., kv_offsets: Tensor | None = ..., q_user: Tensor | None = ...,
    return_lse: bool = ..., path: str = ..., bounds_check: str = ...,
) -> Any: ...  # fmt: skip


def ikbo_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cand_to_user: Tensor,
    *,
    scale: float | None = None,
    kv_lengths: Tensor | None = None,
    kv_offsets: Tensor | None = None,
    q_user: Tensor | None = None,
    return_lse: bool = False,
    path: str = "auto",
    bounds_check: str = "on",
) -> Any:
    """Compute the attention of each candidate over the keys and values of its user, which candidates share.

    For each head it computes ``softmax(scale * q[b] . k[cand_to_user[b]]^T) . v[cand_to_user[b]]`` without a
    mask: the result of ``scaled_dot_product_attention`` with keys and values gathered for each candidate. It
    does not make these copies.

    Args:
        q: ``[B, Sq, H, D]``, ``Sq`` queries of each candidate.
        k, v: ``[U, Skv, Hkv, D]``, or with ``kv_offsets`` ``[total, Hkv, D]``. ``Hkv`` divides ``H``: query
            head ``h`` uses key head ``h // (H // Hkv)``.
        cand_to_user: int32 or int64 ``[B]``, the user of each candidate, in any order; users may have no
            candidate.
        scale: the factor of the scores, positive. Default: ``1 / sqrt(D)``.
        kv_lengths: int32 or int64 ``[U]``, the number of keys of each user, in ``[0, Skv]``; later keys are
            not used. Default: ``Skv``.
        kv_offsets: int32 or int64 ``[U + 1]``, ascending: the positions at which the keys of each user begin
            and end in ``k`` and ``v``; not with ``kv_lengths``.
        q_user: ``[U, Su, H, D]``, queries of the users themselves, in the same launch (self and target
            attention).
        return_lse: return the log-sum-exps of the scores too. Default: False.
        path: the implementation; results agree up to rounding. "packed": torch's variable-length attention,
            with a user's candidates as one long query. "fused": a single kernel, on GPUs that have it, else
            it raises. "auto": the faster path that accepts the call; :func:`ikbo_attention_path` returns it.
            Default: "auto".
        bounds_check: "on" checks ``cand_to_user``, ``kv_lengths`` and ``kv_offsets``; "off" makes a bad
            value undefined behaviour. Default: "on".

    Shape:
        - q: ``[B, Sq, H, D]``; all tensors have one dtype and any strides.
        - k, v: ``[U, Skv, Hkv, D]``.
        - output: ``[B, Sq, H, D]``, contiguous, in the dtype of the inputs.

    Returns:
        Tensor: ``[B, Sq, H, D]``, zeros if the user has no keys. With ``q_user`` a pair: ``[U, Su, H,
        D]``, then ``[B, Sq, H, D]``. With ``return_lse`` log-sum-exps follow, float32 ``[U, H, Su]`` and
        ``[B, H, Sq]``: natural logarithms, -inf if there are no keys.

    Raises:
        TypeError: a bad argument.
        ValueError: a bad argument, length or offset.
        IndexError: a bad user. On a GPU :func:`check` raises bad contents: a candidate with a bad user gets
            rows of zeros, a bad length counts as the nearest valid length, a user with bad offsets has no
            keys.
        NotImplementedError: ``path="fused"`` if it is not possible; forward-mode and second derivatives.

    Example:
        >>> q, k = torch.randn(16, 8, 2, 32), torch.randn(4, 50, 2, 32)
        >>> recfuse.ikbo_attention(q, k, k, torch.arange(16) // 4).shape
        torch.Size([16, 8, 2, 32])

    Note:
        float16, bfloat16 and float32 on the CPU or on one CUDA device, float64 on the CPU; autocast converts
        to one dtype. Gradients on a GPU use torch's variable-length attention, deterministic with
        ``torch.use_deterministic_algorithms``; sums over a user's candidates are in float32.

    Source: IKBO (in-kernel broadcast optimization), section 3, target attention.
    """
    options: dict[str, Any] = {}
    if path != "auto":
        options["path"] = path
    if bounds_check != "on":
        options["bounds_check"] = bounds_check
    tensors = q, k, v, cand_to_user, kv_lengths, kv_offsets, q_user
    if has_torch_function_variadic(*tensors):
        named = dict(zip(_TENSORS[_OPTIONAL:], tensors[_OPTIONAL:], strict=True))
        return handle_torch_function(
            ikbo_attention,
            tensors,
            *tensors[:_OPTIONAL],
            scale=scale,
            return_lse=return_lse,
            **named,
            **options,
        )
    scale = _check(tensors, scale)
    transformed = is_transformed()
    if is_autocast(q, transformed):
        q, k, v, q_user = autocast((q, k, v, q_user))
    arguments = q, k, v, cand_to_user, scale, kv_lengths, kv_offsets
    if transformed:
        return operator_of(q_user, bool(return_lse))(
            *(arguments if q_user is None else (q_user, *arguments)), **options
        )
    return call_attention(bool(return_lse), q_user, *arguments, **options)


def ikbo_attention_path(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cand_to_user: Tensor,
    *,
    scale: float | None = None,
    kv_lengths: Tensor | None = None,
    kv_offsets: Tensor | None = None,
    q_user: Tensor | None = None,
    path: str = "auto",
    bounds_check: str = "on",
) -> AttentionPath:
    """Return the path that :func:`ikbo_attention` takes with these arguments; runs nothing.

    Args:
        q, k, v, cand_to_user, scale, kv_lengths, kv_offsets, q_user, path, bounds_check: as there.

    Returns:
        str: "packed" or "fused".

    Raises:
        ValueError: as :func:`ikbo_attention`, and so are other errors.

    Example:
        >>> q, k = torch.randn(16, 8, 2, 32), torch.randn(4, 50, 2, 32)
        >>> recfuse.ikbo_attention_path(q, k, k, torch.arange(16) // 4)
        'packed'
    """
    scale = _check((q, k, v, cand_to_user, kv_lengths, kv_offsets, q_user), scale)
    arguments = (q, k, v, cand_to_user, scale, kv_lengths, kv_offsets)
    options = {"path": path, "bounds_check": bounds_check}
    if q_user is not None:
        return ATTENTION_PATHS[_ops._ikbo_attention_self_path.default(q_user, *arguments, **options)]
    return ATTENTION_PATHS[_ops._ikbo_attention_path.default(*arguments, **options)]


def _check(tensors: tuple[Any, ...], scale: Any) -> float | None:
    """Raise TypeError if an argument is no tensor, or the scale is no number; return the scale."""
    for number, (name, tensor) in enumerate(zip(_TENSORS, tensors, strict=True)):
        if not isinstance(tensor, Tensor) and (number < _OPTIONAL or tensor is not None):
            check_tensor("ikbo_attention", name, tensor)
    if scale is None or isinstance(scale, (float, torch.SymFloat)):
        return scale  # type: ignore[return-value]
    return real("recfuse.ikbo_attention: scale", scale)


# ---- shapes


def _shapes(
    q_user: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cand_to_user: Tensor,
    scale: float | None = None,
    kv_lengths: Tensor | None = None,
    kv_offsets: Tensor | None = None,
    *_: str,
) -> list[Tensor]:
    """Return fake outputs of users' and of candidates' queries, then their log-sum-exps."""
    dims = 4 if kv_offsets is None else 3
    torch._check(
        q.dim() == 4 and k.dim() == dims and v.dim() == dims and cand_to_user.dim() == 1,
        lambda: (
            f"recfuse.ikbo_attention: q, k, v and cand_to_user have {q.dim()}, {k.dim()}, {v.dim()} and "
            f"{cand_to_user.dim()} dimensions; expected 4, {dims}, {dims} and 1"
        ),
    )
    torch._check(cand_to_user.shape[0] == q.shape[0])
    for one, other in zip(v.shape, k.shape, strict=True):
        torch._check(one == other)
    torch._check(k.shape[-1] == q.shape[-1])
    torch._check(kv_lengths is None or kv_offsets is None)
    if kv_lengths is not None:
        torch._check(kv_lengths.dim() == 1 and kv_lengths.shape[0] == k.shape[0])
    if kv_offsets is not None:
        torch._check(kv_offsets.dim() == 1 and kv_offsets.shape[0] >= 1)
    queries = [q]
    if q_user is not None:
        torch._check(q_user.dim() == 4)
        torch._check(q_user.shape[0] == (k.shape[0] if kv_offsets is None else kv_offsets.shape[0] - 1))
        torch._check(q_user.shape[2] == q.shape[2])
        torch._check(q_user.shape[3] == q.shape[3])
        queries = [q_user, q]
    sums = [(tensor.shape[0], tensor.shape[2], tensor.shape[1]) for tensor in queries]
    return [
        *(tensor.new_empty(tensor.shape) for tensor in queries),
        *(q.new_empty(size, dtype=torch.float32) for size in sums),
    ]


def _define_fake(name: str, with_self: bool, with_lse: bool) -> None:
    def fake(*arguments: Any, **_: Any) -> Any:
        shapes = _shapes(*(arguments if with_self else (None, *arguments)))
        shapes = shapes if with_lse else shapes[: len(shapes) // 2]
        return shapes[0] if len(shapes) == 1 else tuple(shapes)

    register_fake(name)(fake)


_define_fake("ikbo_attention", False, False)
_define_fake("ikbo_attention_lse", False, True)
_define_fake("ikbo_attention_self", True, False)
_define_fake("ikbo_attention_self_lse", True, True)
