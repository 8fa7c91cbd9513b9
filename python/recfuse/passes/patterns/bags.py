"""Embedding bags that can be pooled in one call.

Before, for each of many tables::

    bag_k  = embedding_bag(weight_k, indices_k, offsets_k, mode)        # F.embedding_bag, nn.EmbeddingBag
    bag_k  = sum or mean(embedding(weight_k, indices_k [B, L]), 1)      # nn.Embedding and a reduction
    bag_k  = sum(embedding(weight_k, indices_k) * factors_k[..., None], 1)   # masked, or weighted
    bag_k  = embedding(weight_k, indices_k [B])                         # a bag of one lookup
    out    = cat([bag_1, ..., bag_n], 1)  or  stack([bag_1, ...], 1)

After, for all tables with the same number of bags that do not depend on each other::

    indices = cat([indices_1, ...]);  offsets = cat([offsets_1, offsets_2 + len(indices_1), ...])
    out     = recfuse::fused_embedding_bag([weight_1, ...], features, indices, offsets, ...)

The call returns the cat; other users of a bag get a copy of its columns. Weights do not move: the call takes
a list of them.

Source: Pan et al., RecFlex, SC 2024 (one kernel for heterogeneous features); RECom, ASPLOS 2023, 3.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from recfuse._codes import DTYPES, INTEGERS, MODES
from recfuse.ops import HAS_CUDA_KERNELS
from recfuse.passes.graph.bags import FIXED, JAGGED, LAST, Bag, emit_call
from recfuse.passes.graph.joins import is_join, join
from recfuse.passes.graph.nodes import arguments_of, aten, is_call, operator_of, same, tensor_of, value_of
from recfuse.passes.graph.pattern import GraphPattern, Match, Part
from recfuse.passes.graph.program import Program

_POOLED = (aten.embedding_bag, aten._embedding_bag, aten._embedding_bag_forward_only)
_FORM = 4  # position of the form in the key of a group
_PADDED = "the row of padding_idx is read but has no gradient, which no kernel does"
_FIXED_ALONE = (
    f"{_PADDED}, and the weight, though frozen, may be trained later. Use an EmbeddingBag, a fixed number of "
    "lookups, or recfuse.backend()."
)
_REDUCED = {aten.sum: "sum", aten.mean: "mean"}


def find(program: Program) -> Iterator[Match]:
    """Yield groups of bags, and the bags that are left."""
    bags = []
    for bag, reason in bags_of(program):
        if reason := reason or (_FIXED_ALONE if needs_frozen(program, bag) else ""):
            yield Match([_part(program, bag)], why_not=reason)
        else:
            bags.append(bag)
    for group in groups_of(program, bags):
        yield _match(program, group)


def bags_of(program: Program) -> Iterator[tuple[Bag, str]]:
    """Yield the bags of a program, each with the reason why no operator can replace it, or ""."""
    for node in program.nodes:
        bag = _bag_at(node) if node.users else None
        if bag is not None:
            yield bag, why_no_kernel(program, bag) or _trained_padding(program, bag)


def needs_frozen(program: Program, bag: Bag) -> bool:
    """Return whether a call must refuse gradients, because a frozen weight could be trained later."""
    return bag.pads_gradient and not program.is_guarded


def groups_of(program: Program, bags: Sequence[Bag], *, mixed: bool = False) -> Iterable[list[Bag]]:
    """Return groups of bags that one call can pool: equal numbers of bags, independent of each other.

    ``mixed``: the call takes bags of every form, weighted or not.
    """
    results = {bag.result for bag in bags}
    depths = program.depths(results.__contains__)
    equal = _equal_counts(bags)
    groups: dict[tuple[object, ...], list[Bag]] = {}
    for bag in bags:
        table = bag.table
        key = (
            depths[bag.result], program.effects.region[bag.result], table.device, table.dtype,
            *((None,) * 3 if mixed else (bag.form, bag.weights is not None, bag.sparse)),
            equal[_count(bag.result)],
        )  # fmt: skip
        groups.setdefault(key, []).append(bag)
    for key in list(groups):
        other = (*key[:_FORM], JAGGED, *key[_FORM + 1 :])
        if key[_FORM] == FIXED and other in groups:
            groups[other] = groups.pop(key) + groups[other]
    return groups.values()


def _match(program: Program, group: Sequence[Bag]) -> Match:
    parts = [_part(program, bag) for bag in group]
    if len(group) == 1 and is_call(group[0].result, aten.embedding):
        return Match(parts, why_not="a sample has a single lookup, and no other table has as many samples")

    def apply() -> str:
        suffix = join(
            program, [(bag.result, bag.dim) for bag in group], lambda order: _call(program, group, order)
        )
        tables = len({bag.weight for bag in group})
        return f"{len(group)} bags of {tables} table{'s' * (tables > 1)} in one call{suffix}"

    return Match(parts, apply, key=group[0].result.name)


def _call(program: Program, group: Sequence[Bag], order: Sequence[int]) -> Node:
    return emit_call(program, [group[number] for number in order])


def _equal_counts(bags: Sequence[Bag]) -> dict[object, object]:
    """Map each number of bags to a representative of the equal numbers.

    The numbers of results that are adjacent in a cat are equal.
    """
    equal = {_count(bag.result): _count(bag.result) for bag in bags}

    def first(size: object) -> object:
        while equal.setdefault(size, size) != size:
            size = equal[size]
        return size

    for side_by_side in {user: None for bag in bags for user in bag.result.users if is_join(user)}:
        sizes = [first(_count(item)) for item in side_by_side.args[0]]  # type: ignore[union-attr]
        for size in sizes:
            equal[first(size)] = first(sizes[0])
    return {size: first(size) for size in list(equal)}


def _count(node: Node) -> object:
    return symbol(value_of(node).shape[0])


def symbol(size: object) -> object:
    """Return a comparable key for a number of bags: torch's ShapeEnv gives equal numbers one expression."""
    return size if isinstance(size, int) else str(size.node.expr)  # type: ignore[attr-defined]


