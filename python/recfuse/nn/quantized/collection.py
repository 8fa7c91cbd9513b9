"""``QuantizedEmbeddingBagCollection``: tables of codes and of floats, pooled in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse._arguments import wrong_type
from recfuse.data.forms import is_keyed, of_keys
from recfuse.errors import ArgumentValueError, refuse_scripting
from recfuse.nn.collection import FusedEmbeddingBagCollection
from recfuse.nn.descriptions import Table
from recfuse.nn.packed.layout import Layout, TableSpec, WeightForm, arrange, layout_of
from recfuse.nn.packed.pooling import refuse_proxy
from recfuse.nn.quantized.buffers import ENTRIES, load_rows, move_buffers, save_rows
from recfuse.nn.quantized.prepacked import prepacked_rows
from recfuse.nn.quantized.rows import Rows, kinds_of, new_rows, part_of
from recfuse.nn.quantized.stored import pool_quantized
from recfuse.nn.quantized.table import QuantizedTable
from recfuse.nn.tuning import Tuning
from recfuse.ops import fused_dtype
from recfuse.ops.quantized.fused_embedding_bag_quantized import dtype_name

_WHERE = "recfuse.nn.QuantizedEmbeddingBagCollection"


class QuantizedEmbeddingBagCollection(torch.nn.Module):
    """Pool tables of int8 and int4 rows, and of floats, in one call.

    :func:`recfuse.quantize` makes it from a trained collection. Rows are codes of 8 or 4 bits, with a scale
    and a bias a row in float16; the values are ``scale * code + bias``. All are buffers: the collection has
    no Parameters, and only ``per_sample_weights`` has a gradient. It keeps its dtypes if the model is moved
    to another (``model.half()``).

    The ``state_dict`` has three entries for a quantised table, ``embedding_bags.<table>.weight`` (the codes),
    ``embedding_bags.<table>.parameters`` and ``embedding_bags.<table>.bits``; it loads without the last too.
    Entries of floats, from a collection before its quantisation,
    are quantised when they are loaded.

    Args:
        tables: as :class:`FusedEmbeddingBagCollection`. New tables are zeros, to be loaded.
        dtype: "int8" or "int4" for all tables, or a dict of them by table; other tables stay floats.
        output_dtype: torch.float32, torch.float16 or torch.bfloat16. Default: torch.float32.
        device: the device of the tables.

    Attributes:
        tables: the tables by name, in order, each a :class:`QuantizedTable`. Also ``embedding_bags``.
        feature_names: the names of the features, in the order of the input and the output.
        feature_dims: the columns of each feature in the output.
        output_dtype: the dtype of the output.

    Shape:
        - indices: ``[lookups]``, feature by feature, bag by bag.
        - offsets: ``[features * bags + 1]``.
        - output: ``[bags, sum(feature_dims)]``.

    Raises:
        TypeError: a bad argument.
        ValueError: a bad argument; a row of int4 that is not a whole number of bytes.

    Example:
        >>> collection = recfuse.nn.QuantizedEmbeddingBagCollection([(1000, 16), (50, 8)], "int8")
        >>> indices, offsets = torch.tensor([3, 999, 7, 49]), torch.tensor([0, 1, 2, 3, 4])
        >>> collection(indices, offsets).shape
        torch.Size([2, 24])

    Note:
        Tables are on the CPU, or on one CUDA device. A bad index or offset on a GPU is left out; the next
        call with these tables, or :func:`recfuse.check`, raises the error.

    Source: Guan et al., Post-Training 4-bit Quantization on Embedding Tables, 2019 (a scale and a bias a
    row).
    """

    layout: Layout
    kinds: list[str]  # of each matrix
    feature_names: list[str]
    feature_dims: list[int]
    output_dtype: torch.dtype

    def __init__(
        self,
        tables: Iterable[Any],
        dtype: str | Mapping[str, str] = "int8",
        *,
        output_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        """Create tables of zeros; see the class."""
        super().__init__()
        described = FusedEmbeddingBagCollection(tables, device="meta")
        where = torch.empty(0, device=device).device
        self._create(described, described.feature_names, dtype, output_dtype, where)

    def _create(
        self,
        of: Any,
        feature_names: Sequence[str],
        dtype: Any,
        output_dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        """Create zeros for the tables of a packed module of floats."""
        layout, matrices = of.layout, of.packed_weights()
        names = [spec.name for spec in layout.tables]
        dims = [spec.embedding_dim for spec in layout.tables]
        floats = [matrices[spec.matrix].dtype for spec in layout.tables]
        kinds = kinds_of(dtype, names, floats, dims, "recfuse.quantize")
        self.output_dtype = fused_dtype(floats) if output_dtype is None else output_dtype
        self._output_name = dtype_name(self.output_dtype, _WHERE)
        self.feature_names = list(feature_names)
        self._place(layout.tables, kinds, layout.table_of_feature, device)

    def _place(
        self, specs: Sequence[TableSpec], kinds: Sequence[str], features: Sequence[int], device: torch.device
    ) -> None:
        """Create the buffers: tables of a kind and dim share one."""
        forms = []
        for spec, kind in zip(specs, kinds, strict=True):
            row = new_rows(kind, 0, spec.embedding_dim, device).data
            forms.append(
                WeightForm(
                    spec.num_embeddings, row.shape[1], row.dtype, device, tag=(kind, spec.embedding_dim)
                )
            )
        matrices = arrange(forms)
        self.layout = layout_of(specs, range(len(specs)), features, matrices)
        self.feature_dims = list(self.layout.dims)
        self.kinds, self._dims, self._names = [], [], []
        for matrix in matrices:
            number = matrix.members[0][0]
            kind, dim = kinds[number], specs[number].embedding_dim
            rows = new_rows(kind, matrix.rows, dim, device)
            self.kinds.append(kind)
            self._dims.append(dim)
            self._names.append((f"{kind}_dim{dim}", f"{kind}_dim{dim}_parameters"))
            self.register_buffer(self._names[-1][0], rows.data, persistent=False)
            self.register_buffer(self._names[-1][1], rows.parameters, persistent=False)
        self._tuning = Tuning(len(self.layout.dims))

    @classmethod
    def from_prepacked(
        cls,
        tables: Mapping[str, Tensor] | Sequence[Tensor],
        bits: int,
        *,
        mode: str = "sum",
        output_dtype: torch.dtype = torch.float32,
    ) -> QuantizedEmbeddingBagCollection:
        """Create a collection that reads tables of torch's quantised operators where they lie.

        Args:
            tables: results of ``torch.ops.quantized.embedding_bag_byte_prepack`` or
                ``embedding_bag_4bit_prepack``, uint8 ``[rows, codes and parameters]``; a dict has names.
            bits: 8 or 4, as the operator of torch.
            mode: "sum", "mean" or "max".
            output_dtype: as of the class.

        Returns:
            QuantizedEmbeddingBagCollection: its codes are views of the tables. Entries of its ``state_dict``
            are apart, as of every other collection.

        Raises:
            TypeError: a bad argument.
            ValueError: a bad argument.

        Example:
            >>> packed = torch.ops.quantized.embedding_bag_4bit_prepack(torch.randn(100, 16))
            >>> collection = recfuse.nn.QuantizedEmbeddingBagCollection.from_prepacked([packed], 4)
            >>> collection(torch.tensor([3, 99]), torch.tensor([0, 2])).shape
            torch.Size([1, 16])

        Note:
            A GPU reads parameters of float16, those of 4 bits.
        """
        found = prepacked_rows(tables, bits)
        described = FusedEmbeddingBagCollection(
            [Table(rows.data.shape[0], rows.dim, name, mode) for name, rows in found.items()], device="meta"
        )
        self = cls.__new__(cls)
        torch.nn.Module.__init__(self)
        self.output_dtype = output_dtype
        self._output_name = dtype_name(output_dtype, _WHERE)
        self.feature_names = list(described.feature_names)
        self._take(described.layout.tables, list(found.values()), described.layout.table_of_feature)
        return self

    def _take(self, specs: Sequence[TableSpec], rows: Sequence[Rows], features: Sequence[int]) -> None:
        """Take rows of tables, each as a buffer of its own."""
        forms = [
            WeightForm(one.data.shape[0], one.data.shape[1], one.data.dtype, one.data.device, tag=number)
            for number, one in enumerate(rows)
        ]
        self.layout = layout_of(specs, range(len(specs)), features, arrange(forms))
        self.feature_dims = list(self.layout.dims)
        self.kinds, self._dims = [one.kind for one in rows], [one.dim for one in rows]
        self._names = [(f"{spec.name}_codes", f"{spec.name}_parameters") for spec in specs]
        for (data, parameters), one in zip(self._names, rows, strict=True):
            self.register_buffer(data, one.data, persistent=False)
            self.register_buffer(parameters, one.parameters, persistent=False)
        self._tuning = Tuning(len(self.layout.dims))

    @property
    def tables(self) -> dict[str, QuantizedTable]:
        """The tables by name, in order."""
        return {spec.name: QuantizedTable(self, number) for number, spec in enumerate(self.layout.tables)}

    @property
    def embedding_bags(self) -> dict[str, QuantizedTable]:
        """The tables, under their name in TorchRec and in the ``state_dict``."""
        return self.tables

    def rows_of(self, number: int) -> Rows:
        """Return the rows of a table, as views.

        Args:
            number: the position of the table.
        """
        spec = self.layout.tables[number]
        data, parameters = (self.get_buffer(name) for name in self._names[spec.matrix])
        rows = Rows(self.kinds[spec.matrix], self._dims[spec.matrix], data, parameters)
        return part_of(rows, spec.first_row, spec.num_embeddings)

    def forward(
        self, indices: Any, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Pool every feature.

        Args:
            indices: int32 or int64 ``[lookups]``, feature by feature; or only a TorchRec KeyedJaggedTensor,
                with a key for each feature, in any order.
            offsets: int32 or int64 ``[features * bags + 1]``, as :class:`FusedEmbeddingBagCollection` takes
                it.
            per_sample_weights: floating ``[lookups]``; every table must have mode "sum". It may require a
                gradient.

        Returns:
            Tensor: ``[bags, sum(feature_dims)]`` of ``output_dtype``, features side by side.

        Raises:
            TypeError: a bad argument.
            ValueError: a bad argument.
            IndexError: an index outside its table; names feature and bag. On a GPU the next call, or
                :func:`recfuse.check`, raises it.
        """
        if not isinstance(indices, Tensor):
            refuse_proxy(indices)
            if not is_keyed(indices):
                raise wrong_type(f"{_WHERE}: indices", indices, "a torch.Tensor or a KeyedJaggedTensor")
            if offsets is not None or per_sample_weights is not None:
                raise ArgumentValueError(
                    f"{_WHERE}: offsets or per_sample_weights is given with a KeyedJaggedTensor, which has "
                    "its own; expected None"
                )
            indices, offsets, per_sample_weights = of_keys(indices, self.feature_names)
        elif offsets is None:
            raise ArgumentValueError(
                f"{_WHERE}: offsets is None; expected a 1-D tensor of features * bags + 1 elements when "
                "indices is a tensor"
            )
        return self._pool(indices, offsets, per_sample_weights)

    def _pool(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None) -> Tensor:
        buffers, layout = self._buffers, self.layout
        weights: list[Tensor] = [buffers[data] for data, _ in self._names]  # type: ignore[misc]
        parameters: list[Tensor] = [buffers[name] for _, name in self._names]  # type: ignore[misc]
        lookups = indices, offsets, per_sample_weights
        return pool_quantized(
            weights, parameters, layout.features, layout.output_dim, lookups, self.output_dtype, self._tuning
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedEmbeddingBagCollection:
        """Move the buffers; their dtypes are a part of the format, so they stay."""
        move_buffers(self, fn)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for number, spec in enumerate(self.layout.tables):
            entries = f"{prefix}embedding_bags.{spec.name}."
            save_rows(self.rows_of(number), destination, entries, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Copy entries into the tables; floats are quantised."""
        own = set()
        for number, spec in enumerate(self.layout.tables):
            entries = f"{prefix}embedding_bags.{spec.name}."
            own |= {entries + name for name in ENTRIES}
            load_rows(self.rows_of(number), state_dict, entries, missing_keys, error_msgs)
        if strict:
            found = (key for key in state_dict if key.startswith(prefix))
            unexpected_keys += [key for key in found if key not in own]

    def __prepare_scriptable__(self) -> None:
        """Raise NotImplementedError for torch.jit.script."""
        refuse_scripting(self)

    def extra_repr(self) -> str:
        """Return the numbers of features, rows, columns and bytes."""
        rows = sum(table.num_embeddings for table in self.layout.tables)
        size = sum(
            buffer.numel() * buffer.itemsize for buffer in self._buffers.values() if buffer is not None
        )
        columns = self.layout.output_dim
        return f"features={len(self.feature_names)}, rows={rows}, output_dim={columns}, bytes={size}"
