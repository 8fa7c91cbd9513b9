"""Exchanges of tensors between ranks, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from recfuse.distributed.exchanges.batches import positions_of


def all_to_all(values: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    """Send ``sent[r]`` elements of a flat tensor to each rank r; return ``received`` elements by rank."""
    found = values.new_empty(sum(received))
    dist.all_to_all_single(found, values.contiguous(), list(received), list(sent), group=group)
    return found


class Joined(NamedTuple):
    """The lookups of all ranks for the features of this rank: feature by feature, rank by rank in each."""

    indices: Tensor
    offsets: Tensor  # int64 [features * bags of all ranks + 1]
    positions: Tensor  # of each lookup in the order of arrival


def joined(payloads: Sequence[Tensor], bags: Sequence[int], features: int, dtype: torch.dtype) -> Joined:
    """Return the joined lookups; a payload is lengths ``[features, bags]``, then indices."""
    lengths = [
        payload[: features * own].view(features, own).to(torch.int64)
        for payload, own in zip(payloads, bags, strict=True)
    ]
    arrived = torch.cat([payload[features * own :] for payload, own in zip(payloads, bags, strict=True)])
    sizes = torch.stack([own.sum(1) for own in lengths])  # [ranks, features]
    begins = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes)
    positions = positions_of(begins.t().flatten(), sizes.t().flatten(), len(arrived))
    ends = torch.cat(lengths, dim=1).flatten().cumsum(0)
    offsets = torch.cat((ends.new_zeros(1), ends))
    return Joined(arrived[positions].to(dtype), offsets, positions)


class WeightsExchange(NamedTuple):
    """The sizes of an exchange of per-sample weights."""

    group: Any
    sent: Sequence[int]  # lookups to each rank
    received: Sequence[int]  # lookups from each rank
    origins: Tensor  # the own lookup of each sent weight
    positions: Tensor  # as of `Joined`
    own_copies: Tensor | None  # bool [received]: lookups of tables with copies that came from other ranks
    scale: float  # of gradients


class SendWeights(torch.autograd.Function):
    """Send per-sample weights with their lookups; the backward pass returns their gradients."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, exchange: WeightsExchange) -> Tensor:
        """Return the weights of the joined lookups."""
        ctx.exchange, ctx.lookups = exchange, len(weights)
        arrived = all_to_all(weights[exchange.origins], exchange.sent, exchange.received, exchange.group)
        return arrived[exchange.positions]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of the rank's own weights, added in the order of ranks."""
        exchange: WeightsExchange = ctx.exchange
        by_arrival = torch.empty_like(grad)
        by_arrival[exchange.positions] = grad * exchange.scale
        if exchange.own_copies is not None:
            by_arrival[exchange.own_copies] = 0
        back = all_to_all(by_arrival, exchange.received, exchange.sent, exchange.group)
        found = back.new_zeros(ctx.lookups)
        found.index_put_((exchange.origins,), back, accumulate=True)
        return found, None


class RowsExchange(NamedTuple):
    """The sizes of an exchange of pooled rows."""

    group: Any
    rank: int
    bags: Sequence[int]  # of each rank
    widths: Sequence[int]  # columns that each rank sends
    dtype: torch.dtype  # on the wire
    scale: float  # of gradients
    copied: int  # columns of copied tables, whose gradients go to every rank
    dense: Sequence[tuple[int, int]]  # rows and columns of copied tables, whose gradients are added


class SendRows(torch.autograd.Function):
    """Send pooled rows to the ranks with their samples; the backward pass sends gradients to the holders.

    ``pooled`` is ``[bags of all ranks, columns]``: columns that are sent, then those of copied tables, of
    which a rank takes its own bags, then those of dense tables, whose first bags are rows. The gradient of
    copied columns goes to every rank, because each must make the same step; that of dense tables is added.
    ``anchor`` requires a gradient, so that each rank takes part in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, pooled: Tensor, anchor: Tensor, exchange: RowsExchange) -> tuple[Tensor, ...]:
        """Return the received columns, flat and rank by rank, the copied columns ``[bags, columns]``, and the
        dense tables ``[rows, columns]``.
        """
        ctx.exchange, ctx.dtype = exchange, pooled.dtype
        width, own = exchange.widths[exchange.rank], exchange.bags[exchange.rank]
        send = pooled[:, :width].to(exchange.dtype).reshape(-1)
        sent = [bags * width for bags in exchange.bags]
        received = [own * other for other in exchange.widths]
        found = all_to_all(send, sent, received, exchange.group).to(pooled.dtype)
        first = sum(exchange.bags[: exchange.rank])
        end = width + exchange.copied
        copied = pooled[first : first + own, width:end].clone()
        tables = []
        for rows, columns in exchange.dense:
            tables.append(pooled[:rows, end : end + columns].clone(memory_format=torch.contiguous_format))
            end += columns
        return (found, copied, *tables)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, copied: Tensor, *tables: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of all bags of all ranks."""
        exchange: RowsExchange = ctx.exchange
        own = exchange.bags[exchange.rank]
        parts = grad.split([own * width for width in exchange.widths])
        send = grad
        if exchange.copied:
            rows = [part.view(own, width) for part, width in zip(parts, exchange.widths, strict=True)]
            send = torch.cat([torch.cat((part, copied), dim=1).flatten() for part in rows])
        sent = [own * (width + exchange.copied) for width in exchange.widths]
        width = exchange.widths[exchange.rank] + exchange.copied
        received = [bags * width for bags in exchange.bags]
        found = all_to_all(send.to(exchange.dtype), sent, received, exchange.group).to(ctx.dtype)
        found = found.view(sum(exchange.bags), width)
        if tables:
            found = torch.cat((found, _added_columns(tables, len(found), exchange.group)), dim=1)
        return found * exchange.scale, None, None


def _added_columns(grads: Sequence[Tensor], bags: int, group: Any) -> Tensor:
    """Return the sums over ranks of gradients of tables, side by side, in columns of ``bags`` rows."""
    total = added(torch.cat([grad.reshape(-1) for grad in grads]), group)
    columns = []
    for grad, own in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
        padding = own.new_zeros((bags - len(grad), grad.shape[1]))
        columns.append(torch.cat((own.view_as(grad), padding)))
    return torch.cat(columns, dim=1)


def added(values: Tensor, group: Any) -> Tensor:
    """Return the sum of a flat tensor over ranks, added in the order of ranks; a collective call.

    A rank adds its share of the elements, so that all ranks have the same result.
    """
    ranks = dist.get_world_size(group)
    share = -(-len(values) // ranks)
    padded = torch.cat((values, values.new_zeros(share * ranks - len(values))))
    parts = all_to_all(padded, [share] * ranks, [share] * ranks, group).view(ranks, share)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    found = [torch.empty_like(total) for _ in range(ranks)]
    dist.all_gather(found, total, group=group)
    return torch.cat(found)[: len(values)]
