"""``fused_embedding``: lookups of many features in one call, without pooling; its shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from recfuse._arguments import wrong_type
from recfuse._codes import DTYPES, INTEGERS
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.ops.autograd import apply, register
from recfuse.ops.fused_embedding_bag import fused_dtype
from recfuse.ops.gradients import bags_of
from recfuse.ops.histories import JOINED, PADDED, SPARSE, LookedUp, looked_up
from recfuse.ops.library import (
    below_autograd,
    check_1d,
    check_call,
    check_tensor,
    is_compiled,
    is_transformed,
    needs_derivatives,
    register_fake,
)
from recfuse.ops.pending_updates import update_sinks
from recfuse.ops.updates import check_finished, unfinished, updates_of

_fused_embedding = torch.ops.recfuse.fused_embedding.default


def fused_embedding(
    weights: Sequence[Tensor],
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    output_dim: int,
    *,
    layout: str = "jagged",
    length: int = 0,
    sizes: Sequence[int] | None = None,
    fill: Tensor | None = None,
    dtype: torch.dtype | None = None,
    sparse: bool = False,
    bounds_check: str = "on",
) -> Tensor:
    """Look up the rows of many features in one call, without pooling.

    Rows are copied, and converted if ``dtype`` differs from the table's: values are those of
    ``torch.nn.Embedding`` and ``to``. :class:`recfuse.nn.FusedEmbeddingCollection` creates the arguments
    ``weights`` and ``features``.

    Args:
        weights: contiguous float32, float16 or bfloat16 matrices ``[rows, dim]``; a table is a range of rows.
        features: int64 ``[features, 7]`` on the CPU, as in :func:`fused_embedding_bag`, with pooling 0. The
            row ``padding_idx`` gets no gradient.
        indices: int32 or int64 ``[lookups]``, feature by feature.
        offsets: int32 or int64 ``[features * bags + 1]``: history b of feature f has the lookups from
            ``offsets[f * bags + b]`` to ``offsets[f * bags + b + 1]``. On a GPU with layout "jagged" and
            without ``sizes``, later lookups belong to no history and give zeros.
        output_dim: columns of the output: of a feature with "jagged" (all features have equally many), of all
            features with "joined" and "padded". With ``sizes`` the elements of the output.
        layout: "jagged": features one after the other. "joined": features side by side, for features whose
            histories have the same lengths. "padded": features side by side, and each history is padded or
            cut to ``length``.
        length: the positions of a history with layout "padded", 1 or more.
        sizes: the number of lookups of each feature, on the host, for layout "jagged" and tables of several
            dims.
        fill: ``[output_dim]``, the row after the end of each history with layout "padded". It gets no
            gradient. Default: zeros.
        dtype: the dtype of the output. Default: that of the weights if they agree, else float32.
        sparse: make gradients coalesced sparse tensors. Default: False.
        bounds_check: as in :func:`embedding_bag`.

    Shape:
        - indices: ``[lookups]``.
        - offsets: ``[features * bags + 1]``.
        - output: ``[lookups, output_dim]`` with "jagged", with ``sizes`` ``[output_dim]``: for each feature
          ``[lookups of the feature, dim]``; ``[lookups of a feature, output_dim]`` with "joined";
          ``[bags, length, output_dim]`` with "padded".

    Returns:
        Tensor: the rows.

    Raises:
        TypeError: a bad argument.
        ValueError: a bad argument or offset; histories of different lengths with layout "joined".
        IndexError: an index outside its table; names feature, bag and position in the history. On a GPU its
            row is zeros, without gradient, and the next call with these tables, or :func:`check`, raises it.
        NotImplementedError: forward-mode and second derivatives.

    Example:
        >>> weights = [torch.randn(1000, 16), torch.randn(50, 16)]
        >>> features = torch.tensor([[0, 0, 1000, 16, 0, -1, 0], [1, 0, 50, 16, 0, -1, 16]])
        >>> indices, offsets = torch.tensor([3, 999, 5, 7, 49, 0]), torch.tensor([0, 2, 3, 5, 6])
        >>> recfuse.fused_embedding(weights, features, indices, offsets, 16).shape
        torch.Size([6, 16])
        >>> padded = dict(layout="padded", length=4)
        >>> recfuse.fused_embedding(weights, features, indices, offsets, 32, **padded).shape
        torch.Size([2, 4, 32])

    Note:
        All tensors are on the CPU, or all on one CUDA device; ``features`` is always on the CPU. A history
        that is longer than ``length`` is cut at its end; the lookups after the cut are not read. Compiled
        training with an optimizer of :mod:`recfuse.optim`, or with ``sizes``, calls the operator outside of
        the graph. A GPU takes at most 448 features.

    Source: Pan et al., RecFlex, SC 2024 (one kernel for heterogeneous features).
    """
    try:
        derivatives = needs_derivatives(weights)
        updates = updates_of(weights) if derivatives else None
        if fill is not None and fill.requires_grad and torch.is_grad_enabled():
            _refuse_fill()
    except (TypeError, AttributeError):
        check_call("fused_embedding", weights, features, indices, offsets, fill=fill)
        raise
    if isinstance(sizes, Tensor):
        raise wrong_type("recfuse.fused_embedding: sizes", sizes, "a list of integers")
    code = -1 if dtype is None else _code_of(dtype)
    options = fill, layout, length, code, sparse, bounds_check
    call = weights, features, indices, offsets, output_dim, () if sizes is None else sizes, *options
    if is_transformed():
        if is_compiled() and derivatives and (updates is not None or sizes):
            return _outside_of_graphs(*call)
        return _fused_embedding(*call)
    if unfinished:
        check_finished(weights, "a call of tables")
    try:
        if derivatives:
            sinks = (sparse,) * len(weights) if updates is None else update_sinks(weights, updates, sparse)
            rows: Tensor = looked_up(call, sinks, *weights)
            return rows
        with below_autograd():
            return _fused_embedding(*call)
    except TypeError:
        check_call("fused_embedding", weights, features, indices, offsets, fill=fill)
        raise


@torch._disable_dynamo
def _outside_of_graphs(weights: Sequence[Tensor], *call: Any) -> Tensor:
    """Look up rows in a graph break of a compiled program."""
    updates = updates_of(weights)
    if unfinished:
        check_finished(weights, "a call of tables")
    sparse = call[SPARSE - 1]
    sinks = (sparse,) * len(weights) if updates is None else update_sinks(weights, updates, sparse)
    rows: Tensor = looked_up((weights, *call), sinks, *weights)
    return rows


def history_mask(offsets: Tensor, length: int, features: int = 1) -> Tensor:
    """Return the positions of padded histories that have a lookup.

    Args:
        offsets: int32 or int64 ``[features * bags + 1]``, as of :func:`fused_embedding`.
        length: the positions of a history, 1 or more.
        features: the number of features. A position counts if a history of any feature reaches it.

    Shape:
        - offsets: ``[features * bags + 1]``.
        - output: ``[bags, length]``.

    Returns:
        Tensor: bool ``[bags, length]``, True for positions with a lookup.

    Raises:
        TypeError: ``offsets`` is no tensor of integers; ``length`` or ``features`` is no whole number.
        ValueError: ``length`` is below 1; offsets of another size.

    Example:
        >>> recfuse.history_mask(torch.tensor([0, 2, 2, 5]), 3).int()
        tensor([[1, 1, 0],
                [0, 0, 0],
                [1, 1, 1]], dtype=torch.int32)

    Note:
        Works on all devices, and never waits for a GPU. The mask has no gradient.

    Source: the mask that models of sequences compute from the lengths of histories.
    """
    check_tensor("history_mask", "offsets", offsets)
    if offsets.dtype not in INTEGERS:
        raise ArgumentTypeError(
            f"recfuse.history_mask: offsets is {str(offsets.dtype)[6:]}; expected int32 or int64"
        )
    for name, number in (("length", length), ("features", features)):
        if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
            raise wrong_type(f"recfuse.history_mask: {name}", number, "a whole number")
    if length < 1:
        raise ArgumentValueError(f"recfuse.history_mask: length is {length}; expected 1 or more")
    if offsets.dim() != 1 or features < 1 or (offsets.shape[0] - 1) % features or offsets.shape[0] < 1:
        raise ArgumentValueError(
            f"recfuse.history_mask: offsets has shape {list(offsets.shape)}; expected features * bags + 1 "
            f"elements with {features} features"
        )
    lengths = offsets.diff().view(features, -1)
    longest = lengths.amax(0) if features > 1 else lengths[0]
    return torch.arange(length, device=offsets.device) < longest[:, None]


def _code_of(dtype: Any) -> int:
    if dtype in DTYPES:
        return DTYPES.index(dtype)
    raise ArgumentTypeError(
        f"recfuse.fused_embedding: dtype is {dtype!r}; expected torch.float32, torch.float16, torch.bfloat16 "
        "or None"
    )


def _refuse_fill() -> NoReturn:
    raise ArgumentValueError(
        "recfuse.fused_embedding: fill requires a gradient, which it would not get. Pass fill.detach()."
    )


# ---- gradients


def _differentiate(*call: Any) -> Tensor:
    """Call the operator for the compiler and torch.func."""
    arguments = *call, *_defaults[len(call) :]
    weights, fill = arguments[0], arguments[6]
    if not needs_derivatives((*weights, fill)):
        with below_autograd():
            return _fused_embedding(*call)
    if fill is not None and fill.requires_grad:
        _refuse_fill()
    return apply(LookedUp, arguments, [arguments[SPARSE]] * len(weights), *weights)  # type: ignore[no-any-return]


_defaults = tuple(argument.default_value for argument in _fused_embedding._schema.arguments)
register("fused_embedding", _differentiate)
register("_fused_embedding_rows")


# ---- shape


@register_fake("fused_embedding", follows="weights")
def _shape(
    weights: Sequence[Tensor],
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    output_dim: int,
    sizes: Sequence[int] | None = None,
    fill: Tensor | None = None,
    layout: str = "jagged",
    length: int = 0,
    dtype: int = -1,
    *_: Any,
) -> Tensor:
    check_1d("fused_embedding", indices, offsets)
    result_dtype = DTYPES[dtype] if dtype >= 0 else fused_dtype([weight.dtype for weight in weights])
    like = weights[0] if weights else indices
    shape: tuple[Any, ...] = indices.shape[0], output_dim
    if sizes:
        shape = (output_dim,)
    elif layout == JOINED:
        shape = indices.shape[0] // max(features.shape[0], 1), output_dim
    elif layout == PADDED:
        shape = bags_of(features, offsets), length, output_dim
    return like.new_empty(shape, dtype=result_dtype)


@register_fake("_fused_embedding_rows", follows="weights")
def _(*call: Any) -> tuple[Tensor, Tensor]:
    output = _shape(*call)
    features, indices = call[1:3]
    slots = output.shape[0] * output.shape[1] * features.shape[0] if output.dim() == 3 else indices.shape[0]
    return output, output.new_empty((slots,), dtype=torch.int64)
