"""Collections that TorchRec has quantised, and their values in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torchrec.quant.embedding_modules as quant
from torch import Tensor, nn
from torch.ao.quantization import PlaceholderObserver
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.modules.embedding_configs import QuantConfig

from support.reference import Feature
from support.reference import fused_embedding_bag as reference
from support.tables.quantized import exact_values

DTYPES = {
    "int8": torch.qint8,
    "int4": torch.quint4x2,
    "int2": torch.quint2x4,
    "float16": torch.float16,
    "float32": torch.float32,
}


class Spec(NamedTuple):
    """A table."""

    name: str
    rows: int
    dim: int
    kind: str = "int8"
    mode: str = "sum"
    features: tuple[str, ...] = ()


MIXED = (
    Spec("a", 90, 16, "int8", "sum", ("x", "y")),
    Spec("b", 70, 8, "int4", "mean", ("z",)),
    Spec("c", 50, 12, "float16", "mean", ("w",)),
    Spec("d", 40, 4, "float32", "sum", ("v",)),
    Spec("e", 61, 20, "int4", "sum", ("u",)),
)


def floats(specs: Sequence[Spec] = MIXED, weighted: bool = False) -> EmbeddingBagCollection:
    """Returns TorchRec's collection of floats."""
    torch.manual_seed(3)
    tables = [
        EmbeddingBagConfig(
            name=one.name,
            num_embeddings=one.rows,
            embedding_dim=one.dim,
            feature_names=list(one.features or (f"of_{one.name}",)),
            pooling=PoolingType.SUM if weighted else PoolingType[one.mode.upper()],
        )
        for one in specs
    ]
    return EmbeddingBagCollection(tables=tables, is_weighted=weighted)


def quantised(
    specs: Sequence[Spec] = MIXED,
    *,
    weighted: bool = False,
    split: bool = False,
    register: bool = False,
    alignment: int = 16,
    output: torch.dtype = torch.float32,
) -> Any:
    """Returns TorchRec's quantised collection."""
    model = floats(specs, weighted)
    with torch.no_grad():
        for table in model.embedding_bags.values():
            table.weight.normal_()
    if split:
        quant.quant_prep_enable_quant_state_dict_split_scale_bias(model)
    if register:
        quant.quant_prep_enable_register_tbes(model, [EmbeddingBagCollection])
    quant.quant_prep_customize_row_alignment(model, [EmbeddingBagCollection], alignment)
    model.qconfig = QuantConfig(
        activation=PlaceholderObserver.with_args(dtype=output),
        weight=PlaceholderObserver.with_args(dtype=torch.qint8),
        per_table_weight_dtype={one.name: DTYPES[one.kind] for one in specs},
    )
    return quant.EmbeddingBagCollection.from_float(model)


def batch(
    module: Any, bags: int = 5, integer: torch.dtype = torch.int64, weighted: bool = False, seed: int = 1
) -> KeyedJaggedTensor:
    """Returns lookups of every feature in reverse order; some bags are empty."""
    generator = torch.Generator().manual_seed(seed)
    rows = {
        name: config.num_embeddings
        for config in module.embedding_bag_configs()
        for name in config.feature_names
    }
    lengths = torch.randint(0, 8, (len(rows), bags), generator=generator)
    lengths[0, 0] = 0
    keys = list(reversed(rows))
    indices = [
        torch.randint(0, rows[key], (int(count),), generator=generator)
        for key, count in zip(keys, lengths.sum(1), strict=True)
    ]
    values = torch.cat(indices).to(integer)
    weights = torch.rand(values.numel(), generator=generator) if weighted else None
    return KeyedJaggedTensor(keys, values, weights, lengths.flatten().to(torch.int32))


def values_of(module: Any) -> dict[str, Tensor]:
    """Returns each table in float64, from the bytes of its rows."""
    return {name: table for tbe in module._emb_modules for name, table in values_of_tbe(tbe).items()}


def values_of_tbe(tbe: Any) -> dict[str, Tensor]:
    """Returns each table of a module of FBGEMM in float64, from the bytes of its rows."""
    found = {}
    whole = tbe.split_embedding_weights_with_scale_bias(split_scale_bias_mode=0)
    for (name, _, dim, kind, _), (rows, _, _) in zip(tbe.embedding_specs, whole, strict=True):
        rows = rows.contiguous()
        if kind.value in ("fp16", "fp32"):
            dtype = torch.float16 if kind.value == "fp16" else torch.float32
            found[name] = rows[:, : dim * dtype.itemsize].contiguous().view(dtype).double()
            continue
        width = dim if kind.value == "int8" else dim // 2
        parameters = rows[:, :4].contiguous().view(torch.float16)
        found[name] = exact_values(rows[:, 4 : 4 + width], parameters, dim)
    return found


def expected(module: Any, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
    """Returns ``[bags, columns]`` float64, and the sums of magnitudes, to which errors are relative."""
    tables, configs = values_of(module), {c.name: c for c in module.embedding_bag_configs()}
    order = [name for tbe in module._emb_modules for name, *_ in tbe.embedding_specs]
    of_feature, keys = [], []
    for number, name in enumerate(order):
        for key in configs[name].feature_names:
            of_feature.append(Feature(number, configs[name].pooling.value.lower(), None))
            keys.append(key)
    ordered = features.permute([features.keys().index(key) for key in keys])
    lookups = ordered.values().long(), ordered.offsets().long()
    weights = ordered.weights_or_none()
    pooled = reference([tables[name] for name in order], of_feature, *lookups, weights)
    # The parts of a sum, codes and biases, are larger than the values.
    largest = [torch.full_like(tables[name], float(tables[name].abs().max()) * 3) for name in order]
    return pooled, reference(largest, of_feature, *lookups, None if weights is None else weights.abs())


class Values(nn.Module):
    """A model whose output is a tensor."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Returns the pooled rows."""
        return self.collection(features).values()
