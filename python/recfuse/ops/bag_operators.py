"""Autograd kernels of operators that pool tables, for compiled programs and torch.func, and their variants.

``recfuse::_X_with_winners`` also returns the row of each maximum of a bag of mode max. A compiled program
would compute a value that only its backward needs in the backward, from weights that may have changed by
then.

``recfuse::_X_updated`` takes the states of fused optimizers, then the arguments of ``X``. It returns the
output of ``X``, and updates the weights in the backward graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recfuse._storage import is_readable
from recfuse.ops.autograd import apply, register
from recfuse.ops.bags import Bag, PooledBags, Sink, pools_max, winners_of
from recfuse.ops.library import (
    below_autograd,
    call_below_autograd,
    is_traced,
    library,
    needs_derivatives,
    register_fake,
)
from recfuse.ops.traced_updates import ARGUMENTS, Updates, sinks_of


def define_gradients(
    name: str,
    follows: str,
    shape: Callable[..., Tensor],
    bag_of: Callable[..., Bag] | None = None,
) -> Callable[..., Tensor]:
    """Register the gradients of an operator, define its variants, and return ``_X_updated``.

    ``shape`` computes the fake output, on the device of the argument ``follows``; ``bag_of`` takes all
    arguments.
    """
    operator = getattr(torch.ops.recfuse, name).default
    names = [argument.name for argument in operator._schema.arguments]
    defaults = tuple(argument.default_value for argument in operator._schema.arguments)
    at_sparse, at_sample_weights = names.index("sparse"), names.index("per_sample_weights")
    arguments = str(operator._schema).partition("(")[2].rpartition(" -> ")[0]
    both, updated = f"_{name}_with_winners", f"_{name}_updated"
    library.define(f"{both}({arguments} -> (Tensor, Tensor)")
    library.define(f"{updated}({ARGUMENTS}, {arguments} -> Tensor")

    def weights_of(call: tuple[Any, ...]) -> Sequence[Tensor]:
        return call[0] if isinstance(call[0], (list, tuple)) else call[:1]

    def pool_with_winners(*call: Any) -> tuple[Tensor, Tensor]:
        output = operator(*call)  # first, because it checks the arguments
        bag = bag_of(*call, *defaults[len(call) :]) if bag_of else None
        return output, winners_of(bag, weights_of(call), call)

    def differentiate(call: tuple[Any, ...], updates: Updates | None = None) -> Tensor:
        complete = *call, *defaults[len(call) :]
        weights, sparse, sample_weights = weights_of(call), complete[at_sparse], complete[at_sample_weights]
        if not needs_derivatives((*weights, sample_weights)):
            with below_autograd():
                return operator(*call)
        if bag_of is not None:
            try:
                bag: Bag | None = bag_of(*complete)
            except Exception:
                call_below_autograd(operator, *call)  # raises, and names the argument
                raise
            any_max = complete[3] == "max"
        else:
            bag, any_max = None, complete[-1]
            if any_max and is_readable(call[1]):
                any_max = pools_max(call[1])
        pool = with_winners if any_max and is_traced() else operator
        sinks: Sequence[Sink] = [sparse] * len(weights)
        anchors: Sequence[Tensor] = ()
        if updates is not None:
            sinks, anchors = sinks_of(updates, sparse), updates.anchors
        run = partial(call_below_autograd, pool)
        traced = updates if anchors else None
        return apply(PooledBags, run, call, bag, any_max, sinks, traced, sample_weights, *anchors, *weights)

    def differentiate_updated(*complete: Any) -> Tensor:
        states, numbers, anchors, updater_of, options, *call = complete
        updates = Updates(states, numbers, anchors, tuple(updater_of), tuple(options))
        return differentiate(tuple(call), updates)

    @register_fake(both, follows)
    def _(*call: Any) -> tuple[Tensor, Tensor]:
        output = shape(*call)
        return output, output.new_empty(output.shape, dtype=torch.int64)

    for key in ("CPU", "CUDA"):
        library.impl(both, pool_with_winners, key)
        library.impl(updated, lambda *complete: operator(*complete[5:]), key)
    with_winners = getattr(torch.ops.recfuse, both).default
    register_fake(updated, follows)(lambda *complete: shape(*complete[5:]))
    library.impl(updated, differentiate_updated, "Autograd")
    register(name, lambda *call: differentiate(call))
    return getattr(torch.ops.recfuse, updated).default
