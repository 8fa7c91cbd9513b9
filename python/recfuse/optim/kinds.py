"""Optimizers of embedding tables."""

from __future__ import annotations

from typing import Any

from recfuse.ops.training.optimizers import kind_of
from recfuse.optim.base import FusedOptimizer
from recfuse.optim.groups import refuse

_COMMON = {"maximize": False, "differentiable": False, "foreach": None, "fused": None}


class SGD(FusedOptimizer):
    """Stochastic gradient descent: ``w -= lr * (g + weight_decay * w)``, of the looked-up rows.

    ``state_dict`` and options are those of :class:`torch.optim.SGD` without momentum.

    Args:
        params: Parameters or param groups, as in any optimizer; or a module that has only tables.
        lr: learning rate. Default: 1e-3.
        weight_decay: L2 penalty, of looked-up rows only. Default: 0.
        maximize: add the step instead of subtracting it. Default: False.
        deferred: update rows in ``step()``, by sparse gradients, instead of inside ``backward()``. Default:
            False.
        stochastic_rounding: round float16 and bfloat16 tables at random instead of to nearest. Default:
            False.
        seed: seed of that rounding. Default: 0.
        options: options of torch's optimizer; only values that switch an option off are allowed.

    Raises:
        TypeError: no tables. See :mod:`recfuse.optim` for errors of later calls.
        ValueError: an option without meaning here.

    Example:
        >>> table = recfuse.nn.EmbeddingBag(100, 16, mode="sum")
        >>> optimizer = recfuse.optim.SGD(table, lr=0.1)
        >>> table(torch.tensor([[1, 2], [3, 4]])).sum().backward()  # updates rows 1 to 4
        >>> optimizer.step()

    Note:
        Works on the CPU and on CUDA devices. Parameters have no gradients unless ``deferred=True``.

    Source: FBGEMM's table-batched embedding (updates in the backward pass).
    """

    _kind = kind_of("SGD")

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
        refuse(self._prefix, options)
        defaults = {"lr": lr, "momentum": 0, "dampening": 0, "weight_decay": weight_decay, "nesterov": False}
        defaults |= {**_COMMON, "maximize": maximize}
        super().__init__(params, defaults, deferred, stochastic_rounding, seed)


class Adagrad(FusedOptimizer):
    """Adagrad: ``sum += g^2; w -= lr * g / (sqrt(sum) + eps)``, of the looked-up rows.

    ``g + weight_decay * w`` takes the place of g. ``sum`` has the shape of the table, in float32.
    ``state_dict`` and options are those of :class:`torch.optim.Adagrad`.

    Args:
        params, lr, weight_decay, maximize, deferred, stochastic_rounding, seed, options: as in :class:`SGD`.
        initial_accumulator_value: the initial value of ``sum``. Default: 0.
        eps: a number that keeps the quotient finite. Default: 1e-10.

    Raises:
        TypeError: as :class:`SGD`.
        ValueError: as :class:`SGD`.

    Example:
        >>> table = recfuse.nn.EmbeddingBag(100, 16, mode="sum")
        >>> optimizer = recfuse.optim.Adagrad(table, lr=0.1)
        >>> table(torch.tensor([[1, 2], [3, 4]])).sum().backward()
        >>> optimizer.step()

    Note:
        Works on the CPU and on CUDA devices. Parameters have no gradients unless ``deferred=True``.

    Source: Duchi et al., 2011; FBGEMM's table-batched embedding (updates in the backward pass).
    """

    _kind = kind_of("Adagrad")

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
        refuse(self._prefix, options)
        defaults = {"lr": lr, "lr_decay": 0, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"initial_accumulator_value": initial_accumulator_value, **_COMMON, "maximize": maximize}
        super().__init__(params, defaults, deferred, stochastic_rounding, seed)


class RowWiseAdagrad(Adagrad):
    """Row-wise Adagrad: ``sum[row] += mean(g^2); w -= lr * g / (sqrt(sum[row]) + eps)``.

    ``sum`` is ``[rows, 1]``, a number per row. ``state_dict`` and arguments are those of
    ``torchrec.optim.RowWiseAdagrad``; FBGEMM's name is EXACT_ROWWISE_ADAGRAD.

    Args:
        params, lr, weight_decay, maximize, deferred, stochastic_rounding, seed, options: as in :class:`SGD`.
        initial_accumulator_value, eps: as in :class:`Adagrad`.

    Raises:
        TypeError: as :class:`SGD`.
        ValueError: as :class:`SGD`.

    Example:
        >>> tables = recfuse.nn.FusedEmbeddingBagCollection([(1000, 16), (50, 16)])
        >>> optimizer = recfuse.optim.RowWiseAdagrad(tables, lr=0.1)
        >>> tables(torch.tensor([3, 999, 7, 49]), torch.tensor([0, 1, 2, 3, 4])).sum().backward()
        >>> optimizer.step()

    Note:
        Works on the CPU and on CUDA devices. Parameters have no gradients unless ``deferred=True``.

    Source: Gupta et al., "Training Recommender Systems at Scale", 2020 (row-wise Adagrad).
    """

    _kind = kind_of("RowWiseAdagrad")


class Adam(FusedOptimizer):
    """Adam of the looked-up rows only, as :class:`torch.optim.SparseAdam`, whose ``state_dict`` it has.

    Moments of other rows do not decay, unlike in torch.optim.Adam. ``exp_avg`` and ``exp_avg_sq`` have the
    shape of the table, in float32. A Parameter has a single number of steps: all tables in a packed
    Parameter share it, also tables without a gradient in a step.

    Args:
        params, lr, weight_decay, maximize, deferred, stochastic_rounding, seed, options: as in :class:`SGD`.
        betas: decay rates of the averages of g and of g^2. Default: (0.9, 0.999).
        eps: a number that keeps the quotient finite. Default: 1e-8.

    Raises:
        TypeError: as :class:`SGD`.
        ValueError: as :class:`SGD`.

    Example:
        >>> table = recfuse.nn.EmbeddingBag(100, 16, mode="sum")
        >>> optimizer = recfuse.optim.Adam(table, lr=0.01)
        >>> table(torch.tensor([[1, 2], [3, 4]])).sum().backward()
        >>> optimizer.step()

    Note:
        Works on the CPU and on CUDA devices. Parameters have no gradients unless ``deferred=True``.

    Source: Kingma and Ba, 2015; FBGEMM's table-batched embedding (updates in the backward pass).
    """

    _kind = kind_of("Adam")

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
        refuse(self._prefix, options)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, deferred, stochastic_rounding, seed)
