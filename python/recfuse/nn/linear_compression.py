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
    """A layer with one weight ``[out_features, sum(in_features)]`` for all levels, columns in their order.

    Each call splits the weight into views, without copies or caches, so every change of the weight changes
    the next result.
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
            raise wrong_type(f"{name}: in_features", in_features, "a tuple with the features of each level")
        if not 2 <= len(in_features) <= MOST_LEVELS:
            raise ArgumentValueError(
                f"{name}: in_features has {len(in_features)} levels; expected 2 to {MOST_LEVELS}, of users "
                "first, then of candidates"
            )
        self.in_features = tuple(
            integer(f"{name}: in_features[{level}]", features, 0, 2**62)
            for level, features in enumerate(in_features)
        )
        self.out_features = integer(f"{name}: out_features", out_features, 0, 2**62)
        if activation not in get_args(Activation):
            allowed = ", ".join(map(repr, get_args(Activation)))
            raise ArgumentValueError(f"{name}: activation is {activation!r}; expected one of {allowed}")
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
        """Create a layer that shares the Parameters of a linear layer.

        Args:
            linear: a linear layer over ``cat((user's features, candidate's features))``; its ``weight`` and
                ``bias`` are shared.
            in_features: the number of its features in each level, in order.
            options: ``activation`` and ``path``, if the class has them.

        Raises:
            ValueError: the number of features differs from the layer's.
            TypeError: not a linear layer, or a layer whose weight is computed (for example by a
                parametrization).
        """
        if not isinstance(linear, torch.nn.Linear):
            raise wrong_type(f"{cls.__name__}.from_linear: linear", linear, "a torch.nn.Linear")
        if not isinstance(linear.weight, torch.nn.Parameter):
            raise ArgumentTypeError(
                f"{cls.__name__}.from_linear: linear.weight is computed from other parameters; expected a "
                "Parameter. Remove its parametrization first."
            )
        has_bias = linear.bias is not None
        layer = cls(in_features, linear.out_features, bias=has_bias, device="meta", **options)
        in_features_sum = sum(layer.in_features)
        if in_features_sum != linear.in_features:
            raise ArgumentValueError(
                f"{cls.__name__}.from_linear: in_features is {layer.in_features}, {in_features_sum} in all; "
                f"expected the {linear.in_features} of linear"
            )
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)

    def reset_parameters(self) -> None:
        """Draw weight and bias as ``torch.nn.Linear``."""
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
        """Apply the layer; see :func:`recfuse.ikbo_linear`.

        With two levels pass ``x_user``, ``x_cand`` and ``cand_to_user``; with any number of levels two lists,
        of inputs and of maps, as in :func:`recfuse.ikbo_linear_chain`.
        """
        weights = self.weight.split_with_sizes(self.in_features, 1)
        if cand_to_user is None:
            if isinstance(x_user, Tensor) or isinstance(x_cand, Tensor):
                raise ArgumentTypeError(
                    f"{type(self).__name__}: cand_to_user is None; expected a tensor. Pass it, or pass two "
                    "lists, of inputs and of maps."
                )
            return ikbo_linear_chain(
                weights, x_user, x_cand, bias=self.bias, activation=self.activation, path=self.path
            )
        if len(weights) != 2:
            raise ArgumentTypeError(
                f"{type(self).__name__}: x_user, x_cand and cand_to_user are of two levels, the layer has "
                f"{len(weights)}. Pass two lists, of inputs and of maps."
            )
        if not isinstance(x_user, Tensor) or not isinstance(x_cand, Tensor):
            raise ArgumentTypeError(
                f"{type(self).__name__}: x_user or x_cand is no tensor, but cand_to_user is given; expected "
                "tensors"
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
        """Raise NotImplementedError."""
        refuse_scripting(self)

    def extra_repr(self) -> str:
        """Return the sizes and options of the layer."""
        shown = f"in_features={self.in_features}, out_features={self.out_features}"
        shown += f", bias={self.bias is not None}"
        return shown if self.activation == "none" else f"{shown}, activation={self.activation!r}"


class LinearCompression(_SplitLinear):
    """Compress ``Ku + Kc`` embeddings of a user and of a candidate to ``M``: ``W @ X``.

    The result is that of ``torch.matmul(weight, torch.cat((x_user[cand_to_user], x_cand), 1))``. Each user's
    part is computed once and added to all of the user's candidates. The ``state_dict`` has ``weight`` ``[M,
    Ku + Kc]`` and ``bias`` ``[M]``.

    Args:
        in_features: ``(Ku, Kc)``, embeddings of a user and of a candidate; or of up to four levels, the
            broadest first.
        out_features: ``M``.
        bias: add a bias to each of the ``M`` rows. Default: False.
        path: as in :func:`recfuse.ikbo_linear`.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Shape:
        - x_user: ``[U, Ku, N]``.
        - x_cand: ``[B, Kc, N]``.
        - cand_to_user: ``[B]``.
        - output: ``[B, M, N]``.

    Raises:
        ValueError: bad sizes.
        TypeError: sizes that are not integers.

    Example:
        >>> layer = recfuse.nn.LinearCompression((96, 32), 16)
        >>> layer(torch.randn(4, 96, 8), torch.randn(64, 32, 8), torch.arange(64) // 16).shape
        torch.Size([64, 16, 8])

    Note:
        Works on the CPU and on CUDA devices; the fused kernel needs compute capability 9.0 and float16 or
        bfloat16. Gradients use torch's matmuls.

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
        """Create the parameters, drawn as those of ``torch.nn.Linear``."""
        super().__init__(in_features, out_features, bias, path=path, device=device, dtype=dtype)


class IKBOLinear(_SplitLinear):
    """Apply a linear layer to users and their candidates, and compute each user's part once.

    The result is that of ``torch.nn.Linear`` on ``cat((x_user[cand_to_user], x_cand), 1)``. The
    ``state_dict`` is that of ``torch.nn.Linear(Ku + Kc, M)``; :meth:`from_linear` shares the Parameters of
    such a layer.

    Args:
        in_features: ``(Ku, Kc)``, features of a user and of a candidate; or of up to four levels, the
            broadest first.
        out_features: ``M``.
        bias: as in ``torch.nn.Linear``. Default: True.
        activation: "none", "relu", "gelu" (exact) or "silu", applied to the result. Default: "none".
        path: as in :func:`recfuse.ikbo_linear`.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Shape:
        - x_user: ``[U, Ku]``.
        - x_cand: ``[B, Kc]``.
        - cand_to_user: ``[B]``.
        - output: ``[B, M]``.

    Raises:
        ValueError: bad sizes, an unknown activation.
        TypeError: sizes that are not integers.

    Example:
        >>> linear = torch.nn.Linear(96 + 32, 64)  # over torch.cat((user, candidate), dim=1)
        >>> layer = recfuse.nn.IKBOLinear.from_linear(linear, in_features=(96, 32), activation="relu")
        >>> layer(torch.randn(4, 96), torch.randn(64, 32), torch.arange(64) // 16).shape
        torch.Size([64, 64])

    Note:
        Works on the CPU and on CUDA devices; the fused kernel needs compute capability 9.0 and float16 or
        bfloat16. Gradients use torch's matmuls.

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
        """Create the parameters, drawn as those of ``torch.nn.Linear``."""
        super().__init__(in_features, out_features, bias, activation, path=path, device=device, dtype=dtype)
