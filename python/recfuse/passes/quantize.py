"""``quantize`` and ``dequantize``: collections of a model, to codes and back, in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from recfuse._arguments import wrong_type
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.nn.collection import FusedEmbeddingBagCollection
from recfuse.nn.descriptions import Table
from recfuse.nn.packed.holders import holder_of, shared_search
from recfuse.nn.packed.layout import table_rows
from recfuse.nn.packed.module import PackedModule
from recfuse.nn.quantized.bag import QuantizedEmbeddingBag
from recfuse.nn.quantized.collection import QuantizedEmbeddingBagCollection
from recfuse.nn.quantized.rows import Rows, floats_of, kinds_of, write_floats
from recfuse.passes.quantize_bags import QUANTIZED, bags_of, float_bag, quantized_bag

_MOST_LINES = 40
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
_QUANTIZE = "recfuse.quantize"


@dataclass(frozen=True)
class QuantizedEntry:
    """One table of a :class:`QuantizeReport`.

    Attributes:
        name: the table, after the name of its collection in the model.
        dtype: "int8", "int4", or the dtype of a table that stayed floats.
        bytes_before, bytes_after: the bytes of its rows.
        largest_error: the largest distance of a value before and after.
    """

    name: str
    dtype: str
    bytes_before: int
    bytes_after: int
    largest_error: float


@dataclass
class QuantizeReport:
    """Report of :func:`recfuse.quantize`; ``print`` shows a table.

    Attributes:
        entries: an entry for each table, in the order of the model.
        left: modules with tables that are not quantised, each with the reason.

    Example:
        >>> collection = recfuse.nn.FusedEmbeddingBagCollection([(1000, 16)])
        >>> report = recfuse.quantize(collection, "int8")
        >>> report.bytes_before, report.bytes_after
        (64000, 20000)
    """

    entries: list[QuantizedEntry] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)

    @property
    def bytes_before(self) -> int:
        """The bytes of all tables before."""
        return sum(entry.bytes_before for entry in self.entries)

    @property
    def bytes_after(self) -> int:
        """The bytes of all tables after."""
        return sum(entry.bytes_after for entry in self.entries)

    def __str__(self) -> str:
        """Return a line for each table, and the sums."""
        rows = [("table", "dtype", "bytes before", "bytes after", "largest error")]
        for entry in self.entries[:_MOST_LINES]:
            numbers = f"{entry.bytes_before:,}", f"{entry.bytes_after:,}", f"{entry.largest_error:.2e}"
            rows.append((entry.name, entry.dtype, *numbers))
        if len(self.entries) > _MOST_LINES:
            rows.append((f"... {len(self.entries) - _MOST_LINES} more", "", "", "", ""))
        rows.append(("all", "", f"{self.bytes_before:,}", f"{self.bytes_after:,}", ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
        ]
        return "\n".join(line.rstrip() for line in [*lines, *(f"{name}: {why}" for name, why in self.left)])


def quantize(
    model: torch.nn.Module, dtype: str | Mapping[str, str] = "int8", output_dtype: torch.dtype | None = None
) -> QuantizeReport:
    """Quantise the tables of a model to int8 or int4 rows, in place, for inference.

    Collections of :class:`recfuse.nn.FusedEmbeddingBagCollection`, and TorchRec's after :func:`recfuse.swap`,
    become a :class:`recfuse.nn.QuantizedEmbeddingBagCollection`. Single tables, a ``torch.nn.EmbeddingBag``
    or :class:`recfuse.nn.EmbeddingBag`, become a :class:`recfuse.nn.QuantizedEmbeddingBag`. All stay the same
    objects, with the same input and output. A row has a scale and a bias in float16. The scale is the range
    of the row divided by 255 for int8, and by 15 for int4; each value changes by at most half a scale. An
    int8 table of 128 columns takes 0.26 of the memory of float32.

    Tables on a GPU pass through the host in pieces. On an error nothing has changed.

    Args:
        model: a collection or a table, or a module with some.
        dtype: "int8" or "int4" for all tables, or a dict of them by table; other tables stay floats. A single
            table has the name of its module in the model; if it is the model, "weight".
        output_dtype: the dtype of outputs. Default: as before.

    Returns:
        QuantizeReport: bytes and the largest error of each table.

    Raises:
        TypeError: a bad argument; a float64 table.
        ValueError: a value that is not finite or outside of float16's range, with its table and row; a row of
            int4 that is not a whole number of bytes; a table that does not exist; a model without tables that
            can be quantised; an optimizer, or DistributedDataParallel, that holds the floats.

    Example:
        >>> model = torch.nn.Sequential(recfuse.nn.FusedEmbeddingBagCollection([(1000, 16), (50, 8)]))
        >>> report = recfuse.quantize(model, {"t0": "int4"})
        >>> [(entry.name, entry.dtype) for entry in report.entries]
        [('0.t0', 'int4'), ('0.t1', 'float32')]
    """
    _check_model(model, _QUANTIZE)
    report = QuantizeReport()
    collections, bags = list(_collections(model, report)), bags_of(model, report.left)
    if not collections and not bags:
        left = "".join(f" ({name or 'the model'}: {why})" for name, why in report.left)
        raise ArgumentValueError(
            f"{_QUANTIZE}: the model has no collection of recfuse and no torch.nn.EmbeddingBag{left}. Call "
            "recfuse.swap(model) first, or make a recfuse.nn.FusedEmbeddingBagCollection."
        )
    if isinstance(dtype, Mapping):
        names = {spec.name for _, collection in collections for spec in collection.layout.tables}
        if unknown := [name for name in dtype if name not in names and name not in dict(bags)]:
            raise ArgumentValueError(f"{_QUANTIZE}: dtype has {unknown[0]!r}; expected names of tables")
        bags = [(name, bag) for name, bag in bags if name in dtype]
    _check_holders([collection.packed_weights() for _, collection in collections], bags)
    made: list[tuple[Any, torch.nn.Module]] = [
        (collection, _quantized(name, collection, dtype, output_dtype, report))
        for name, collection in collections
    ]
    shared: dict[Any, Any] = {}
    for name, bag in bags:
        made.append((bag, _quantized_bag(name, bag, dtype, output_dtype, report, shared)))
    for module, quantized in made:
        _become(module, quantized)
    return report


def dequantize(model: torch.nn.Module) -> None:
    """Turn the quantised collections and tables of a model into those of floats, in place.

    The values stay those of the codes. Quantised tables become float32, and other tables keep their dtype.

    Args:
        model: a collection or a table, or a module with some.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: the model has no quantised collection or table.

    Example:
        >>> collection = recfuse.nn.FusedEmbeddingBagCollection([(1000, 16)])
        >>> report = recfuse.quantize(collection)
        >>> recfuse.dequantize(collection)
        >>> collection.tables["t0"].weight.requires_grad
        True
    """
    _check_model(model, "recfuse.dequantize")
    quantized = [module for module in model.modules() if isinstance(module, QUANTIZED)]
    if not quantized:
        raise ArgumentValueError("recfuse.dequantize: the model has no quantised collection or table")
    shared: dict[int, Any] = {}
    with shared_search():
        for module in quantized:
            is_bag = isinstance(module, QuantizedEmbeddingBag)
            _become(module, float_bag(module, shared) if is_bag else _floats(module))


def _check_model(model: Any, function: str) -> None:
    if not isinstance(model, torch.nn.Module):
        raise wrong_type(f"{function}: model", model, "a torch.nn.Module")


def _check_holders(
    matrices: Sequence[Sequence[Tensor]], bags: Sequence[tuple[str, torch.nn.EmbeddingBag]]
) -> None:
    """Raise ValueError if an optimizer or a wrapper would go on with the floats."""
    weights = [matrix for of_collection in matrices for matrix in of_collection]
    weights += [bag.weight for _, bag in bags]
    if (holder := holder_of(weights)) is not None:
        kind, shape = type(holder[0]).__name__, list(weights[holder[1]].shape)
        raise ArgumentValueError(
            f"{_QUANTIZE}: {kind} holds a Parameter of tables, of shape {shape}, and would go on with the "
            "floats. Remove it first, or pass a copy of the model."
        )


def _collections(model: torch.nn.Module, report: QuantizeReport) -> Iterator[tuple[str, Any]]:
    """Yield the collections that can be quantised, with their names, and report others."""
    for name, module in model.named_modules():
        if type(module) is FusedEmbeddingBagCollection or _is_keyed(module):
            yield name, module
        elif isinstance(module, FusedEmbeddingBagCollection):
            report.left.append(
                (name, f"{type(module).__name__} is a subclass of a collection, whose methods would be lost")
            )
        elif isinstance(module, PackedModule):
            report.left.append((name, f"{type(module).__name__} has no quantised form"))


def _is_keyed(module: torch.nn.Module) -> bool:
    return type(module).__name__ == "FusedKeyedEmbeddingBagCollection"


def _quantized(
    name: str, collection: Any, dtype: Any, output_dtype: torch.dtype | None, report: QuantizeReport
) -> QuantizedEmbeddingBagCollection:
    """Return a new quantised collection with the values of a collection."""
    keyed = _is_keyed(collection)
    kind: Any = QuantizedEmbeddingBagCollection
    if keyed:
        from recfuse.nn.quantized.keyed import QuantizedKeyedEmbeddingBagCollection as kind
    names = [spec.name for spec in collection.layout.tables]
    if isinstance(dtype, Mapping):
        dtype = {table: kind for table, kind in dtype.items() if table in names}
    matrices = collection.packed_weights()
    quantized: QuantizedEmbeddingBagCollection = kind.__new__(kind)
    torch.nn.Module.__init__(quantized)
    features = collection._flat_feature_names if keyed else collection.feature_names
    quantized._create(collection, features, dtype, output_dtype, matrices[0].device)
    quantized.train(collection.training)
    if keyed:
        quantized.take_names(collection)  # type: ignore[operator]
    for number, spec in enumerate(collection.layout.tables):
        weight, rows = table_rows(spec, matrices[spec.matrix]), quantized.rows_of(number)
        full = f"{name}.{spec.name}" if name else spec.name
        with _errors_of(full):
            error = write_floats(weight, rows)
        report.entries.append(_entry(full, weight, rows, error))
    return quantized


def _quantized_bag(
    name: str,
    bag: torch.nn.EmbeddingBag,
    dtype: Any,
    output_dtype: torch.dtype | None,
    report: QuantizeReport,
    shared: dict[Any, Any],
) -> QuantizedEmbeddingBag:
    """Return a new quantised table with the values of a table."""
    own = {name: dtype[name]} if isinstance(dtype, Mapping) else dtype
    (kind,) = kinds_of(own, [name], [bag.weight.dtype], [bag.embedding_dim], _QUANTIZE)
    with _errors_of(name):
        quantized, error = quantized_bag(bag, kind, output_dtype, shared)
    report.entries.append(_entry(name, bag.weight, quantized.rows, error))
    return quantized


def _entry(name: str, weight: Tensor, rows: Rows, error: float) -> QuantizedEntry:
    return QuantizedEntry(name, rows.kind, weight.numel() * weight.itemsize, rows.bytes, error)


@contextmanager
def _errors_of(table: str) -> Iterator[None]:
    """Name a table in errors of its values."""
    try:
        yield
    except (ArgumentValueError, ArgumentTypeError) as refused:
        detail = str(refused).removeprefix("recfuse.quantize_rows: ")
        raise type(refused)(f"{_QUANTIZE}: table {table!r}: {detail}") from None


def _floats(module: QuantizedEmbeddingBagCollection) -> torch.nn.Module:
    """Return a new collection of floats with the values of a quantised collection."""
    rows = [module.rows_of(number) for number in range(len(module.layout.tables))]
    device = rows[0].data.device
    if hasattr(module, "_embedding_bag_configs"):
        from torchrec.modules.embedding_modules import EmbeddingBagCollection

        from recfuse.passes.swap import swap

        collection: Any = EmbeddingBagCollection(
            tables=module._embedding_bag_configs, is_weighted=module._is_weighted, device=device
        )
        swap(collection)
    else:
        features: dict[int, list[str]] = {}
        for name, number in zip(module.feature_names, module.layout.table_of_feature, strict=True):
            features.setdefault(number, []).append(name)
        tables = [
            Table(
                spec.num_embeddings,
                spec.embedding_dim,
                spec.name,
                spec.mode,
                spec.padding_idx,
                of_table.data.dtype if of_table.data.is_floating_point() else torch.float32,
                tuple(features[number]),
            )
            for number, (spec, of_table) in enumerate(zip(module.layout.tables, rows, strict=True))
        ]
        collection = FusedEmbeddingBagCollection(tables, device=device)
    matrices = collection.packed_weights()
    with torch.no_grad():
        for spec, of_table in zip(collection.layout.tables, rows, strict=True):
            to = table_rows(spec, matrices[spec.matrix])
            to.copy_(floats_of(of_table, to.dtype))
    collection.train(module.training)
    return collection  # type: ignore[no-any-return]


def _become(module: torch.nn.Module, other: torch.nn.Module) -> None:
    """Give a module the class and contents of another; references to it and hooks of its calls stay valid."""
    for name, value in vars(module).items():
        if name.startswith(_HOOKS):
            other.__dict__[name] = value
    module.__class__ = type(other)
    module.__dict__ = other.__dict__
