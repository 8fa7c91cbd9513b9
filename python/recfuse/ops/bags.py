"""The autograd Function of calls that pool tables: ``embedding_bag`` and ``fused_embedding_bag``.

Each weight of a call has a sink for its gradient: a dense tensor, a sparse tensor, or the update of a fused
optimizer, which changes the weight's rows instead. Eager updates wait for the end of the backward pass
(`pending_updates`); those of compiled programs are a part of the backward graph (`traced_updates`).

Python dominates the time of a step of a small bag, so this file uses plain tuples and few calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from recfuse._codes import FEATURE, MAX
from recfuse._storage import check_storages, is_readable
from recfuse.ops.autograd import eager_apply, refuse_jvp
from recfuse.ops.gradients import (
    Form,
    OutputGrad,
    are_few,
    coalesced,
    dense_grad,
    find_winners,
    mark_later,
    sample_weights_grad,
    sparse_grads,
    used_of,
)
from recfuse.ops.library import DTYPE_CODES, call_below_autograd, dtype_code, library, register_fake
from recfuse.ops.pending_updates import UpdateSink, is_deferred, is_due, update_later
from recfuse.ops.traced_updates import TracedSink, Updates, update_in_graph

_ops = torch.ops.recfuse
_POOLING = FEATURE.at("pooling")
_plain_gradient: Any = _ops._embedding_bag_gradient.default._op
library.impl("_embedding_bag_gradient", torch.library.fallthrough_kernel, "Autograd")

Sink: TypeAlias = bool | UpdateSink | TracedSink
"""The sink of the gradient of a weight. False: a dense tensor; True: a sparse tensor."""

# ---- a single table as the feature of a fused call

Bag: TypeAlias = tuple[int, int, int, int, int, bool, bool]
"""The table of ``embedding_bag``: rows, dim, code of the dtype, pooling, padding_idx, include_last_offset,
scale_grad_by_freq."""


def new_feature(rows: int, dim: int, pooling: int, padding_idx: int) -> Tensor:
    """Return the argument ``features`` of a call of a single table."""
    row = FEATURE.row(
        buffer=0, weight_offset=0, rows=rows, dim=dim, pooling=pooling, padding_idx=padding_idx,
        output_column=0,
    )  # fmt: skip
    return torch.tensor([row], dtype=torch.int64, device="cpu")


_cached_feature = lru_cache(maxsize=1024)(new_feature)
library.define("_feature(SymInt rows, SymInt dim, int pooling, int padding_idx) -> Tensor")
library.impl("_feature", new_feature, "CompositeExplicitAutograd")


@register_fake("_feature")
def _(rows: int, dim: int, pooling: int, padding_idx: int) -> Tensor:
    return torch.empty((1, len(FEATURE)), dtype=torch.int64, device="cpu")


def _fused_lookups(
    bag: Bag, indices: Tensor, offsets: Tensor | None, complete: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, indices and offsets of the fused call.

    Without ``complete`` the end of the last bag may be missing, which operators on the CPU allow for a single
    feature.
    """
    rows, dim, _, pooling, padding_idx, last, _ = bag
    ends = offsets
    if ends is None or not (last or (indices.is_cpu and not complete)):
        ends = lookup_ends(indices, offsets, last)
    # A tensor of a transform's level must not be cached.
    transformed = torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
    feature = feature_of(rows, dim, pooling, padding_idx, bool(transformed))
    return feature, indices if indices.dim() == 1 else indices.reshape(-1), ends


def lookup_ends(indices: Tensor, offsets: Tensor | None, last: bool) -> Tensor:
    """Return the offsets of a single feature with the end of its last bag.

    Without offsets bags are the rows of ``indices``; ``last``: offsets have the end.
    """
    if offsets is None:
        bags, lookups = indices.shape
        return torch.arange(bags + 1, dtype=torch.int64, device=indices.device) * lookups
    if last:
        return offsets
    if offsets.is_cpu:
        check_storages("recfuse.embedding_bag", "offsets", (offsets,))
    return torch.cat((offsets, offsets.new_full((1,), indices.shape[0])))


