"""``EmbeddingColumns``: from raw values of features to pooled rows, all columns in one call."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from recfuse._arguments import wrong_type
from recfuse._codes import DTYPES, MODES
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.nn.columns import json
from recfuse.nn.columns.addresses import Addresses
from recfuse.nn.columns.batch import Reader
from recfuse.nn.columns.checks import check_columns, check_values, differentiable, tables_of
from recfuse.nn.columns.groups import ColumnGroup
from recfuse.nn.columns.host import HostSplit, Lookup, inputs_to_device, packed_to_device
from recfuse.nn.columns.inputs import Inputs
from recfuse.nn.columns.packed import PackedColumns
from recfuse.nn.columns.placement import HostTables, form_of, size_of
from recfuse.nn.columns.programs import is_captured
from recfuse.nn.columns.reference import ReferenceColumns, evaluate
from recfuse.nn.columns.specs import Column, FeatureRef, TableColumn
from recfuse.nn.packed.layout import TableSpec, arrange, layout_of
from recfuse.nn.packed.pooling import has_kernel, on_gpu, refuse_proxy
from recfuse.ops.embedding_columns import fits_a_gpu
from recfuse.ops.library import needs_derivatives

_WHERE = "recfuse.nn.EmbeddingColumns"


class EmbeddingColumns(HostTables):
    """Compute feature columns in one call, from raw values to pooled rows, and write them side by side.

    A column turns the values of a sample into rows of its table, in a few steps, and pools the rows. Values
    become rows exactly as in :meth:`to_torch`, the specification in plain PyTorch.

    Tables of the same dtype and dim share a Parameter ``[rows, dim]``, as in
    :class:`FusedEmbeddingBagCollection`: ``tables[name].weight`` is a view, and the ``state_dict`` has an
    entry per table, ``tables.<name>.weight``.
    New tables are drawn from a normal distribution, as in torch.nn.Embedding.

    The first batch of each form (dense, jagged, keyed) creates a program, at most 64 MiB in all. A program
    serves all batch sizes, but only a single width: if lists are padded to the longest of a batch, use jagged
    entries.

    Args:
        columns: specifications of :mod:`recfuse.nn.columns`, in the order of the output.
        sparse: make gradients sparse COO tensors, coalesced. Not with pooling "max". The optimizers of
            :mod:`recfuse.optim` do not need it. Default: False.
        device: the device of the tables.
        dtype: float32, float16 or bfloat16, for tables whose column gives none. Default: float32.
        bounds_check: "on" raises for indices with ``invalid="error"``, and for bad offsets; "off" drops such
            indices, and trusts offsets. Default: "on".
        host_tables: a size, as a number of bytes or a text. A larger table stays in host memory, page-locked,
            when the module moves to a GPU, unless its column's ``placement`` decides. None: no table does.
            Rows of frozen tables (``requires_grad_(False)``) are read after the call returns, and the GPU's
            stream waits for them: wait for the GPU before you change such a table or a packed batch on the
            host, and before you drop a module that a graph uses. docs/columns.md has the rules. Default:
            "256MiB".

    Attributes:
        specs: the specifications.
        columns: the slice of the output of each column, by name.
        output_dim: the columns of the output.
        tables: the tables by name, in order.

    Shape:
        - batch: an entry per feature: ``[batch]``, ``[batch, width]``, or jagged; see :meth:`forward`.
        - output: ``[batch, output_dim]``.

    Raises:
        TypeError: a bad argument.
        ValueError: a name that occurs twice, columns that name one table with different sizes.
        MemoryError: not enough memory for the tables; names the largest. It is a torch.OutOfMemoryError too.

    Example:
        >>> from recfuse.nn.columns import Bucketize, Identity
        >>> age = Bucketize("age", boundaries=[18, 25, 35, 50, 65], embedding_dim=8)
        >>> columns = recfuse.nn.EmbeddingColumns([age, Identity("tags", 5000, 16, invalid="drop")])
        >>> tags = torch.tensor([5, 7, 4999]), torch.tensor([0, 2, 3])  # values, offsets
        >>> columns({"age": torch.tensor([17.0, 40.0]), "tags": tags}).shape
        torch.Size([2, 24])

    Note:
        Works on the CPU and on CUDA devices. Tables have gradients; values have none.

    Source: Pan et al., RECom, ASPLOS 2023.
    """

    _tables_name = "tables"

    def __init__(
        self,
        columns: Iterable[Column],
        *,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        bounds_check: str = "on",
        host_tables: str | int | None = "256MiB",
    ) -> None:
        """Create new tables; see the class."""
        super().__init__()
        if not isinstance(columns, Iterable) or isinstance(columns, (str, bytes)):
            needed = "an iterable of columns. Use from_json for a list of mappings."
            raise wrong_type(f"{_WHERE}: columns", columns, needed)
        self.specs: tuple[Column, ...] = tuple(columns)
        self.bounds_check = bounds_check
        check_columns(self.specs, sparse)
        if bounds_check not in ("on", "off"):
            raise ArgumentValueError(f'{_WHERE}: bounds_check is {bounds_check!r}; expected "on" or "off"')
        if dtype not in DTYPES:
            raise ArgumentTypeError(
                f"{_WHERE}: dtype is {dtype!r}; expected torch.float32, torch.float16 or torch.bfloat16"
            )
        threshold = size_of(host_tables, f"{_WHERE}: host_tables")
        tables = tables_of(self.specs)
        where = torch.empty(0, device=device).device
        matrices = arrange([form_of(first, dtype, where, threshold) for first in tables.values()])
        parameters = {name: parameter for name, parameter, _ in self._allocate(matrices, list(tables))}
        specs = [
            TableSpec(name, first.rows, first.embedding_dim, _mode(first), None)
            for name, first in tables.items()
        ]
        number_of = {name: number for number, name in enumerate(tables)}
        of_columns = [number_of[spec.table_name] for spec in self.specs if isinstance(spec, TableColumn)]
        self._host_matrices = [at for at, matrix in enumerate(matrices) if matrix.form.tag.on_host]
        if self._host_matrices:  # its device is the module's; tables may stay on the host
            self.register_buffer("_home", torch.empty(0, device=where), persistent=False)
        self._publish(layout_of(specs, range(len(specs)), of_columns, matrices, sparse), parameters)
        self._lock_pages()
        self.reset_parameters()

    def _layout_changed(self) -> None:
        """Compute the attributes that follow from specifications and layout."""
        self._whole = ColumnGroup(self.specs, self.layout.tables)
        users: dict[FeatureRef, str] = {}
        for column in self.specs:
            for source in column.sources():
                users.setdefault(source.use, column.name)
        self._reader = Reader(self._whole.programs.uses, users)
        self._differentiable = differentiable(self.specs, self._reader.uses)
        self._split: HostSplit | None = None
        if self._host_matrices:
            self._split = HostSplit(self.specs, self.layout.tables, self._host_matrices, self._reader.packer)
        self.output_dim = self._whole.output_dim

    @property
    def columns(self) -> dict[str, slice]:
        """The slice of the output of each column, by name, in order."""
        ends = list(itertools.accumulate((spec.output_dim for spec in self.specs), initial=0))
        return {
            spec.name: slice(*bounds)
            for spec, bounds in zip(self.specs, itertools.pairwise(ends), strict=True)
        }

    def forward(self, batch: Any, dense: Mapping[str, Any] | None = None) -> Tensor:
        """Compute all columns.

        Args:
            batch: a mapping with an entry per feature; a TorchRec KeyedJaggedTensor; or a packed batch of
                :meth:`pack`. An entry is a tensor ``[batch]`` or ``[batch, width]``, a jagged
                ``torch.nested`` tensor, a TorchRec JaggedTensor, ``(values, offsets)``, ``(values, offsets,
                weights)``, or a mapping with "values", "offsets" or "lengths", and "weights". Values are
                float32, int32 or int64, or of a type that converts to one of these without loss.
            dense: entries that the KeyedJaggedTensor does not have.

        Returns:
            Tensor: ``[batch, output_dim]``, columns side by side, in the dtype of the tables if they agree,
            else float32.

        Raises:
            TypeError: a bad batch; names feature and column.
            ValueError: a bad batch; names feature and column.
            IndexError: an invalid index of a column with ``invalid="error"``. On a GPU a later call, or
                :func:`recfuse.check`, raises it.
            NotImplementedError: numbers or weights in the batch require a gradient.
        """
        if type(batch) is not dict:
            refuse_proxy(batch)
        on_host = None
        if isinstance(batch, PackedColumns):
            if not torch.compiler.is_compiling():
                batch = self._to_device(batch)
            on_host = batch.on_host
        elif dense is None and type(batch) is dict:
            result = self._fast_path(batch)
            if isinstance(result, Tensor):
                return result
            if result is not None:
                batch, on_host = result, result.on_host
        return self._computed(self._reader.read(batch, dense), on_host)

    def _addresses(self, batch: Any) -> Addresses | None:
        """Return the addresses of a dict's tensors, unless gradient checks need the tensors."""
        if torch.is_grad_enabled() and self._differentiable:
            return None
        return self._reader.addresses(batch)

    def _fast_path(self, batch: dict[str, Any]) -> Tensor | PackedColumns | None:
        """Return the output, or the batch on the GPU; None if the slow path must read each tensor."""
        weights = self.packed_weights()
        if not weights:
            return None
        home = self._home.device if self._host_matrices else weights[0].device
        direct = self._split is None and not needs_derivatives(weights) and has_kernel(weights)
        addresses = self._addresses(batch) if direct or home.type == "cuda" else None
        if addresses is None:
            return None
        n_jagged = addresses.forms.shape[0] - addresses.n_dense
        if direct and addresses.device == (home.type, home.index):
            if home.type == "cpu" or fits_a_gpu(addresses.n_dense, n_jagged, len(weights)):
                return self._whole.at(weights, addresses, self.bounds_check)
        elif addresses.device[0] == "cpu" and home.type == "cuda" and not is_captured():
            return self._to_device(self._reader.packer.at(addresses, pin=True))
        return None

    def _to_device(self, batch: PackedColumns) -> PackedColumns:
        """Return a packed batch on the device that computes the columns; only its buffer is copied."""
        if self._host_matrices:
            return packed_to_device(batch, self._home.device)
        weights = self.packed_weights()
        return packed_to_device(batch, weights[0].device) if weights else batch

    def _computed(self, inputs: Inputs, on_host: Inputs | None) -> Tensor:
        if torch.is_grad_enabled() and self._differentiable:
            check_values(self._differentiable, self._reader.uses, inputs)
        weights = self.packed_weights()
        if weights and weights[0].is_meta:  # as torch's lookups, which then take indices of any device
            inputs = inputs.to("meta")
        if self._split is not None and self._is_split(weights):
            device = self._home.device
            lookup = self._split.lookup(weights, inputs, on_host, device)
            if lookup is Lookup.GPU:
                self._split.keep(weights, device)
                inputs = inputs_to_device(inputs, self._reader.packer, device, len(weights))
                return self._whole(weights, inputs, self.layout.sparse, self.bounds_check)
            if lookup is Lookup.STREAM:
                return self._split.deferred(weights, inputs, on_host, device, self.bounds_check)
            return self._split(weights, inputs, on_host, device, self.layout.sparse, self.bounds_check)
        if not has_kernel(weights):
            tables = {name: table.weight for name, table in self.tables.items()}
            return evaluate(self.specs, self._reader.uses, tables, inputs)
        if on_gpu(weights):
            inputs = inputs_to_device(inputs, self._reader.packer, weights[0].device, len(weights))
        return self._whole(weights, inputs, self.layout.sparse, self.bounds_check)

    def pack(self, batch: Any, dense: Mapping[str, Any] | None = None) -> PackedColumns:
        """Pack the entries that the columns read into one buffer, page-locked if there is a GPU.

        Call it in the thread that loads batches: ``packed.to("cuda", non_blocking=True)`` is then one copy.

        Args:
            batch, dense: as in :meth:`forward`.

        Returns:
            PackedColumns: the packed batch.

        Raises:
            TypeError: as :meth:`forward`.
            ValueError: as :meth:`forward`; features with different numbers of samples.
        """
        if dense is None:
            addresses = self._addresses(batch)
            if addresses is not None and addresses.device[0] == "cpu":
                return self._reader.packer.at(addresses, torch.cuda.is_available())
        inputs = self._reader.read(batch, dense)
        pin = inputs.device.type == "cpu" and torch.cuda.is_available()
        return self._reader.packer(inputs, pin and not torch.compiler.is_compiling())

    def to_torch(self) -> ReferenceColumns:
        """Return the same columns in plain PyTorch, with copies of the tables.

        They are the specification of this module: compare with them, or run them without recfuse. Batches and
        ``state_dict`` are the same.

        Returns:
            ReferenceColumns: the module.
        """
        tables = {name: table.weight for name, table in self.tables.items()}
        return ReferenceColumns(self.specs, self._reader, tables).train(self.training)

    @classmethod
    def from_json(cls, columns: str | Path | Sequence[Mapping[str, Any]], **options: Any) -> EmbeddingColumns:
        """Create a module from a JSON list of columns; see :mod:`recfuse.nn.columns.json`.

        Args:
            columns: the path of a file, or the list: a mapping per column, with its "kind" and the fields of
                its class.
            options: further arguments of the class.

        Returns:
            EmbeddingColumns: the module.

        Raises:
            OSError: the file cannot be read.
            TypeError: a bad field; names the column.
            ValueError: a bad field; names the column.
        """
        return cls(json.read(columns), **options)

    def to_json(self, path: str | Path | None = None) -> list[dict[str, Any]]:
        """Return the columns as a JSON list for :meth:`from_json`.

        Args:
            path: a file to write the list to. Default: none.

        Returns:
            list: a dict for each column.
        """
        return json.write(self.specs, path)

    def extra_repr(self) -> str:
        """Return the numbers of columns, rows and bytes."""
        rows = sum(table.num_embeddings for table in self.layout.tables)
        size = sum(weight.nbytes for weight in self.packed_weights())
        return f"columns={len(self.specs)}, rows={rows}, output_dim={self.output_dim}, bytes={size}"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without derived attributes."""
        state = self.__dict__.copy()
        for name in ("_whole", "_reader", "_split", "_differentiable"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state, and compute derived attributes."""
        super().__setstate__(state)
        self._layout_changed()
        self._lock_pages()

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise NotImplementedError with a reason; torch.jit.script would fail at some line of this class."""
        raise NotImplementedError(
            "recfuse: an EmbeddingColumns cannot be scripted. Use torch.export or torch.compile."
        )


def _mode(column: TableColumn) -> str:
    """Return the pooling of ``tables[name](...)``."""
    return column.pooling if column.pooling in MODES else "sum"
