"""Steps of training, built from sizes alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recfuse.perf.described import DescribedCall
from recfuse.perf.reserved import Reserving, reserve

OPTIMIZERS = {"sgd": "SGD", "adagrad": "Adagrad", "rowwise_adagrad": "RowWiseAdagrad", "adam": "Adam"}
TRAINING = ("gradients", *OPTIMIZERS)


def training_calls(
    name: str,
    new: Callable[[bool], nn.Module],
    batches: Sequence[tuple[str, tuple[Any, ...]]],
    kind: str,
    *,
    stochastic_rounding: bool = False,
    has_max: bool = False,
    without: Collection[str] = (),
) -> Iterator[DescribedCall]:
    """Describe steps of training.

    The kind "gradients" describes steps with dense and with sparse gradients. The others describe steps of an
    optimizer of `recfuse.optim`: direct, deferred, and with tables that are used twice in a step.

    Args:
        name: prefix of the names of the calls.
        new: creates the module, on the CPU; its argument is ``sparse``.
        batches: arguments of the module, and words for their sizes. Tables are used twice with
            the first batch.
        kind: an element of `TRAINING`.
        stochastic_rounding: as for the optimizers.
        has_max: whether a table is of mode "max", which has no sparse gradient.
        without: operators whose launches are left out, such as those of the forward pass.
    """
    if kind == "gradients":
        for sparse in (False,) if has_max else (False, True):
            module = new(sparse)
            for words, batch in batches:
                label = f"{name}, {'sparse' if sparse else 'dense'} gradients, {words}"
                yield DescribedCall(label, module, batch, True, without, True)
        return
    for label, deferred, uses in (("", False, 1), (" deferred", True, 1), (" used twice", False, 2)):
        step = _step(new(False), kind, stochastic_rounding, deferred, uses)
        for words, batch in batches[: None if uses == 1 else 1]:
            yield DescribedCall(f"{name}, {kind}{label}, {words}", step, batch, False, without, True)


def _step(
    module: nn.Module, kind: str, stochastic_rounding: bool, deferred: bool, uses: int
) -> Callable[..., None]:
    from recfuse import optim

    with Reserving():
        optimizer = getattr(optim, OPTIMIZERS[kind])(
            module, lr=0.1, deferred=deferred, stochastic_rounding=stochastic_rounding
        )

    def step(*batch: Any) -> None:
        with torch.enable_grad():
            pooled: list[Tensor] = [module(*batch) for _ in range(uses)]
            torch.autograd.backward(pooled, [reserve(output.shape, output.dtype) for output in pooled])
        optimizer.step()
        optimizer.zero_grad()

    return step
