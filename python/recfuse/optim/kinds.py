"""The optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recfuse.optim.base import FusedOptimizer
from recfuse.optim.groups import refuse

_COMMON = {"maximize": False, "differentiable": False, "foreach": None, "fused": None}


def _step_tensor(steps: int) -> Tensor:
    return torch.tensor(float(steps), dtype=torch.float32)


class SGD(FusedOptimizer):
    """``w -= lr * (g + weight_decay * w)``; state_dict and options of :class:`torch.optim.SGD` without
    momentum.

    Args:
        params: Parameters or param groups, as of any optimizer; or a module that has tables alone.
        lr: learning rate.
        weight_decay: L2 penalty, of the rows that are looked up.
        maximize: adds the step instead of subtracting it.
        deferred: rows are updated in ``step()``, by sparse gradients; else inside ``backward()``.
        stochastic_rounding: of float16 and bfloat16 tables; else to nearest.
        seed: of that rounding.
        options: of torch's optimizer; only values that switch an option off are allowed.

    Raises:
        ValueError, TypeError: no tables, options that have no meaning here. See :mod:`recfuse.optim` for the
            rest.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0,
        maximize: bool = False,
        deferred: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """See the class."""
        refuse(self._where, options)
        defaults = {"lr": lr, "momentum": 0, "dampening": 0, "weight_decay": weight_decay, "nesterov": False}
        defaults |= {**_COMMON, "maximize": maximize}
        super().__init__(params, defaults, deferred, stochastic_rounding, seed)


class Adagrad(FusedOptimizer):
    """``sum += g^2; w -= lr * g / (sqrt(sum) + eps)``, with ``g + weight_decay * w`` for g; ``sum`` has the
    table's shape, in float32. state_dict and options of :class:`torch.optim.Adagrad`, with sparse gradients.
    Duchi et al., 2011.

    Args:
        initial_accumulator_value: what ``sum`` begins with.
        eps: keeps the quotient finite.
        params, lr, weight_decay, maximize, deferred, stochastic_rounding, seed, options: as of :class:`SGD`.
    """

    _step_type = staticmethod(_step_tensor)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        *,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        maximize: bool = False,
        deferred: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """See the class."""
        refuse(self._where, options)
        defaults = {"lr": lr, "lr_decay": 0, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"initial_accumulator_value": initial_accumulator_value, **_COMMON, "maximize": maximize}
        super().__init__(params, defaults, deferred, stochastic_rounding, seed)


class RowWiseAdagrad(Adagrad):
    """``sum[row] += mean(g^2); w -= lr * g / (sqrt(sum[row]) + eps)``: Adagrad with one number a row, ``sum``
    ``[rows, 1]``. state_dict and arguments of ``torchrec.optim.RowWiseAdagrad``; FBGEMM calls it
    EXACT_ROWWISE_ADAGRAD.

    Source: Gupta et al., "Training Recommender Systems at Scale", 2020 (row-wise Adagrad).
    """

    _row_state = True


class Adam(FusedOptimizer):
    """Adam of the rows that are looked up alone: :class:`torch.optim.SparseAdam`, whose state_dict it has.
    Moments of other rows do not decay, as those of torch.optim.Adam do. ``exp_avg`` and ``exp_avg_sq`` have
    the table's shape, in float32. Steps are counted for a Parameter: tables that are packed into one have one
    count, also those that took no part in a step. Kingma and Ba, 2015.

    Args:
        betas: of the averages of g and of g^2.
        eps: keeps the quotient finite.
        params, lr, weight_decay, maximize, deferred, stochastic_rounding, seed, options: as of :class:`SGD`.
    """

    _step_type = int

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        weight_decay: float = 0,
        maximize: bool = False,
        deferred: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """See the class."""
        refuse(self._where, options)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, deferred, stochastic_rounding, seed)
