"""The gradients of ``fused_embedding``, by those of ``fused_embedding_bag``: a slot is a bag of one lookup.

The forward pass writes the row of each slot; -1 has no gradient, and no gradient kernel counts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from recfuse import _C
from recfuse._codes import CODES
from recfuse._storage import is_readable
from recfuse.ops.autograd import eager_apply, refuse_jvp
from recfuse.ops.bags import Sink, _cached_feature
from recfuse.ops.gradients import (
    Form,
    OutputGrad,
    coalesced,
    dense_grad,
    mark_later,
    sparse_grads,
    used_of,
)
from recfuse.ops.library import call_below_autograd, dtype_code
from recfuse.ops.pending_updates import UpdateSink, is_deferred, is_due, update_later

_ops = torch.ops.recfuse
_with_rows = _ops._fused_embedding_rows.default
JAGGED, JOINED, PADDED = CODES["history_layout"]

SIZES, LAYOUT, SPARSE = 5, 7, 10
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
        ctx.call = forms, call[LAYOUT], call[SIZES], sinks
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return gradients of the weights, and update weights of fused optimizers."""
        rows, features = ctx.saved_tensors
        forms, layout, sizes, sinks = ctx.call
        needed, count = ctx.needs_input_grad, len(sinks)
        grads: list[Tensor | None] = [None] * len(needed)
        used = used_of(ctx, features, grad)
        features = features if used is None else used.features
        for output, members in _problems(grad, rows, features, forms, layout, sizes):
            sparse: list[tuple[int, Form]] = []
            due: dict[int, UpdateSink] = {}
            for number, form in members:  # the number of the weight; its form has its number in the problem
                at, sink = number - count, sinks[number]
                if not needed[at] or (used is not None and number not in used.groups):
                    continue
                if sink is False:
                    grads[at] = dense_grad(output, form)
                elif sink is True or is_deferred(sink):
                    sparse.append((at, form))
                elif is_due(sink, ctx.next_functions[at][0]):
                    due[form[0]] = sink
            if sparse:
                of_forms = [form for _, form in sparse]
                for (at, form), indices_and_values in zip(
                    sparse, sparse_grads(output, of_forms), strict=True
                ):
                    grads[at] = coalesced(form, *indices_and_values)
                    if is_readable(indices_and_values[1]):
                        mark_later(ctx, *indices_and_values, at)
            if due:
                update_later(output, due, len(members))
        return tuple(grads)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        """Raise NotImplementedError."""
        refuse_jvp("fused_embedding")


looked_up = eager_apply(LookedUp)
_Problem = tuple[OutputGrad, Sequence[tuple[int, Form]]]


def _problems(
    grad: Tensor, rows: Tensor, features: Tensor, forms: Sequence[Form], layout: str, sizes: Sequence[int]
) -> Iterator[_Problem]:
    """Return the gradient as gradients of calls that pool bags of one lookup, each with its weights."""
    if layout != JAGGED:
        columns = grad.flatten(0, -2)
        described = features.clone()  # whole weights, since `rows` are those of a weight
        described[:, 1] = 0
        described[:, 2] = torch.tensor([form[1] for form in forms])[features[:, 0]]
        described[:, 5] = -1
        yield _bags_of_one(columns, described, rows), list(enumerate(forms))
        return
    pieces = _pieces(grad, rows, features, forms, sizes) if sizes else None
    first_row = 0
    for number, (_, n_rows, dim, code) in enumerate(forms):
        if pieces is not None:
            own_grad, own_rows = pieces[number]
        elif dim != grad.shape[1]:  # no feature looks its rows up
            own_grad, own_rows = grad.new_empty(0, dim), rows[:0]
        else:
            own_grad, own_rows = grad, rows - first_row if first_row else rows
        first_row += n_rows if dim else 0  # rows of other weights are invalid, and count as no lookup
        feature = _ops._feature if torch._C._len_torch_dispatch_stack() else _cached_feature
        output = _bags_of_one(own_grad, feature(n_rows, dim, 0, -1), own_rows)
        yield output, [(number, (0, n_rows, dim, code))]


def _pieces(
    grad: Tensor, rows: Tensor, features: Tensor, forms: Sequence[Form], sizes: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Return, for each weight, the gradients and rows of its features: views if they are adjacent."""
    runs: list[list[list[int]]] = [[] for _ in forms]  # first and last element, first and last lookup
    element = lookup = 0
    for number, dim, size in zip(features[:, 0].tolist(), features[:, 3].tolist(), sizes, strict=True):
        run = [element, element + size * dim, lookup, lookup + size]
        element, lookup = run[1], run[3]
        if not size or number < 0:  # a feature without a gradient is in no weight
            continue
        own = runs[number]
        if own and own[-1][3] == run[2]:
            own[-1][1], own[-1][3] = run[1], run[3]
        else:
            own.append(run)
    pieces = []
    for own, (_, _, dim, _) in zip(runs, forms, strict=True):
        own = own or [[0, 0, 0, 0]]
        grads = [grad[first:last].view(-1, dim) if dim else grad.new_empty(at - begin, 0)
                 for first, last, begin, at in own]  # fmt: skip
        parts = [rows[begin:at] for _, _, begin, at in own]
        pieces.append((grads[0], parts[0]) if len(own) == 1 else (torch.cat(grads), torch.cat(parts)))
    return pieces


def _bags_of_one(grad: Tensor, features: Tensor, rows: Tensor) -> OutputGrad:
    create = torch.empty if _C.explain_lowers() else torch.arange  # an explained call reads sizes alone
    offsets = create(rows.shape[0] + 1, dtype=torch.int64, device=rows.device)
    return grad, features, rows, offsets, None, None, False
