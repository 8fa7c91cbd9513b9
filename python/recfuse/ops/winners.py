"""The rows that win a bag of mode max, found beside its output; a single bag as a fused call of one feature.

Winners come from the forward pass, so that the backward pass needs no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from recfuse._codes import MAX

_ops = torch.ops.recfuse
_below_autograd = torch._C._AutoDispatchBelowAutograd

# Kept alive for the life of the process: dropping it would take the operators away.
library = torch.library.Library("recfuse", "FRAGMENT")
library.define("_feature(SymInt rows, SymInt dim, int pooling, int padding_idx) -> Tensor")
for _name in ("embedding_bag", "fused_embedding_bag"):
    # As the operator, with the winners beside its output: a compiled program computes what only its backward
    # asks for in its backward, from weights that may have changed by then.
    _arguments = str(getattr(_ops, _name).default._schema).partition("(")[2].rpartition(" -> ")[0]
    library.define(f"_{_name}_with_winners({_arguments} -> (Tensor, Tensor)")

_embedding_bag = _ops.embedding_bag.default
_fused_embedding_bag = _ops.fused_embedding_bag.default
_winners = _ops.fused_embedding_bag_winners.default


def below(operator: Callable[..., Any], *arguments: Any) -> Any:
    """Calls an operator from a Function's forward."""
    if not torch._C._are_functorch_transforms_active():
        with _below_autograd():
            return operator(*arguments)
    # Forward runs without gradients, but an outer transform may want its own.
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), _below_autograd():
        return operator(*arguments)


def traced() -> bool:
    """Whether a program is being recorded, but not by torch.func's transforms."""
    return bool(torch._C._len_torch_dispatch_stack()) and not torch._C._are_functorch_transforms_active()


def bag_winners(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    mode: str,
    sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
    *_: Any,
) -> Tensor:
    """The rows that win each element of a bag of mode max."""
    feature = feature_of(*weight.shape, MAX, padding_idx)
    ends = ends_of(offsets, indices, include_last_offset)
    return below(_winners, [weight.contiguous()], feature, indices, ends, weight.shape[1])


def _embedding_bag_and_winners(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _embedding_bag(*arguments), bag_winners(*arguments)


def _fused_embedding_bag_and_winners(weights: Sequence[Tensor], *arguments: Any) -> tuple[Tensor, Tensor]:
    return _fused_embedding_bag(weights, *arguments), _winners(weights, *arguments[:4])


for _key in ("CPU", "CUDA"):
    library.impl("_embedding_bag_with_winners", _embedding_bag_and_winners, _key)
    library.impl("_fused_embedding_bag_with_winners", _fused_embedding_bag_and_winners, _key)


def ends_of(offsets: Tensor, indices: Tensor, include_last_offset: bool) -> Tensor:
    """[bags + 1] where bags begin, and where the last one ends."""
    if include_last_offset:
        return offsets
    return torch.cat((offsets, offsets.new_full((1,), indices.shape[0])))


def feature_of(rows: int, dim: int, pooling: int, padding_idx: int) -> Tensor:
    """int64 [1, 7] on the host: one table as the feature of a fused call."""
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()  # a tensor of one of its levels must not be kept
        or type(rows) is not int
        or type(dim) is not int
    ):
        return _ops._feature(rows, dim, pooling, padding_idx)
    return _known_feature(rows, dim, pooling, padding_idx)


def _new_feature(rows: int, dim: int, pooling: int, padding_idx: int) -> Tensor:
    return torch.tensor([[0, 0, rows, dim, pooling, padding_idx, 0]], dtype=torch.int64, device="cpu")


_known_feature = lru_cache(maxsize=1024)(_new_feature)
library.impl("_feature", _new_feature, "CompositeExplicitAutograd")
