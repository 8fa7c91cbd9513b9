"""Attention of candidates over their users' histories: ``TargetAttention``."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from recfuse._arguments import integer
from recfuse.errors import ArgumentValueError, refuse_scripting
from recfuse.ops import ikbo_attention
from recfuse.ops.ikbo.reads import read_histories
from recfuse.ops.library import check_tensor

_MOST = 2**31 - 1


class TargetAttention(torch.nn.Module):
    """Multi-head attention of candidates over the history of their user, which many candidates share.

    The result is that of ``torch.nn.MultiheadAttention`` with histories gathered for each candidate,
    ``x_user[cand_to_user]``. A history is projected once for all candidates of its user, and keys and values
    are not copied.

    ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj`` are ``torch.nn.Linear`` modules, drawn as those of
    ``MultiheadAttention``. There is no dropout and no mask except lengths.

    Args:
        embed_dim: features ``E`` of a candidate's queries and of the result.
        num_heads: heads of queries.
        kv_heads: heads of keys and values, a divisor of ``num_heads``. Default: ``num_heads``.
        head_dim: dims of a head. Default: ``embed_dim // num_heads``.
        kdim: features ``Ek`` of a position of a history. Default: ``E``.
        vdim: features ``Ev`` of ``x_values``. Default: ``kdim``.
        bias: add a bias in each projection. Default: True.
        path: as in :func:`recfuse.ikbo_attention`.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Shape:
        - x_cand: ``[B, Sq, E]``.
        - x_user: ``[U, Skv, Ek]``, or ``[total, Ek]`` with ``kv_offsets``.
        - cand_to_user: ``[B]``.
        - output: ``[B, Sq, E]``.

    Raises:
        ValueError: sizes that do not fit each other.
        TypeError: sizes that are not integers.

    Example:
        >>> attention = recfuse.nn.TargetAttention(embed_dim=64, num_heads=2)
        >>> histories, users = torch.randn(4, 50, 64), torch.arange(16) // 4
        >>> attention(torch.randn(16, 8, 64), histories, users).shape
        torch.Size([16, 8, 64])

    Note:
        Works on the CPU and on CUDA devices; the fused kernel needs compute capability 9.0 and float16 or
        bfloat16. Gradients use torch's attention.

    Source: IKBO (in-kernel broadcast optimization), section 3, target attention.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        *,
        path: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the parameters; see the class."""
        super().__init__()
        self.embed_dim, self.num_heads = _size("embed_dim", embed_dim), _size("num_heads", num_heads)
        self.kv_heads = self.num_heads if kv_heads is None else _size("kv_heads", kv_heads)
        if self.num_heads % self.kv_heads:
            raise ArgumentValueError(
                f"TargetAttention: kv_heads is {self.kv_heads}; expected a divisor of num_heads, "
                f"{self.num_heads}"
            )
        if head_dim is None and self.embed_dim % self.num_heads:
            raise ArgumentValueError(
                f"TargetAttention: num_heads is {self.num_heads}; expected a divisor of embed_dim, "
                f"{self.embed_dim}. Pass head_dim for another size."
            )
        self.head_dim = self.embed_dim // self.num_heads if head_dim is None else _size("head_dim", head_dim)
        self.kdim = self.embed_dim if kdim is None else _size("kdim", kdim)
        self.vdim = self.kdim if vdim is None else _size("vdim", vdim)
        self.path = path
        of_q, of_kv = self.num_heads * self.head_dim, self.kv_heads * self.head_dim
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = torch.nn.Linear(self.embed_dim, of_q, **options)
        self.k_proj = torch.nn.Linear(self.kdim, of_kv, **options)
        self.v_proj = torch.nn.Linear(self.vdim, of_kv, **options)
        self.out_proj = torch.nn.Linear(of_q, self.embed_dim, **options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights as ``torch.nn.MultiheadAttention``; biases are zeros."""
        for linear in (self.q_proj, self.k_proj, self.v_proj):
            torch.nn.init.xavier_uniform_(linear.weight)
        self.out_proj.reset_parameters()
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if linear.bias is not None:
                torch.nn.init.zeros_(linear.bias)

    def forward(
        self,
        x_cand: Tensor,
        x_user: Tensor,
        cand_to_user: Tensor,
        kv_lengths: Tensor | None = None,
        kv_offsets: Tensor | None = None,
        x_values: Tensor | None = None,
        x_user_queries: Tensor | None = None,
    ) -> Any:
        """Apply the layer.

        Args:
            x_cand: ``[B, Sq, E]``, the queries of the candidates.
            x_user: ``[U, Skv, Ek]``, the histories of the users; with ``kv_offsets`` ``[total, Ek]``.
            cand_to_user: int32 or int64 ``[B]``, the user of each candidate.
            kv_lengths, kv_offsets: as in :func:`recfuse.ikbo_attention`. Positions after a length, and
                histories of users without candidates, change neither results nor gradients; they may be NaN.
            x_values: ``[U, Skv, Ev]`` or ``[total, Ev]``, the input of the values. Default: ``x_user``.
            x_user_queries: ``[U, Su, E]``, queries of the users themselves, computed in the same launch.

        Returns:
            Tensor: ``[B, Sq, E]``; with ``x_user_queries`` a pair, ``[U, Su, E]`` and ``[B, Sq, E]``.

        Raises:
            ValueError: as :func:`recfuse.ikbo_attention`, and so are other errors.
        """
        of_history = "users, positions" if kv_offsets is None else "positions"
        x_values = x_user if x_values is None else x_values
        _check("x_cand", x_cand, "candidates, queries", self.embed_dim)
        _check("x_user", x_user, of_history, self.kdim)
        _check("x_values", x_values, of_history, self.vdim)
        q_user = None
        if x_user_queries is not None:
            _check("x_user_queries", x_user_queries, "users, queries", self.embed_dim)
            q_user = self.q_proj(x_user_queries).unflatten(-1, (self.num_heads, self.head_dim))
        if torch.is_grad_enabled():  # gradients of the projections are sums over all histories
            groups = None if q_user is not None and q_user.shape[1] else cand_to_user, kv_lengths, kv_offsets
            same = x_values is x_user
            x_user = read_histories(x_user, *groups)
            x_values = x_user if same else read_histories(x_values, *groups)
        kv = self.kv_heads, self.head_dim
        attended = ikbo_attention(
            self.q_proj(x_cand).unflatten(-1, (self.num_heads, self.head_dim)),
            self.k_proj(x_user).unflatten(-1, kv),
            self.v_proj(x_values).unflatten(-1, kv),
            cand_to_user,
            kv_lengths=kv_lengths,
            kv_offsets=kv_offsets,
            q_user=q_user,
            path=self.path,
        )
        if q_user is None:
            return self.out_proj(attended.flatten(2))
        return tuple(self.out_proj(part.flatten(2)) for part in attended)

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise NotImplementedError."""
        refuse_scripting(self)

    def extra_repr(self) -> str:
        """Return sizes and heads."""
        shown = f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, kv_heads={self.kv_heads}, "
        return f"{shown}head_dim={self.head_dim}"


def _size(name: str, value: Any) -> int:
    return integer(f"TargetAttention: {name}", value, 1, _MOST)


def _check(name: str, tensor: Any, sizes: str, features: int) -> None:
    """Raise an error unless an input is a tensor of these sizes and features."""
    check_tensor("nn.TargetAttention", name, tensor)
    if tensor.dim() != sizes.count(",") + 2 or tensor.shape[-1] != features:
        raise ArgumentValueError(
            f"TargetAttention: {name} is {list(tensor.shape)}; expected [{sizes}, {features}]"
        )
