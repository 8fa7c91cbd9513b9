"""Kinds of kernels: the sizes that determine the time of an operator on a device, and its work.

The table `KINDS` lists the kinds, and `classify` reads an operator's tensors. A kind's name begins with a
name of the table; the rest (layout, alignment, dtype) selects other measured points of the same form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from recfuse.perf.tracing.operators import Lookups, TensorFacts

Array = NDArray[np.float64]
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Kind:
    """The form of a kind.

    Attributes:
        sizes: names of the sizes.
        work: log2 of the work, of an array ``[points, sizes]`` of logarithms; times grow with it.
        compute: whether multiplications bound it, otherwise bytes.
    """

    sizes: tuple[str, ...]
    work: Callable[[Array], Array]
    compute: bool = False


_TILE = 128.0  # rows and columns of a result that a block computes, if both are large


def _product(x: Array) -> Array:
    return x.sum(-1)


def _tiles(x: Array) -> Array:
    """Return multiplications, with rows and columns of the result rounded up to whole tiles."""
    m, k, n = (2.0 ** x[..., at] for at in (-3, -2, -1))
    tiled = np.ceil(m / _TILE - 1e-6) * np.ceil(n / _TILE - 1e-6) * _TILE**2 * k
    return x[..., :-3].sum(-1) + np.log2(tiled)


def _first(count: int) -> Callable[[Array], Array]:
    return lambda x: x[..., :count].sum(-1)


def _dense_backward(x: Array) -> Array:
    """Return the lookups plus all rows of the table, in words."""
    return np.logaddexp2(x[..., 0], x[..., 3]) + x[..., 1]


_SERIAL = math.log2(10_000)  # words that are read while a kernel adds a lookup to the same row


def _with_serial(x: Array) -> Array:
    """Return the words of all lookups, plus the words of the time in which the hottest row is summed.

    The kernel sums the lookups of a row one after another.
    """
    return np.logaddexp2(x[..., :2].sum(-1), x[..., 3] + _SERIAL)


KINDS: dict[str, Kind] = {
    "addmm": Kind(("m", "k", "n"), _tiles, True),
    "mm": Kind(("m", "k", "n"), _tiles, True),
    "bmm": Kind(("batch", "m", "k", "n"), _tiles, True),
    "attention": Kind(("heads", "queries", "keys", "dim"), _product, True),
    "attention_backward": Kind(("heads", "queries", "keys", "dim"), _product, True),
    "bag": Kind(("bags", "pooling", "row words", "unique"), _first(3)),
    "bag_backward": Kind(("bags", "pooling", "row words", "unique"), _first(3)),
    "bag_backward_dense": Kind(("lookups", "row words", "unique", "rows"), _dense_backward),
    "sparse_step": Kind(("lookups", "row words", "unique", "hottest"), _first(2)),
    "coalesce": Kind(("lookups", "row words", "unique", "hottest"), _with_serial),
    "sparse_mask": Kind(("lookups", "row words", "unique"), _first(2)),
    "cat": Kind(("words", "inputs"), _first(1)),
    "index": Kind(("rows", "row words"), _product),
    "index_select": Kind(("rows", "row words"), _product),
    "index_put": Kind(("rows", "row words"), _product),
    "sum_rows": Kind(("rows", "columns"), _product),
    "sum_all": Kind(("rows", "columns"), _product),
    "softmax": Kind(("rows", "columns"), _product),
    "fill": Kind(("words",), _product),
    "foreach": Kind(("words", "tensors"), _first(1)),
    "pointwise": Kind(("words",), _product),
    "loss": Kind(("words",), _product),
    "copy_from_host": Kind(("words",), _product),
    "recfuse": Kind(("bytes", "operations", "blocks"), _first(1)),
}

VIEWS = frozenset(
    """t transpose view detach slice select expand as_strided permute unsqueeze squeeze alias _unsafe_view
    reshape split split_with_sizes unbind narrow lift_fresh device diagonal unfold chunk movedim view_as
    _reshape_alias _indices _values _nnz is_coalesced _coalesced_ dense_dim sparse_dim sparse_coo_tensor
    _sparse_coo_tensor_with_dims_and_tensors _sparse_coo_tensor_unsafe empty empty_like new_empty
    empty_strided new_empty_strided resize_ set_ sym_size sym_numel is_same_size size stride storage_offset
    numel layout is_contiguous _local_scalar_dense _record_function_enter_new
    _record_function_exit""".split()  # noqa: SIM905
)
FILLS = frozenset(
    "new_zeros zeros zeros_like ones_like ones fill_ zero_ full full_like new_full new_ones".split()  # noqa: SIM905
)
_LISTS = (("addc", 3), ("add", 2), ("lerp", 2), ("sub", 2))  # lists of tensors that foreach operators read
_REDUCTIONS = frozenset(("sum", "mean", "amax", "max", "min", "amin", "linalg_vector_norm", "norm"))


def name_of(kind: str) -> str:
    """Return the name in `KINDS` with which a kind begins."""
    name = kind
    while name not in KINDS:
        name, separator, _ = name.rpartition("_")
        if not separator:
            return "pointwise"
    return name


def form_of(kind: str) -> Kind:
    """Return the form of a kind: the entry of `KINDS` with which its name begins."""
    return KINDS[name_of(kind)]


def _suffix(dtype: torch.dtype) -> str:
    if dtype in _HALF:
        return "_half"
    return "_double" if dtype is torch.float64 else ""


def _product_kind(name: str, a: TensorFacts, b: TensorFacts, tf32: bool) -> tuple[str, tuple[float, ...]]:
    """Return the kind and sizes of a matrix product: layout, dimensions of size 1, alignment to 16 bytes.

    "odd" has unaligned rows of an operand, "odd_out" unaligned rows of the result.
    """
    m, k = a.shape[-2:]
    n = b.shape[-1]
    layout = "".join("t" if matrix.is_transposed else "n" for matrix in (a, b))
    ones = "".join(letter for letter, size in zip("mkn", (m, k, n), strict=True) if size == 1)
    leading = [m if a.is_transposed else k, k if b.is_transposed else n]
    aligned, out_aligned = ([size * a.itemsize % 16 == 0 for size in sizes] for sizes in (leading, [n]))
    label = "odd" if not all(aligned) else "aligned" if all(out_aligned) else "odd_out"
    kind = f"{name}_{layout}_" + (f"1{ones}" if ones else label)
    suffix = "_tf32" if tf32 and a.dtype is torch.float32 and not ones else _suffix(a.dtype)
    return kind + suffix, (*a.shape[:-2], m, k, n)


def _lookup_kind(name: str, ins: Sequence[TensorFacts], of: Lookups) -> tuple[str, tuple[float, ...]] | None:
    suffix = "_half" if of.itemsize == 2 else ""
    per_bag = (of.bags, of.count / max(of.bags, 1), of.row_words, of.unique)
    if "backward" in name:
        if of.dense:
            return f"bag_backward_dense{suffix}", (of.count, of.row_words, of.unique, of.rows)
        return f"bag_backward{suffix}", per_bag
    if name.startswith("_embedding_bag"):
        return f"bag{suffix}", per_bag
    if name == "embedding":
        return "index_select", (of.count, of.row_words)
    if name == "add_" and len(ins) > 1 and ins[1].sparse:
        return f"sparse_step{suffix}", (of.count, of.row_words, of.unique, of.hottest)
    if name in ("coalesce", "_coalesce"):
        return "coalesce", (of.count, of.row_words, of.unique, of.hottest)
    if name == "sparse_mask":
        return name, (of.count, of.row_words, of.unique)
    return None


def classify(
    name: str,
    ins: Sequence[TensorFacts],
    outs: Sequence[TensorFacts],
    lookups: Lookups | None,
    tf32: bool = False,
) -> tuple[str, tuple[float, ...]] | None:
    """Return the kind of an operator's kernels and their sizes; None if it launches nothing."""
    if name in VIEWS or not (ins or outs):
        return None
    if name == "clone" and ins and ins[0].sparse:
        return None
    if lookups is not None and not lookups.bags:
        return None
    if lookups is not None and (lookup_kind := _lookup_kind(name, ins, lookups)):
        return lookup_kind
    if name in ("addmm", "mm", "bmm", "baddbmm", "_addmm_activation") and len(ins) >= 2:
        base = {"baddbmm": "bmm", "_addmm_activation": "addmm"}.get(name, name)
        pair = ins[1:3] if len(ins) > 2 and base != "mm" else ins[:2]
        return _product_kind(base, *pair, tf32)
    if name.startswith("_scaled_dot_product"):
        query, key = ins[-3:-1] if len(ins) < 4 else ins[:2] if "backward" not in name else ins[1:3]
        kind = "attention_backward" if "backward" in name else "attention"
        sizes = (query.shape[0] * query.shape[1], query.shape[2], key.shape[2], query.shape[3])
        return kind + _suffix(query.dtype), sizes
    return _memory_kind(name, ins, outs)


