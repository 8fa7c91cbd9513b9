"""``embedding_columns``: raw values of features to pooled rows, many columns in one call.

:class:`recfuse.nn.EmbeddingColumns` makes these calls, with arguments from specifications of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._library.fake_impl import allocate_size

from recfuse.ops.autograd import once_differentiable, register
from recfuse.ops.fused_embedding_bag import fused_dtype
from recfuse.ops.library import (
    below_autograd,
    is_transformed,
    needs_derivatives,
    register_fake,
)
from recfuse.ops.updates import check_finished, unfinished

_columns = torch.ops.recfuse.embedding_columns.default
_columns_at = torch.ops.recfuse._embedding_columns_at.default
_split = torch.ops.recfuse._embedding_columns_split.default
_lookups = torch.ops.recfuse._embedding_columns_lookups.default
TENSOR_BYTES, DENSE_BYTES, INPUT_BYTES, BUFFER_BYTES = 32256, 16, 48, 8
"""Bytes of the tensors of a call on a GPU: the library's RF_COLUMN_TENSOR_BYTES etc."""


OF_HOST = "of the columns whose tables are on the host"
"""A part of each error of ``embedding_columns_split`` that numbers the columns of ``host_program``."""
Batch: TypeAlias = tuple[
    Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], int
]  # dense, values, offsets, value_weights; samples


def fits_a_gpu(n_dense: int, n_jagged: int, n_weights: int) -> bool:
    """Return whether a call on a GPU takes this number of tensors."""
    needed = n_dense * DENSE_BYTES + n_jagged * INPUT_BYTES + n_weights * BUFFER_BYTES
    return needed + BUFFER_BYTES <= TENSOR_BYTES  # a buffer may be added as padding


def embedding_columns(
    weights: Sequence[Tensor],
    program: Tensor,
    dense: Sequence[Tensor],
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    value_weights: Sequence[Tensor],
    batch: int,
    output_dim: int,
    program_on_device: Tensor | None = None,
    bounds_check: str = "on",
) -> Tensor:
    """Compute all columns of a program.

    All tensors are on the CPU, or all on one CUDA device except for ``program``, weights in page-locked
    memory, which the GPU reads there, and the last of ``dense``, which the call copies. Inputs are numbered
    from 0, dense inputs first.

    Args:
        weights: contiguous float32, float16 or bfloat16 tensors with the tables.
        program: int64 ``[words]`` on the CPU, of ``recfuse._C.embedding_columns_program``.
        dense: float32, int32 or int64 ``[batch]`` or ``[batch, values]``, of any strides.
        values: float32, int32 or int64 ``[values]`` each.
        offsets: int32 or int64 ``[features * batch + 1]``, a tensor for each of ``values``.
        value_weights: empty, or a tensor for each of ``values``: float32 ``[values]``, or without elements.
        batch: samples.
        output_dim: columns of the output, the sum of the program's columns.
        program_on_device: a copy of ``program`` on the GPU. Default: each call makes a copy.
        bounds_check: "off" drops invalid indices of columns that would raise, and trusts offsets.

    Returns:
        ``[batch, output_dim]``; in the weights' dtype if they agree, else float32.

    Raises:
        ValueError, TypeError: a bad argument, or a program that does not fit. IndexError: an invalid index.
            On a GPU, a later call or :func:`recfuse.check` raises errors of contents.
        NotImplementedError: in ``backward``; only the module's calls have gradients.

    Source: Pan et al., RECom, ASPLOS 2023.
    """
    arguments = weights, program, dense, values, offsets, value_weights, batch, output_dim
    options = (
        (program_on_device, bounds_check) if program_on_device is not None or bounds_check != "on" else ()
    )
    return _call(_columns, weights, arguments + options)


def embedding_columns_at(
    weights: Sequence[Tensor],
    program: Tensor,
    inputs: int,
    batch: int,
    output_dim: int,
    program_on_device: Tensor | None = None,
    bounds_check: str = "on",
) -> Tensor:
    """Compute all columns of a program from inputs whose addresses the library has.

    Args:
        inputs: their number, from ``recfuse._C.embedding_columns_addresses``: dense inputs first, with
            ``batch`` samples, on the weights' device. The caller keeps them and the number's owner.
        weights, program, batch, output_dim, program_on_device, bounds_check: as :func:`embedding_columns`.
    """
    arguments = weights, program, inputs, batch, output_dim, program_on_device, bounds_check
    return _call(_columns_at, weights, arguments)


