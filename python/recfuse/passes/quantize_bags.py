"""``quantize`` and ``dequantize`` of single tables: ``torch.nn.EmbeddingBag`` and its replacement."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from recfuse.nn.embedding_bag import EmbeddingBag
from recfuse.nn.packed.module import PackedModule
from recfuse.nn.quantized.bag import QuantizedEmbeddingBag
from recfuse.nn.quantized.collection import QuantizedEmbeddingBagCollection
from recfuse.nn.quantized.rows import new_rows, write_floats

QUANTIZED = QuantizedEmbeddingBag, QuantizedEmbeddingBagCollection
_KINDS = torch.nn.EmbeddingBag, EmbeddingBag
_TORCHREC = "EmbeddingBagCollection"
_OPTIONS = "sparse", "scale_grad_by_freq"  # of training; dequantize restores them


@functools.cache
def _attributes() -> frozenset[str]:
    """Return the names of attributes of both forms; others are a user's."""
    floats = torch.nn.EmbeddingBag(1, 1, _weight=torch.empty(1, 1))  # draws no random numbers
    return frozenset({"schedule", "pinned", *vars(floats), *vars(QuantizedEmbeddingBag(1, 1))})


def bags_of(model: torch.nn.Module, left: list[tuple[str, str]]) -> list[tuple[str, torch.nn.EmbeddingBag]]:
    """Return the single tables that can be quantised, with their names; ``left`` gets others with reasons."""
    found = []
    for name, module in _modules(model, "", set(), left):
        if not isinstance(module, torch.nn.EmbeddingBag):
            continue
        if reason := _why_not(module):
            left.append((name, reason))
        else:
            found.append((name or "weight", module))
    return found


def _modules(
    module: torch.nn.Module, name: str, seen: set[int], left: list[tuple[str, str]]
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield modules with their names, but none within modules that read tables themselves."""
    if id(module) in seen:
        return
    seen.add(id(module))
    if isinstance(module, PackedModule):
        return
    if any(kind.__name__ == _TORCHREC and "torchrec" in kind.__module__ for kind in type(module).__mro__):
        if any(isinstance(child, torch.nn.EmbeddingBag) for child in module.modules()):
            left.append((name, f"{type(module).__name__} is a module of TorchRec; call recfuse.swap first"))
        return
    yield name, module
    for child_name, child in module.named_children():
        yield from _modules(child, f"{name}.{child_name}" if name else child_name, seen, left)


def _why_not(module: torch.nn.EmbeddingBag) -> str | None:
    """Return why a table cannot be quantised, or None."""
    kind = type(module).__name__
    if type(module) not in _KINDS:
        return f"{kind} is a subclass of torch.nn.EmbeddingBag, whose methods would be lost"
    if "weight" not in module._parameters:
        return "weight is no Parameter; expected a table that nothing computes"
    if module.max_norm is not None:
        return f"max_norm is {module.max_norm}; expected None, since codes cannot be scaled in place"
    if "forward" in vars(module):
        return "forward is replaced; expected the method of the class"
    if vars(module).get("qconfig") is not None:
        return "qconfig is set; expected None, since another quantiser converts the module"
    return None


def quantized_bag(
    module: torch.nn.EmbeddingBag, kind: str, output_dtype: torch.dtype | None, shared: dict[Any, Any]
) -> tuple[QuantizedEmbeddingBag, float]:
    """Return a new quantised table with the values of a table, and the largest error.

    Modules of one Parameter share their codes, which ``shared`` keeps.
    """
    weight: Tensor = module.weight
    key = id(weight), kind
    if key not in shared:
        rows = new_rows(kind, *weight.shape, weight.device)
        shared[key] = rows, write_floats(weight, rows)
    rows, error = shared[key]
    bag = QuantizedEmbeddingBag.__new__(QuantizedEmbeddingBag)
    torch.nn.Module.__init__(bag)
    options = module.mode, module.include_last_offset, module.padding_idx
    bag._take(rows, *options, weight.dtype if output_dtype is None else output_dtype)
    bag._float_form = type(module), {name: getattr(module, name) for name in _OPTIONS}
    _keep(module, bag)
    return bag, error


def float_bag(module: QuantizedEmbeddingBag, shared: dict[int, Tensor]) -> torch.nn.EmbeddingBag:
    """Return a new table of floats with the values of a quantised table, of the class that it had before.

    Modules that share their codes share a Parameter, which ``shared`` keeps.
    """
    if id(module.codes) not in shared:
        shared[id(module.codes)] = torch.nn.Parameter(module.weight)
    kind, options = module._float_form
    bag: torch.nn.EmbeddingBag = kind(
        module.num_embeddings,
        module.embedding_dim,
        mode=module.mode,
        include_last_offset=module.include_last_offset,
        padding_idx=module.padding_idx,
        device="meta",
        **options,
    )
    bag.weight = shared[id(module.codes)]
    _keep(module, bag)
    return bag


def _keep(module: torch.nn.Module, to: torch.nn.Module) -> None:
    """Keep hooks, the mode of training, and the attributes that a user has set."""
    for name, value in vars(module).items():
        if "hook" in name or name == "training" or name not in _attributes():
            to.__dict__[name] = value
