"""The autograd kernels of ``ikbo_attention`` and its variants: a single Function for all four."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recfuse.ops.autograd import apply, refused_jvp, register
from recfuse.ops.ikbo import attention_backward  # noqa: F401  (registers the operator)
from recfuse.ops.library import below_autograd, call_below_autograd, needs_derivatives

_ops = torch.ops.recfuse
_OPERATORS = (
    (_ops.ikbo_attention.default, _ops.ikbo_attention_lse.default),
    (_ops.ikbo_attention_self.default, _ops.ikbo_attention_self_lse.default),
)


def operator_of(q_user: Tensor | None, with_lse: bool) -> Any:
    """Return the operator with or without users' own queries, with or without log-sum-exps."""
    return _OPERATORS[int(q_user is not None)][int(with_lse)]  # int: Dynamo indexes a tuple by no bool


class IKBOAttention(torch.autograd.Function):
    """The operators that return log-sum-exps, which their gradients need."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        scale: float | None,
        options: dict[str, str],
        q_user: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cand_to_user: Tensor,
        kv_lengths: Tensor | None,
        kv_offsets: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Call the operator; return outputs of users' and of candidates' queries, and their log-sum-exps."""
        queries = (q,) if q_user is None else (q_user, q)
        output: tuple[Tensor, ...] = call_below_autograd(
            operator_of(q_user, True), *queries, k, v, cand_to_user, scale, kv_lengths,
            kv_offsets=kv_offsets, **options,
        )  # fmt: skip
        dim = q.shape[-1]
        ctx.scale = scale if scale is not None else dim**-0.5 if dim else 1.0
        ctx.save_for_backward(q_user, q, k, v, cand_to_user, kv_lengths, kv_offsets, *output)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return gradients of queries, keys and values, from a single call; each query is a user's row."""
        q_user, q, k, v, cand_to_user, kv_lengths, kv_offsets, *outputs = ctx.saved_tensors
        sides = len(outputs) // 2
        queries, owners = [q], [cand_to_user]
        if q_user is not None:
            queries, owners = [q_user, q], [torch.arange(q_user.shape[0], device=q.device), cand_to_user]
        sizes = [tensor.shape[:2] for tensor in queries]
        users = [
            owner.long()[:, None].expand(size).reshape(-1) for owner, size in zip(owners, sizes, strict=True)
        ]
        dq, dk, dv = _ops._ikbo_attention_backward(
            _rows(grads[:sides], outputs[:sides]),
            _rows(_moved(grads[sides:]), _moved(outputs[sides:])),
            _rows(queries, queries),
            k,
            v,
            torch.cat(users),
            _rows(outputs[:sides], outputs[:sides]),
            _rows(_moved(outputs[sides:]), _moved(outputs[sides:])),
            ctx.scale,
            kv_lengths,
            kv_offsets,
        )
        parts = dq.split([items * rows for items, rows in sizes])  # numel() would make the sizes constant
        *of_users, of_candidates = (part.unflatten(0, size) for part, size in zip(parts, sizes, strict=True))
        return None, None, *(of_users or (None,)), of_candidates, dk, dv, None, None, None

    jvp = refused_jvp("ikbo_attention")


def _moved(sums: Any) -> list[Tensor | None]:
    """Transpose log-sum-exps, which have heads before queries, to [items, queries, heads]."""
    return [None if tensor is None else tensor.transpose(1, 2) for tensor in sums]


def _rows(rows: Any, like: Any) -> Tensor | None:
    """Flatten [items, queries, ...] of all sides to [rows, ...]; zeros for None, or None if all are None."""
    if all(tensor is None for tensor in rows):
        return None
    pairs = zip(rows, like, strict=True)
    return torch.cat(
        [(torch.zeros_like(other) if tensor is None else tensor).flatten(0, 1) for tensor, other in pairs]
    )


def call_attention(
    with_lse: bool,
    q_user: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cand_to_user: Tensor,
    scale: float | None = None,
    kv_lengths: Tensor | None = None,
    kv_offsets: Tensor | None = None,
    **options: str,
) -> Any:
    """Call the operator, with gradients if required: the autograd kernel of all four operators."""
    queries = (q,) if q_user is None else (q_user, q)
    if needs_derivatives((*queries, k, v)):
        tensors = q_user, q, k, v, cand_to_user, kv_lengths, kv_offsets
        results = apply(IKBOAttention, scale, options, *tensors)
        if with_lse:
            return results
        return results[0] if q_user is None else results[:2]
    with below_autograd():
        return operator_of(q_user, with_lse)(
            *queries, k, v, cand_to_user, scale, kv_lengths, kv_offsets=kv_offsets, **options
        )


def _register(name: str, with_self: bool, with_lse: bool) -> None:
    def autograd(*arguments: Any, **options: Any) -> Any:
        return call_attention(with_lse, *(arguments if with_self else (None, *arguments)), **options)

    register(name, autograd)


_register("ikbo_attention", False, False)
_register("ikbo_attention_lse", False, True)
_register("ikbo_attention_self", True, False)
_register("ikbo_attention_self_lse", True, True)
