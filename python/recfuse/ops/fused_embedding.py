"""``fused_embedding``: lookups of many features in one call, without pooling; its gradients and its shape.

The backward pass is that of ``fused_embedding_bag``: a slot of the output is a bag of one lookup. The forward
pass writes the row of each slot for it, -1 for slots without a gradient, which no gradient kernel counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from recfuse._codes import CODES, DTYPES
from recfuse._storage import is_readable
from recfuse.errors import ArgumentTypeError, ArgumentValueError, NotATensorError, a_type
from recfuse.ops.autograd import apply, eager_apply, refuse_jvp, register
from recfuse.ops.bags import Sink, _cached_feature
from recfuse.ops.fused_embedding_bag import fused_dtype
from recfuse.ops.gradients import Form, OutputGrad, bags_of, coalesced, dense_grad, mark_later, sparse_grads
from recfuse.ops.library import (
    below_autograd,
    call_below_autograd,
    check_1d,
    check_tensor,
    dtype_code,
    is_compiled,
    is_transformed,
    needs_derivatives,
    register_fake,
)
from recfuse.ops.pending_updates import UpdateSink, is_deferred, is_due, update_later, update_sinks
from recfuse.ops.updates import check_finished, unfinished, updates_of

_ops = torch.ops.recfuse
_fused_embedding = _ops.fused_embedding.default
_with_rows = _ops._fused_embedding_rows.default
LAYOUTS: tuple[str, ...] = tuple(CODES["history_layout"])
JAGGED, JOINED, PADDED = LAYOUTS


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
        _check_tensors(weights, features, indices, offsets, fill)
        raise
    code = -1 if dtype is None else _code_of(dtype)
    options = fill, layout, length, code, sparse, bounds_check
    call = weights, features, indices, offsets, output_dim, sizes or (), *options
    if is_transformed():
        if is_compiled() and derivatives and (updates is not None or sizes):
            return _outside_of_graphs(*call)
        return _fused_embedding(*call)
    if unfinished:
        check_finished(weights, "a call of tables")
    try:
        if derivatives:
            sinks = (sparse,) * len(weights) if updates is None else update_sinks(weights, updates, sparse)
            found: Tensor = _looked_up(call, sinks, *weights)
            return found
        with below_autograd():
            return _fused_embedding(*call)
    except TypeError:
        _check_tensors(weights, features, indices, offsets, fill)
        raise


@torch.compiler.disable
def _outside_of_graphs(weights: Sequence[Tensor], *call: Any) -> Tensor:
    """Look up rows in a graph break of a compiled program."""
    updates = updates_of(weights)
    if unfinished:
        check_finished(weights, "a call of tables")
    sparse = call[_SPARSE - 1]
    sinks = (sparse,) * len(weights) if updates is None else update_sinks(weights, updates, sparse)
    found: Tensor = _looked_up((weights, *call), sinks, *weights)
    return found


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
        TypeError: ``offsets`` is no tensor.
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


def _check_tensors(weights: Any, features: Any, indices: Any, offsets: Any, fill: Any) -> None:
    """Raise TypeError if an argument of a failed call is no tensor."""
    if not isinstance(weights, (list, tuple)):
        raise NotATensorError(
            f"recfuse.fused_embedding: weights is {a_type(weights)}; expected a list of tensors"
        )
    given = {f"weights[{number}]": weight for number, weight in enumerate(weights)}
    given |= {"features": features, "indices": indices, "offsets": offsets}
    if fill is not None:
        given["fill"] = fill
    for name, value in given.items():
        check_tensor("fused_embedding", name, value)


# ---- gradients

_SIZES, _LAYOUT, _SPARSE = 5, 7, 10
"""Positions among the arguments of the operator."""


class LookedUp(torch.autograd.Function):
    """A call that looks up rows. The last arguments are the weights."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, call: tuple[Any, ...], sinks: Sequence[Sink], *weights: Tensor
    ) -> Tensor:
        """Call the operator, and keep the row of each slot."""
        output, rows = call_below_autograd(_with_rows, *call)
        forms = [
            (number, *weight.shape, dtype_code(weight, "fused_embedding", "weights"))
            for number, weight in enumerate(weights)
        ]
        ctx.save_for_backward(rows, call[1])
        ctx.call = forms, call[_LAYOUT], call[_SIZES], sinks
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return gradients of the weights, and update weights of fused optimizers."""
        rows, features = ctx.saved_tensors
        forms, layout, sizes, sinks = ctx.call
        needed, count = ctx.needs_input_grad, len(sinks)
        grads: list[Tensor | None] = [None] * len(needed)
        for output, members in _problems(grad, rows, features, forms, layout, sizes):
            sparse: list[tuple[int, Form]] = []
            due: dict[int, UpdateSink] = {}
            for number, form in members:  # the number of the weight; its form has its number in the problem
                at, sink = number - count, sinks[number]
                if not needed[at]:
                    continue
                if sink is False:
                    grads[at] = dense_grad(output, form)
                elif sink is True or is_deferred(sink):
                    sparse.append((at, form))
                elif is_due(sink, ctx.next_functions[at][0]):
                    due[form[0]] = sink
            if sparse:
                of_forms = [form for _, form in sparse]
                for (at, form), found in zip(sparse, sparse_grads(output, of_forms), strict=True):
                    grads[at] = coalesced(form, *found)
                    if is_readable(found[1]):
                        mark_later(ctx, *found, at)
            if due:
                update_later(output, due, len(members))
        return tuple(grads)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        """Raise NotImplementedError."""
        refuse_jvp("fused_embedding")


_looked_up = eager_apply(LookedUp)
_Problem = tuple[OutputGrad, Sequence[tuple[int, Form]]]


def _problems(
    grad: Tensor, rows: Tensor, features: Tensor, forms: Sequence[Form], layout: str, sizes: Sequence[int]
) -> Iterator[_Problem]:
    """Return the gradient as gradients of calls that pool bags of one lookup, each with its weights."""
    if layout != JAGGED:
        columns = grad.reshape(-1, grad.shape[-1])
        own = features.clone()  # whole weights, since `rows` are those of a weight
        own[:, 1] = 0
        own[:, 2] = torch.tensor([form[1] for form in forms])[features[:, 0]]
        own[:, 5] = -1
        yield _bags_of_one(columns, own, rows), list(enumerate(forms))
        return
    pieces = _pieces(grad, rows, features, forms, sizes) if sizes else None
    first_row = 0
    for number, (_, n_rows, dim, code) in enumerate(forms):
        if pieces is None:
            own_grad, own_rows = grad, rows - first_row if first_row else rows
            first_row += n_rows  # rows of other weights are invalid, and count as no lookup
        elif pieces[number]:
            own_grad, own_rows = (torch.cat(parts) for parts in zip(*pieces[number], strict=True))
        else:
            own_grad, own_rows = grad[:0].view(0, dim), rows[:0]
        feature = _ops._feature if torch._C._len_torch_dispatch_stack() else _cached_feature
        output = _bags_of_one(own_grad, feature(n_rows, dim, 0, -1), own_rows)
        yield output, [(number, (0, n_rows, dim, code))]


def _pieces(
    grad: Tensor, rows: Tensor, features: Tensor, forms: Sequence[Form], sizes: Sequence[int]
) -> list[list[tuple[Tensor, Tensor]]]:
    """Return, for each weight, the gradients and rows of its features."""
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in forms]
    element = lookup = 0
    for number, size in zip(features[:, 0].tolist(), sizes, strict=True):
        dim = forms[number][2]
        if size:
            part = grad[element : element + size * dim].view(size, dim)
            found[number].append((part, rows[lookup : lookup + size]))
        element, lookup = element + size * dim, lookup + size
    return found


def _bags_of_one(grad: Tensor, features: Tensor, rows: Tensor) -> OutputGrad:
    offsets = torch.arange(rows.shape[0] + 1, device=rows.device)
    return grad, features, rows, offsets, None, None, False


def _differentiate(*call: Any) -> Tensor:
    """Call the operator for the compiler and torch.func."""
    given = *call, *_defaults[len(call) :]
    weights, fill = given[0], given[6]
    if not needs_derivatives((*weights, fill)):
        with below_autograd():
            return _fused_embedding(*call)
    if fill is not None and fill.requires_grad:
        _refuse_fill()
    return apply(LookedUp, given, [given[_SPARSE]] * len(weights), *weights)  # type: ignore[no-any-return]


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
    sizes: Sequence[int],
    fill: Tensor | None = None,
    layout: str = "jagged",
    length: int = 0,
    dtype: int = -1,
    *_: Any,
) -> Tensor:
    check_1d("fused_embedding", indices, offsets)
    own = DTYPES[dtype] if dtype >= 0 else fused_dtype([weight.dtype for weight in weights])
    like = weights[0] if weights else indices
    shape: tuple[Any, ...] = indices.shape[0], output_dim
    if sizes:
        shape = (output_dim,)
    elif layout == JOINED:
        shape = indices.shape[0] // max(features.shape[0], 1), output_dim
    elif layout == PADDED:
        shape = bags_of(features, offsets), length, output_dim
    return like.new_empty(shape, dtype=own)


@register_fake("_fused_embedding_rows", follows="weights")
def _(*call: Any) -> tuple[Tensor, Tensor]:
    output = _shape(*call)
    features, indices = call[1:3]
    slots = output.shape[0] * output.shape[1] * features.shape[0] if output.dim() == 3 else indices.shape[0]
    return output, indices.new_empty((slots,), dtype=torch.int64)
