"""``QuantizedEmbeddingBag``: one table of codes, with the call of ``torch.nn.EmbeddingBag``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from recfuse._arguments import integer
from recfuse._codes import MODES
from recfuse.errors import ArgumentValueError, refuse_scripting
from recfuse.nn.quantized.buffers import ENTRIES, load_rows, move_buffers, save_rows
from recfuse.nn.quantized.rows import Rows, floats_of, new_rows
from recfuse.nn.quantized.stored import pool_quantized
from recfuse.nn.tuning import Tuning
from recfuse.ops.bags import new_feature
from recfuse.ops.embedding_bag_arguments import padding_row
from recfuse.ops.quantized.embedding_bag_quantized import bag_lookups
from recfuse.ops.quantized.fused_embedding_bag_quantized import code_bytes, dtype_name

_NAME = "nn.QuantizedEmbeddingBag"
_MOST = 2**62


class QuantizedEmbeddingBag(torch.nn.Module):
    """Pool bags of rows of one int8 or int4 table, called as :class:`torch.nn.EmbeddingBag`.

    :func:`recfuse.quantize` makes it from a ``torch.nn.EmbeddingBag`` or a
    :class:`recfuse.nn.EmbeddingBag`. Rows are codes with a scale and a bias a row, as those of
    :class:`QuantizedEmbeddingBagCollection`, which pools many tables in one call. The module has no
    Parameters, and keeps its dtypes if the model is moved to another.

    The ``state_dict`` has the entries ``weight`` (the codes), ``parameters`` and ``bits``. The ``weight`` of
    a module of floats is quantised when it is loaded.

    Args:
        num_embeddings, embedding_dim: the size of the table. A new table has zeros, to be loaded.
        mode: "sum", "mean" or "max". Default: "mean".
        include_last_offset: ``offsets`` ends with the end of the last bag. Default: False.
        padding_idx: skip lookups of this row; a negative number counts from the end.
        dtype: "int8" or "int4". Default: "int8".
        output_dtype: torch.float32, torch.float16 or torch.bfloat16. Default: torch.float32.
        device: the device of the table.

    Attributes:
        num_embeddings, embedding_dim, mode, include_last_offset, padding_idx, dtype, output_dtype: as above.
        codes: uint8 ``[rows, bytes]``.
        scale_bias: the scale and the bias of each row, float16 ``[rows, 2]``.

    Shape:
        - input: ``[lookups]`` with ``offsets``, or ``[bags, n]``.
        - offsets: ``[bags]``, or ``[bags + 1]`` with ``include_last_offset``.
        - output: ``[bags, embedding_dim]``.

    Raises:
        TypeError: a bad argument.
        ValueError: a bad argument; a row of int4 that is not a whole number of bytes.

    Example:
        >>> table = recfuse.nn.QuantizedEmbeddingBag(1000, 16, mode="sum", dtype="int4")
        >>> table(torch.tensor([1, 5, 7]), torch.tensor([0, 2])).shape
        torch.Size([2, 16])

    Note:
        The table is on the CPU or on a CUDA device. Per-sample weights have a gradient. A bad index or offset
        on a GPU is left out; the next call with this table, or :func:`recfuse.check`, raises the error.

    Source: Guan et al., Post-Training 4-bit Quantization on Embedding Tables, 2019 (a scale and a bias a
    row).
    """

    codes: Tensor
    scale_bias: Tensor
    _float_form: tuple[type[torch.nn.EmbeddingBag], dict[str, Any]]  # of dequantize: class, options

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        dtype: str = "int8",
        output_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        """Create a table of zeros; see the class."""
        super().__init__()
        if mode not in MODES:
            raise ArgumentValueError(f'recfuse.{_NAME}: mode is {mode!r}; expected "sum", "mean" or "max"')
        sizes = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
        rows_count, dim = (
            integer(f"recfuse.{_NAME}: {name}", size, 0, _MOST) for name, size in sizes.items()
        )
        code_bytes(dim, dtype, f"recfuse.{_NAME}")
        where = torch.empty(0, device=device).device
        rows = new_rows(dtype, rows_count, dim, where, f"recfuse.{_NAME}")
        self._take(rows, mode, include_last_offset, padding_idx, output_dtype)

    def _take(
        self,
        rows: Rows,
        mode: str,
        include_last_offset: bool,
        padding_idx: int | None,
        output_dtype: torch.dtype,
    ) -> None:
        """Take the rows of a table and the options of calls."""
        dtype_name(output_dtype, f"recfuse.{_NAME}")
        padding = padding_row(padding_idx, rows.data)
        self.num_embeddings, self.embedding_dim = rows.data.shape[0], rows.dim
        self.mode, self.include_last_offset = mode, include_last_offset
        self.padding_idx = None if padding < 0 else padding
        self.dtype, self.output_dtype = rows.kind, output_dtype
        self.register_buffer("codes", rows.data, persistent=False)
        self.register_buffer("scale_bias", rows.parameters, persistent=False)
        with torch.inference_mode(False):
            self._features = new_feature(self.num_embeddings, rows.dim, MODES.index(mode), padding)
        self._tuning = Tuning(1)
        self._float_form = torch.nn.EmbeddingBag, {}

    @property
    def rows(self) -> Rows:
        """The rows, views of the buffers."""
        return Rows(self.dtype, self.embedding_dim, self.codes, self.scale_bias)

    @property
    def weight(self) -> Tensor:
        """The values, float32 ``[rows, dim]``: a new tensor, computed at each access."""
        return floats_of(self.rows, torch.float32)

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Pool bags of rows.

        Args:
            input: int32 or int64; ``[lookups]`` with ``offsets``, or ``[bags, n]`` without.
            offsets: ``[bags]``, or ``[bags + 1]`` with ``include_last_offset``.
            per_sample_weights: floating weights of the shape of ``input``; mode "sum" only. They may require
                a gradient.

        Returns:
            Tensor: ``[bags, embedding_dim]`` of ``output_dtype``.

        Raises:
            IndexError: as :func:`recfuse.ops.embedding_bag_quantized`, and so are other errors.
        """
        lookups = bag_lookups(
            _NAME, input, self.codes, offsets, per_sample_weights, self.mode, self.include_last_offset
        )
        return pool_quantized(
            [self.codes],
            [self.scale_bias],
            self._features,
            self.embedding_dim,
            lookups,
            self.output_dtype,
            self._tuning,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedEmbeddingBag:
        """Move the table."""
        move_buffers(self, fn)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        save_rows(self.rows, destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Copy entries into the table; floats are quantised."""
        load_rows(self.rows, state_dict, prefix, missing_keys, error_msgs)
        if strict:
            own = {prefix + name for name in ENTRIES}
            found = (key for key in state_dict if key.startswith(prefix))
            unexpected_keys += [key for key in found if key not in own]

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise NotImplementedError for torch.jit.script."""
        refuse_scripting(self)

    def extra_repr(self) -> str:
        """Return the size, the dtype, and the options of calls."""
        options = "".join(
            f", {name}={getattr(self, name)}"
            for name in ("padding_idx", "include_last_offset")
            if getattr(self, name) not in (None, False)
        )
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.dtype}, mode={self.mode!r}{options}"