def embedding_columns_split(
    weights: Sequence[Tensor],
    program: Tensor,
    inputs: Batch,
    output_dim: int,
    program_on_device: Tensor | None,
    host_weights: Sequence[Tensor],
    host_program: Tensor,
    host_inputs: Batch,
    bounds_check: str = "on",
) -> Tensor:
    """Compute all columns of a program, some of which have tables on the host.

    ``host_program`` computes the columns of the host. Its output is the last dense input of ``program``,
    float32 ``[batch, host columns]``.

    On a GPU the host's threads look rows up after the call has returned. ``host_weights`` and ``host_inputs``
    must not change until the GPU's stream has passed this call; their memory is kept. A later call, or
    :func:`recfuse.check`, raises errors of their contents, as for the others.

    Args:
        weights, program, output_dim, program_on_device, bounds_check: as :func:`embedding_columns`.
        inputs, host_inputs: dense, values, offsets, value_weights and batch, as there; those of the host are
            on the CPU, as ``host_weights``.

    Raises:
        NotImplementedError: a CUDA graph is being captured, or the GPU's streams cannot wait for the host.
            Other errors: as :func:`embedding_columns`.
    """
    device = weights, program, *inputs, output_dim, program_on_device
    host = host_weights, host_program, *host_inputs[:-1]
    return _call(_split, (*weights, *host_weights), (*device, *host, bounds_check))


def embedding_columns_lookups(
    program: Tensor,
    dense: Sequence[Tensor],
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    value_weights: Sequence[Tensor],
    batch: int,
    program_on_device: Tensor | None = None,
    bounds_check: str = "on",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lookups of a program's columns, as arguments of :func:`recfuse.fused_embedding_bag`.

    Args:
        As :func:`embedding_columns`.

    Returns:
        indices int64 ``[lookups]``, offsets int64 ``[columns with a table * batch + 1]``, and the factor of
        each lookup, float32 ``[lookups]``: without elements if all are 1. Filled samples have no lookup.
    """
    arguments = program, dense, values, offsets, value_weights, batch, program_on_device, bounds_check
    lookups: tuple[Tensor, Tensor, Tensor] = _call(_lookups, (), arguments)
    return lookups


def _call(operator: Any, weights: Sequence[Tensor], arguments: tuple[Any, ...]) -> Any:
    if is_transformed():
        return operator(*arguments)
    if unfinished:
        check_finished(weights, "a call of tables")
    if needs_derivatives(weights):
        return operator(*arguments)
    with below_autograd():
        return operator(*arguments)


@register_fake("embedding_columns", "weights", may_be_on_host="weights")
@register_fake(  # its first arguments are the same
    "_embedding_columns_split", "weights", may_be_on_host="weights"
)
def _(
    weights: Sequence[Tensor],
    program: Tensor,
    dense: Sequence[Tensor],
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    value_weights: Sequence[Tensor],
    batch: int,
    output_dim: int,
    *_: Any,
) -> Tensor:
    return _output((*dense[:1], *values[:1]), weights, program, batch, output_dim)


@register_fake("_embedding_columns_at", "weights")
def _(
    weights: Sequence[Tensor], program: Tensor, inputs: int, batch: int, output_dim: int, *_: Any
) -> Tensor:
    return _output((), weights, program, batch, output_dim)


@register_fake("_embedding_columns_lookups")
def _(
    program: Tensor,
    dense: Sequence[Tensor],
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    value_weights: Sequence[Tensor],
    batch: int,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    like = (*dense[:1], *values[:1], program)[0]
    lookups, ends, factors = (_unknown_size() for _ in range(3))
    if isinstance(ends, int) and ends == 0:  # a call of meta tensors, with a real program
        ends = int(program[_N_TABLES]) * batch + 1
    return (
        like.new_empty((lookups,), dtype=torch.int64),
        like.new_empty((ends,), dtype=torch.int64),
        like.new_empty((factors,), dtype=torch.float32),
    )


def _output(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], program: Tensor, batch: int, output_dim: int
) -> Tensor:
    """Return a fake output on the device of the inputs, or a meta tensor if the weights are meta tensors."""
    meta = [weight for weight in weights[:1] if weight.is_meta]
    like = (*meta, *inputs, *weights[:1], program)[0]
    return like.new_empty((batch, output_dim), dtype=fused_dtype([weight.dtype for weight in weights]))


_N_TABLES = 13
"""The position of the number of columns with a table: n_tables of rf_columns_header."""


def _unknown_size() -> Any:
    """Return a size that depends on the contents."""
    try:
        shape_env = torch.library.get_ctx()._shape_env
    except RuntimeError:  # a meta tensor
        shape_env = None
    return 0 if shape_env is None else allocate_size(shape_env)


_TRAIN = (
    "recfuse.embedding_columns has no gradient: call it under torch.no_grad(), or call "
    "recfuse.nn.EmbeddingColumns, which has one"
)
register("embedding_columns", once_differentiable(_columns, _TRAIN))
register("_embedding_columns_at", once_differentiable(_columns_at, _TRAIN))
register("_embedding_columns_split", once_differentiable(_split, _TRAIN))
register("_embedding_columns_lookups", once_differentiable(_lookups, _TRAIN))