def _part(program: Program, bag: Bag) -> Part:
    return Part(program.name(bag.weight), bag.operators)


# ---- recognition of bags


def _bag_at(node: Node) -> Bag | None:
    """Return the bag whose result is ``node``, or None."""
    if is_call(node, *_POOLED):
        return _pooled(node)
    if is_call(node, aten.embedding):
        return _of_one(node)
    called = operator_of(node)
    mode = _REDUCED.get(called.overloadpacket) if called is not None else None
    return _reduced(node, mode) if mode else None


def _pooled(node: Node) -> Bag | None:
    """Return the bag of an ``embedding_bag`` of which only the first of four results is used."""
    outputs = [user for user in node.users if user.users]
    if len(outputs) != 1 or outputs[0].args[1:] != (0,):
        return None
    arguments = arguments_of(node)
    offsets, padding_idx = arguments["offsets"], arguments.get("padding_idx")
    rows = value_of(arguments["weight"]).shape[0]
    padding_idx = -1 if padding_idx is None else padding_idx
    if (
        padding_idx < 0
        and arguments.get("padding_idx") is not None
        and node.target is aten.embedding_bag.padding_idx
    ):
        padding_idx += rows
    mode = MODES[arguments["mode"]]  # torch and recfuse number modes alike
    length = _length(offsets, arguments["indices"])
    form = LAST if arguments["include_last_offset"] else FIXED if length else JAGGED
    inputs = _input_of(arguments["indices"], offsets) if form == FIXED else None
    counted = inputs or (arguments["indices"] if form == FIXED and length == 1 else offsets)
    return Bag(
        outputs[0], arguments["weight"], inputs or arguments["indices"], mode, f"embedding_bag, {mode}",
        (node,), form, length or 0, None if form == FIXED else offsets, counted,
        arguments["per_sample_weights"], padding_idx, bool(arguments["sparse"]),
    )  # fmt: skip


def _length(offsets: Node, indices: Node) -> int | None:
    """Return the fixed length of bags whose offsets are ``arange(0, lookups, length)``, or None.

    An input ``[bags, length]`` has such offsets; ``arange(lookups)`` gives bags of one lookup.
    """
    if not is_call(offsets, aten.arange):
        return None
    arguments = arguments_of(offsets)
    end, step, lookups = arguments["end"], arguments.get("step", 1), value_of(indices).shape[0]
    if arguments.get("start", 0) != 0 or not isinstance(step, int) or step < 1:
        return None
    if not statically_known_true(lookups % step == 0):  # else the last bag is shorter
        return None
    is_all = (
        value_of(end) == lookups if isinstance(lookups, int) else symbol(value_of(end)) == symbol(lookups)
    )
    return step if is_all else None


def _input_of(indices: Node, offsets: Node) -> Node | None:
    """Return the input ``[bags, length]`` if ``indices`` are its flat form, else None."""
    arguments = indices.args[0] if is_call(indices, aten.reshape, aten.view) else None
    shape = tensor_of(arguments).shape if tensor_of(arguments) is not None else ()  # type: ignore[union-attr]
    is_input = len(shape) == 2 and symbol(shape[0]) == symbol(value_of(offsets).shape[0])
    return arguments if is_input else None  # type: ignore[return-value]


def _of_one(node: Node) -> Bag | None:
    arguments = arguments_of(node)
    if value_of(arguments["indices"]).dim() != 1:
        return None
    return Bag(
        node, arguments["weight"], arguments["indices"], "sum", "embedding", (), FIXED, 1,
        counted=arguments["indices"], sparse=bool(arguments["sparse"]),
        pads_gradient=arguments["padding_idx"] >= 0,
    )  # fmt: skip