def _memory_kind(
    name: str, ins: Sequence[TensorFacts], outs: Sequence[TensorFacts]
) -> tuple[str, tuple[float, ...]] | None:
    """Return the kind and sizes of a memory-bound operator."""
    if name.startswith("_foreach"):
        lists = next((count for part, count in _LISTS if part in name), 1)
        return f"foreach_{lists}", (sum(facts.words for facts in ins if not facts.sparse), max(len(ins), 1))
    results = [facts for facts in outs if not facts.sparse]
    first = results[0] if results else ins[0] if ins else None
    if first is None or first.numel == 0:
        return None
    if name == "cat":
        return "cat", (first.words, len(ins))
    if name in ("index", "index_select", "gather"):
        return ("index" if name == "gather" else name), _rows(first)
    if name in ("index_put", "index_add_", "scatter_add_", "scatter_add", "index_add"):
        return "index_put", _rows(ins[-1])
    if name in _REDUCTIONS and ins and ins[0].numel != first.numel:
        return ("sum_rows" if first.numel > 1 else "sum_all"), _rows(ins[0])
    if name in ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"):
        columns = first.shape[-1] if first.shape else 1
        return "softmax", (first.numel / columns, columns * first.itemsize / 4)
    if name in FILLS:
        return "fill", (first.words,)
    if name.startswith(("binary_cross_entropy", "mse_loss", "huber_loss", "smooth_l1_loss")):
        return f"loss{'_backward' if 'backward' in name else ''}", (max(facts.words for facts in ins),)
    reads = [facts for facts in ins if facts.numel > 1 and facts.is_float and not facts.sparse]
    strided = "" if all(facts.is_contiguous for facts in (*reads, *results)) else "_strided"
    count = min(max(1, len(reads)), 3)
    return f"pointwise_{count}{strided}", (max(facts.words for facts in (*reads, *results)),)


def _rows(facts: TensorFacts) -> tuple[float, float]:
    rows = facts.shape[0] if facts.shape else 1
    return rows, facts.words / max(rows, 1)


def is_fusable(kind: str | None) -> bool:
    """Return whether a compiler fuses operators of this kind with neighbouring operators into a kernel."""
    return (
        kind is not None
        and kind.startswith(("pointwise", "fill", "cat", "index", "sum", "softmax", "loss"))
        and not kind.startswith("index_put")
    )
