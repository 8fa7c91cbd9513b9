"""``Table``, the description of a table of a collection, and the creation of tables from descriptions.

``prefix`` begins the errors of a function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from recfuse._arguments import integer, wrong_type
from recfuse._codes import MODES
from recfuse.errors import ArgumentTypeError, ArgumentValueError, a_type
from recfuse.nn.packed.layout import TableSpec

POOLED = "recfuse.nn.FusedEmbeddingBagCollection"
_MOST = 2**62
_DATA_TYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}  # TorchRec's


@dataclass(frozen=True)
class Table:
    """Description of a table of a collection.

    Attributes:
        num_embeddings: the number of rows.
        embedding_dim: the number of columns.
        name: the name. Default: t0, t1, ... by position.
        mode: "sum", "mean" or "max".
        padding_idx: an index that counts as no lookup, or None.
        dtype: the dtype of the weight.
        feature_names: the features that look up its rows. Default: a single feature with the table's name.

    Example:
        >>> tables = [recfuse.nn.Table(1000, 16, name="city", feature_names=("home", "work"))]
        >>> recfuse.nn.FusedEmbeddingBagCollection(tables).feature_names
        ['home', 'work']
    """

    num_embeddings: int
    embedding_dim: int
    name: str | None = None  # default: t0, t1, ... by position
    mode: str = "sum"
    padding_idx: int | None = None
    dtype: torch.dtype = torch.float32
    feature_names: Sequence[str] = ()  # default: a single feature with the table's name

    @staticmethod
    def of(config: Any) -> Table:
        """Create a Table from another description.

        Args:
            config: a ``(num_embeddings, embedding_dim)`` pair, or TorchRec's ``EmbeddingBagConfig``.

        Returns:
            Table: the table.
        """
        return table_of(config, POOLED, "EmbeddingBagConfig")


def table_of(config: Any, prefix: str, torchrec: str) -> Table:
    """Create a Table from a description; ``torchrec`` is the name of TorchRec's class."""
    if isinstance(config, Table):
        return config
    if isinstance(config, (tuple, list)) and len(config) == 2:
        return Table(*config)
    if isinstance(config, (torch.nn.EmbeddingBag, torch.nn.Embedding)):
        kind = "embedding_bags" if isinstance(config, torch.nn.EmbeddingBag) else "embeddings"
        raise ArgumentTypeError(
            f"{prefix}: a table is {a_type(config)}, which has weights; expected a table without weights. "
            f"Call from_{kind}(tables) to keep the weights."
        )
    fields = ("num_embeddings", "embedding_dim", "name", "feature_names")
    if not all(hasattr(config, name) for name in fields):
        needed = f"a recfuse.nn.Table, a (num_embeddings, embedding_dim) pair or an {torchrec}"
        raise wrong_type(f"{prefix}: a table", config, needed)
    data_type = getattr(getattr(config, "data_type", None), "value", "FP32")
    if data_type not in _DATA_TYPES:
        raise ArgumentValueError(
            f"{prefix}: data_type of {config.name} is {data_type}; expected {', '.join(_DATA_TYPES)}"
        )
    return Table(
        config.num_embeddings,
        config.embedding_dim,
        name=config.name,
        mode=getattr(getattr(config, "pooling", None), "value", "SUM").lower(),
        dtype=_DATA_TYPES[data_type],
        feature_names=tuple(config.feature_names),
    )


def specs_of(tables: Sequence[Table], sparse: bool, prefix: str) -> tuple[list[str], list[TableSpec]]:
    """Return names and specifications of tables before their placement; raise for an invalid table."""
    names = [table.name if table.name is not None else f"t{number}" for number, table in enumerate(tables)]
    specs = [_spec_of(name, table, sparse, prefix) for name, table in zip(names, tables, strict=True)]
    check_names(names, prefix)
    return names, specs


def pack_new_tables(
    collection: Any,
    configs: Sequence[Any],
    tables: Sequence[Table],
    names: Sequence[str],
    specs: Sequence[TableSpec],
    sparse: bool,
    device: torch.device | str | None,
) -> None:
    """Create the tables of a collection and its features; ``init_fn`` of a config sets its values."""
    features = features_of(names, tables)
    where = torch.empty(0, device=device).device
    dtypes = [table.dtype for table in tables]
    collection._pack_new(specs, dtypes, where, [table for _, table in features], sparse)
    collection.feature_names = [feature for feature, _ in features]
    collection.feature_dims = list(collection.layout.dims)
    collection.reset_parameters()
    for number, (config, packed) in enumerate(zip(configs, collection.tables.values(), strict=True)):
        if callable(init := getattr(config, "init_fn", None)):
            with torch.no_grad():
                init(packed.weight)
            if where.type == "meta":  # for recfuse.distributed.shard, which draws the values
                vars(collection).setdefault("_inits", {})[number] = init


def names_of(count: int, names: Sequence[str] | None, prefix: str) -> list[str]:
    """Return the names of ``count`` existing tables: the given ones, or t0, t1, ..."""
    if names is not None and len(names) != count:
        raise ArgumentValueError(
            f"{prefix}: names has {len(names)} elements for {count} tables; expected equal numbers"
        )
    table_names = list(names) if names is not None else [f"t{number}" for number in range(count)]
    check_names(table_names, prefix)
    return table_names


def features_of(names: Sequence[str], tables: Sequence[Table]) -> list[tuple[str, int]]:
    """Return the name of each feature, and the number of its table."""
    return [
        (feature, number)
        for number, (name, table) in enumerate(zip(names, tables, strict=True))
        for feature in tuple(table.feature_names) or (name,)
    ]


def check_names(names: Sequence[str], prefix: str) -> None:
    """Raise ValueError unless names of tables are distinct and can be a part of a state_dict's names."""
    if not names:
        raise ArgumentValueError(f"{prefix}: tables is empty; expected at least one table")
    if len(set(names)) < len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise ArgumentValueError(f"{prefix}: two tables are named {twice!r}")
    for name in names:
        if not isinstance(name, str) or not name or "." in name:
            raise ArgumentValueError(
                f"{prefix}: a table is named {name!r}; expected a string that is not empty and has no dot, "
                "since it is a part of a name in the state_dict"
            )


def _spec_of(name: str, table: Table, sparse: bool, prefix: str) -> TableSpec:
    if not isinstance(table.dtype, torch.dtype) or not table.dtype.is_floating_point:
        raise ArgumentTypeError(
            f"{prefix}: dtype of {name} is {table.dtype!r}; expected a floating-point torch.dtype"
        )
    if isinstance(table.feature_names, str):
        raise ArgumentTypeError(
            f"{prefix}: feature_names of {name} is the str {table.feature_names!r}; expected a sequence of "
            "names"
        )
    if table.mode not in MODES:
        raise ArgumentValueError(
            f'{prefix}: mode of {name} is {table.mode!r}; expected "sum", "mean" or "max"'
        )
    if sparse and table.mode == "max":
        raise ArgumentValueError(
            f'{prefix}: sparse is True and mode of {name} is "max", which has no sparse gradient. Pass '
            "sparse=False."
        )
    rows, dim = (
        integer(f"{prefix}: {field} of {name}", getattr(table, field), 0, _MOST)
        for field in ("num_embeddings", "embedding_dim")
    )
    padding = table.padding_idx
    if padding is not None:
        padding = integer(f"{prefix}: padding_idx of {name}", padding, -rows, rows - 1) % rows
    return TableSpec(name, rows, dim, table.mode, padding)