def feature_of(rows: int, dim: int, pooling: int, padding_idx: int, is_traced: bool) -> Tensor:
    """Return the argument ``features`` of a call of a single table; cached, unless a program is traced."""
    if is_traced or type(rows) is not int or type(dim) is not int:
        return _ops._feature(rows, dim, pooling, padding_idx)  # type: ignore[no-any-return]
    return _cached_feature(rows, dim, pooling, padding_idx)


# ---- the Function


class PooledBags(torch.autograd.Function):
    """A call that pools the table of ``bag``, or many tables.

    The last arguments are the anchors of traced updates, then the weights, because only arguments that are
    tensors themselves have gradients.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        operator: Callable[..., Any],
        call: tuple[Any, ...],
        bag: Bag | None,
        any_max: bool,
        sinks: Sequence[Sink],
        updates: Updates | None,
        sample_weights: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        """Call ``operator`` with the arguments ``call``; it may return the output and winners."""
        output = operator(*call)
        if bag is not None and not any_max and sample_weights is None and updates is None:
            ctx.save_for_backward(call[1], call[2])
            ctx.call = bag, None, sinks, None
            return output  # type: ignore[no-any-return]
        weights, forms, winners = tensors[len(tensors) - len(sinks) :], None, None
        if any_max:
            if isinstance(output, tuple):
                output, winners = output
            else:
                winners = winners_of(bag, weights, call)
        saved: Sequence[Tensor] = ()
        if updates is not None:
            saved = *weights, output, *updates.states, *updates.numbers
        elif ctx.needs_input_grad[_SAMPLE_WEIGHTS]:
            saved = [weight.contiguous() for weight in weights]
        if bag is None:
            forms = []
            for group, weight in enumerate(weights):
                code = DTYPE_CODES.get(weight.dtype)
                if code is None:  # the compiler calls this before the operator checks its arguments
                    code = dtype_code(weight, "fused_embedding_bag", "weights")
                forms.append((group, *weight.shape, code))
            ctx.save_for_backward(*call[2:4], sample_weights, winners, call[1], *saved)
        elif saved:
            ctx.save_for_backward(*call[1:3], sample_weights, winners, None, *saved)
        else:
            ctx.save_for_backward(*call[1:3], sample_weights, winners)
        ctx.call = bag, forms, sinks, None if updates is None else updates.options
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return gradients of sample weights, anchors and weights, and update weights of fused optimizers."""
        indices, offsets, *rest = ctx.saved_tensors
        bag, forms, sinks, options = ctx.call
        if bag is not None and len(rest) <= 2 and type(sinks[0]) is bool:
            return *(None,) * _TENSORS, _bag_grad(ctx, grad, sinks[0], indices, offsets, *rest)
        sample_weights, winners, features, *saved = (*rest, None, None, None)[: max(len(rest), 3)]
        needed, count = ctx.needs_input_grad, len(sinks)
        grads: list[Tensor | None] = [None] * len(needed)
        of_factors = needed[_SAMPLE_WEIGHTS]
        lookups: tuple[Any, ...] = features, indices, offsets
        used, by_freq = None, False
        if bag is None:
            used = used_of(ctx, features, grad)
        else:
            forms, by_freq = [(0, *bag[:3])], bag[-1]
            lookups = _fused_lookups(bag, indices, offsets, of_factors)
        if of_factors:
            grads[_SAMPLE_WEIGHTS] = sample_weights_grad(grad, saved[:count], lookups, sample_weights.dtype)
        if used is not None:
            lookups = used.features, indices, offsets
        output = grad, *lookups, sample_weights, winners, by_freq
        sparse: list[Form] = []
        due: dict[int, UpdateSink] = {}
        nodes: Any = None
        traced: dict[int, TracedSink] = {}
        for form, sink in zip(forms, sinks, strict=True):
            group = form[0]
            at = group - count
            if not needed[at] or (used is not None and group not in used.groups):
                continue
            if sink is False:
                grads[at] = dense_grad(output, form)
            elif sink is True:
                sparse.append(form)
            elif isinstance(sink, TracedSink):
                traced[group] = sink
            elif is_deferred(sink):
                sparse.append(form)
            else:
                nodes = nodes or ctx.next_functions  # once: each read creates the tuple
                if is_due(sink, nodes[at][0]):
                    due[group] = sink
        if sparse:
            for form, gradient in zip(sparse, _marked(ctx, output, sparse), strict=True):
                grads[form[0] - count] = gradient
        if due:
            update_later(output, due, count)
        if traced:
            after = [saved[count], grads[_SAMPLE_WEIGHTS]] if of_factors else saved[count : count + 1]
            anchors = [node for node, _ in ctx.next_functions[_TENSORS - len(needed) : -count]]
            tokens = update_in_graph(
                output, saved[:count], traced, saved[count + 1 :], options, after, anchors
            )
            for anchor, token in tokens.items():
                grads[_TENSORS + anchor] = token
        return tuple(grads)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        """Raise NotImplementedError."""
        refuse_jvp("fused_embedding_bag" if ctx.call[0] is None else "embedding_bag")