def _reduced(node: Node, mode: str) -> Bag | None:
    """Return the bag of ``embedding(weight, indices [B, L])`` reduced over L, or None."""
    arguments = arguments_of(node)
    rows, product, weights = _weighted(arguments["self"], mode)
    if not is_call(rows, aten.embedding) or arguments.get("dim") not in ([1], [-2], (1,), (-2,)):
        return None
    looked_up = arguments_of(rows)
    shape = value_of(looked_up["indices"]).shape
    if len(shape) != 2 or arguments["keepdim"] or len(rows.users) > 1:
        return None
    if arguments["dtype"] not in (None, value_of(rows).dtype) or not statically_known_true(shape[1] > 0):
        return None
    form, length = (FIXED, shape[1]) if isinstance(shape[1], int) else (JAGGED, 0)
    operators = f"embedding + {mode}" if weights is None else f"weighted embedding + {mode}"
    return Bag(
        node, looked_up["weight"], looked_up["indices"], mode, operators, (rows, *product), form,
        length, counted=looked_up["indices"], weights=weights, sparse=bool(looked_up["sparse"]),
        pads_gradient=looked_up["padding_idx"] >= 0,
    )  # fmt: skip


def _weighted(rows: Node, mode: str) -> tuple[Node, tuple[Node, ...], Node | None]:
    """Split ``embedding(...) * factors.unsqueeze(-1)``: the embedding, the product and factors ``[B, L]``."""
    if mode != "sum" or rows.target is not aten.mul.Tensor or len(rows.users) > 1:
        return rows, (), None
    for looked_up, wide in (rows.args[:2], rows.args[1::-1]):
        if not is_call(looked_up, aten.embedding) or not is_call(wide, aten.unsqueeze):
            continue
        factors, dim = wide.args[:2]  # type: ignore[union-attr]
        shapes = value_of(factors).shape, value_of(looked_up).shape, value_of(rows).shape
        is_factor = dim in (-1, 2) and len(shapes[0]) == 2 and all(map(same, shapes[0], shapes[1]))
        if (
            is_factor
            and all(map(same, shapes[1], shapes[2]))
            and value_of(rows).dtype == value_of(looked_up).dtype
        ):
            return looked_up, (rows,), factors  # type: ignore[return-value]
    return rows, (), None


def _trained_padding(program: Program, bag: Bag) -> str:
    """Return why an embedding whose padding row must get no gradient cannot be a bag, or ""."""
    lookup = bag.inside[0] if bag.inside else bag.result
    if is_call(lookup, aten.embedding) and bag.pads_gradient and program.trains(bag.weight):
        return f"{_PADDED}. Freeze the weight, by requires_grad_(False), or use an EmbeddingBag."
    return ""


def why_no_kernel(program: Program, bag: Bag) -> str:
    """Return why no kernel looks up the rows of a bag, or ""."""
    table, lookup = bag.table, bag.inside[0] if bag.inside else bag.result
    arguments = arguments_of(lookup)
    if table.dtype not in DTYPES or table.layout is not torch.strided:
        return f"weight is {table.dtype}, {table.layout}; expected strided float32, float16 or bfloat16"
    if table.device.type not in ("cpu", "cuda") or (table.is_cuda and not HAS_CUDA_KERNELS):
        return f"weight is on {table.device}, which has no kernels"
    if not all(isinstance(size, int) for size in table.shape) or not table.is_contiguous():
        return (
            f"weight has shape {list(table.shape)} and strides {list(table.stride())}; expected fixed sizes "
            "and contiguous memory. Store weight.contiguous()."
        )
    if arguments["scale_grad_by_freq"]:
        return (
            "scale_grad_by_freq is set, and no kernel divides gradients by the frequency of rows. Make the "
            "table without it."
        )
    tensors = [tensor_of(node) for node in (bag.indices, bag.offsets) if node is not None]
    if any(
        tensor is None or tensor.dtype not in INTEGERS or tensor.device != table.device for tensor in tensors
    ):
        kinds = ", ".join(f"{tensor.dtype} on {tensor.device}" for tensor in tensors if tensor is not None)
        return f"indices or offsets are {kinds or 'no tensor'}; expected int32 or int64 on {table.device}"
    factors = (table.dtype, torch.bool)  # a mask becomes numbers
    if bag.weights is not None and (bag.mode != "sum" or value_of(bag.weights).dtype not in factors):
        kinds = f"{value_of(bag.weights).dtype} in mode {bag.mode}"
        return f"per_sample_weights are {kinds}; expected {table.dtype} in mode sum"
    read = [node for node in (bag.weight, bag.indices, bag.offsets, bag.weights) if node is not None]
    if any(program.effects.is_written(node) for node in read):
        return "an input is written to in place. Write to a copy."
    return program.effects.why_not((*bag.inside, bag.result))


PATTERN = GraphPattern("bags", 50, find)
