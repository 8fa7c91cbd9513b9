"""Linear layers over users and their candidates: ``LinearCompression`` and ``IKBOLinear``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar, get_args

import torch
from torch import Tensor

from recfuse._arguments import integer, wrong_type
from recfuse.errors import ArgumentTypeError, ArgumentValueError, refuse_scripting
from recfuse.ops import ikbo_linear, ikbo_linear_chain
from recfuse.ops.ikbo_linear import MOST_LEVELS, Activation

_Layer = TypeVar("_Layer", bound="_SplitLinear")


class _SplitLinear(torch.nn.Module):
    """One weight ``[out_features, sum(in_features)]``, whose columns are those of the levels, in order.

    The weight is split by views at each call: nothing is copied or kept, so whatever changes the weight
    changes the next result.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: Sequence[int],
        out_features: int,
        bias: bool,
        activation: Activation = "none",
        *,
        path: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if not isinstance(in_features, Sequence) or isinstance(in_features, str):
            raise wrong_type(f"{name}: in_features", in_features, "a tuple: the features of each level")
        if not 2 <= len(in_features) <= MOST_LEVELS:
            raise ArgumentValueError(
                f"{name}: in_features has {len(in_features)} levels, must have 2 to {MOST_LEVELS}: those of "
                "users, then of candidates"
            )
        self.in_features = tuple(
            integer(f"{name}: in_features[{level}]", features, 0, 2**62)
            for level, features in enumerate(in_features)
        )
        self.out_features = integer(f"{name}: out_features", out_features, 0, 2**62)
        if activation not in get_args(Activation):
            allowed = ", ".join(map(repr, get_args(Activation)))
            raise ArgumentValueError(f"{name}: activation is {activation!r}, must be one of {allowed}")
        self.activation, self.path = activation, path
        shape = self.out_features, sum(self.in_features)
        self.weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(self.out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls: type[_Layer], linear: torch.nn.Linear, in_features: Sequence[int], **options: Any
    ) -> _Layer:
        """A layer with the very Parameters of one over ``cat((user's features, candidate's features))``.

        Args:
            linear: whose ``weight`` and ``bias`` become this layer's own.
            in_features: how many of its features are of each level, in their order.
            options: ``activation`` and ``path``, where the class has them.

        Raises:
            ValueError: the features are not as many as the layer's. TypeError: it is none, or its weight is
                computed (by a parametrization, say).
        """
        if not isinstance(linear, torch.nn.Linear):
            raise wrong_type(f"{cls.__name__}.from_linear: linear", linear, "a torch.nn.Linear")
        if not isinstance(linear.weight, torch.nn.Parameter):
            raise ArgumentTypeError(
                f"{cls.__name__}.from_linear: linear.weight is computed from other parameters, must be a "
                "Parameter; remove its parametrization first"
            )
        has_bias = linear.bias is not None
        layer = cls(in_features, linear.out_features, bias=has_bias, device="meta", **options)
        found = sum(layer.in_features)
        if found != linear.in_features:
            raise ArgumentValueError(
                f"{cls.__name__}.from_linear: in_features is {layer.in_features}, {found} in all, must be "
                f"the {linear.in_features} of linear"
            )
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)

    def reset_parameters(self) -> None:
        """Draws weight and bias as ``torch.nn.Linear`` does."""
        if self.weight.numel() > 0:
            torch.nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(max(self.weight.shape[1], 1))
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def forward(
        self,
        x_user: Tensor | Sequence[Tensor],
        x_cand: Tensor | Sequence[Tensor],
        cand_to_user: Tensor | None = None,
    ) -> Tensor:
        """Applies the layer; see :func:`recfuse.ikbo_linear`.

        With two levels ``x_user``, ``x_cand`` and ``cand_to_user``; with any number two lists, of inputs and
        of maps, as :func:`recfuse.ikbo_linear_chain` has them.
        """
        weights = self.weight.split_with_sizes(self.in_features, 1)
        if cand_to_user is None:
            if isinstance(x_user, Tensor) or isinstance(x_cand, Tensor):
                raise ArgumentTypeError(
                    f"{type(self).__name__}: cand_to_user is None, must be a tensor; or pass two lists, of "
                    "inputs and of maps"
                )
            return ikbo_linear_chain(
                weights, x_user, x_cand, bias=self.bias, activation=self.activation, path=self.path
            )
        if len(weights) != 2:
            raise ArgumentTypeError(
                f"{type(self).__name__}: x_user, x_cand and cand_to_user are of two levels, the layer has "
                f"{len(weights)}; pass two lists, of inputs and of maps"
            )
        if not isinstance(x_user, Tensor) or not isinstance(x_cand, Tensor):
            raise ArgumentTypeError(
                f"{type(self).__name__}: x_user and x_cand must be tensors beside cand_to_user"
            )
        w_user, w_cand = weights
        return ikbo_linear(
            w_user,
            w_cand,
            x_user,
            x_cand,
            cand_to_user,
            bias=self.bias,
            activation=self.activation,
            path=self.path,
        )

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuses."""
        refuse_scripting(self)

    def extra_repr(self) -> str:
        """What the layer is, for ``print``."""
        shown = f"in_features={self.in_features}, out_features={self.out_features}"
        shown += f", bias={self.bias is not None}"
        return shown if self.activation == "none" else f"{shown}, activation={self.activation!r}"


class LinearCompression(_SplitLinear):
    """Compresses the embeddings of a user and of a candidate, ``Ku + Kc`` of them, to ``M``: ``W @ X``.

    As ``torch.matmul(weight, torch.cat((x_user[cand_to_user], x_cand), 1))``, with each user's part computed
    once and added to all of its candidates'.

    Args:
        in_features: ``(Ku, Kc)``: embeddings of a user and of a candidate; or of up to four levels, the
            broadest first.
        out_features: ``M``.
        bias: whether each of the ``M`` rows has one.
        path: as of :func:`recfuse.ikbo_linear`.
        device, dtype: of the parameters.

    The state_dict has ``weight`` ``[M, Ku + Kc]`` and, with it, ``bias`` ``[M]``.

    Source: IKBO (in-kernel broadcast optimization), section 2.
    """

    def __init__(
        self,
        in_features: Sequence[int],
        out_features: int,
        bias: bool = False,
        *,
        path: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Makes the parameters, drawn as those of ``torch.nn.Linear``."""
        super().__init__(in_features, out_features, bias, path=path, device=device, dtype=dtype)


class IKBOLinear(_SplitLinear):
    """``torch.nn.Linear`` over ``cat((x_user[cand_to_user], x_cand), 1)``, each user's part computed once.

    Args:
        in_features: ``(Ku, Kc)``: features of a user and of a candidate; or of up to four levels, the
            broadest first.
        out_features: ``M``.
        bias: as of ``torch.nn.Linear``.
        activation: "none", "relu", "gelu" (exact) or "silu", of the result.
        path: as of :func:`recfuse.ikbo_linear`.
        device, dtype: of the parameters.

    The state_dict is that of ``torch.nn.Linear(Ku + Kc, M)``; :meth:`from_linear` takes one's parameters.
    Inputs ``[U, Ku]`` and ``[B, Kc]`` give ``[B, M]``.

    Source: IKBO (in-kernel broadcast optimization), section 2.
    """

    def __init__(
        self,
        in_features: Sequence[int],
        out_features: int,
        bias: bool = True,
        activation: Activation = "none",
        *,
        path: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Makes the parameters, drawn as those of ``torch.nn.Linear``."""
        super().__init__(in_features, out_features, bias, activation, path=path, device=device, dtype=dtype)