_SAMPLE_WEIGHTS, _TENSORS = 6, 7
"""Positions among the arguments of the Function."""
pooled = eager_apply(PooledBags)


def _bag_grad(
    ctx: Any,
    grad: Tensor,
    sparse: bool,
    indices: Tensor,
    offsets: Tensor | None,
    sample_weights: Tensor | None = None,
    winners: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the weight of a single table."""
    bag = ctx.call[0]
    rows, dim, dtype, pooling, padding_idx, last, by_freq = bag
    if (
        sparse
        and offsets is not None
        and sample_weights is None
        and not by_freq
        and grad.is_cpu
        and is_readable(grad)
        and not torch.is_grad_enabled()
        and forward_ad._current_level < 0  # a tangent of grad is refused
    ):
        gradient: Tensor = _plain_gradient(
            grad, indices, offsets, pooling, last, padding_idx, rows, dim, dtype
        )
        if not are_few(gradient._nnz() * dim):
            mark_later(ctx, gradient._indices(), gradient._values(), -1)
        return gradient
    lookups = _fused_lookups(bag, indices, offsets, complete=False)
    output, form = (grad, *lookups, sample_weights, winners, by_freq), (0, rows, dim, dtype)
    return _marked(ctx, output, [form])[0] if sparse else dense_grad(output, form)


def _marked(ctx: Any, output: OutputGrad, forms: Sequence[Form]) -> list[Tensor]:
    """Return sparse gradients, and mark them as coalesced after they have reached their Parameters."""
    bag, _, sinks, _ = ctx.call
    gradients = []
    for form, (rows, values) in zip(forms, sparse_grads(output, forms), strict=True):
        gradients.append(coalesced(form, rows, values))
        if is_readable(values) and not (bag is not None and are_few(values.numel())):
            mark_later(ctx, rows, values, form[0] - len(sinks))
    return gradients


def pools_max(features: Tensor) -> bool:
    """Return whether a feature pools by max."""
    return bool((features[:, _POOLING] == MAX).any())


def winners_of(bag: Bag | None, weights: Sequence[Tensor], call: tuple[Any, ...]) -> Tensor:
    """Return the row of each maximum, int64 ``[bags, columns]``; -1 if there is no row.

    ``call`` has the arguments of the operator.
    """
    matrices, lookups = [weight.contiguous() for weight in weights], call[1:5]
    if bag is not None:
        lookups = *_fused_lookups(bag, call[1], call[2], complete=True), bag[1]
    return call_below_autograd(find_winners, matrices, *lookups)
