"""Builds the calls that the options of `recfuse explain` and `recfuse compile` describe."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from recfuse._codes import DTYPE_NAMES, DTYPES
from recfuse.cli.collection import collection_in
from recfuse.nn import FusedEmbeddingCollection, Table
from recfuse.nn.collection_view import FeatureForm
from recfuse.nn.columns import Identity, json
from recfuse.ops.schedules import SIXTEENTHS
from recfuse.perf import described
from recfuse.perf.described_histories import LAYOUTS, history_calls
from recfuse.perf.described_tables import (
    ANY_BAGS,
    ANY_SIZE,
    Size,
    Tables,
    collection_calls,
    collection_of,
    expecting,
    mapped_calls,
    pin_calls,
    table_of,
    tables_like,
)
from recfuse.perf.described_training import training_calls
from recfuse.plan import CollectionPlan, Plan

if TYPE_CHECKING:
    from recfuse.perf.described import DescribedCall

_OF_TABLES = frozenset(("fused_embedding_bag", "fused_embedding_bag_backward"))


def described_calls(
    arguments: argparse.Namespace, plans: dict[str, Plan | CollectionPlan], any_batch: bool
) -> Iterator[DescribedCall]:
    """Yield the calls.

    With `any_batch`, the batches of plans and of training cover all other batches, and every choice of a
    caller is described: mappings, pinned rows. Otherwise the batches are those of a plan's trace, and of
    --batch and --pooling.
    """
    yield from _of_sizes(arguments, any_batch)
    for plan in plans.values():
        if isinstance(plan, Plan):
            yield from _of_plan(plan, arguments, any_batch)
    for path, plan in plans.items():
        if isinstance(plan, CollectionPlan):
            yield from _of_collection_plan(path, plan, arguments, any_batch)
    for path in arguments.collection:
        yield from _of_collection(path, arguments, any_batch)
    if any_batch and (arguments.dim or plans or arguments.collection):
        yield from pin_calls()
    yield from _of_columns(arguments, any_batch)
    yield from _of_ikbo(arguments)


def _integers(form: Any) -> tuple[torch.dtype, torch.dtype]:
    return getattr(torch, form.indices), getattr(torch, form.offsets)


def _sizes(arguments: argparse.Namespace, features: int = 1) -> list[Size]:
    pairs = itertools.product(arguments.batch, arguments.pooling)
    return [Size(bags, features * bags * pooling) for bags, pooling in pairs]


def _trained(tables: Tables, arguments: argparse.Namespace, sizes: Sequence[Size]) -> Iterator[DescribedCall]:
    for kind in arguments.training:
        yield from tables.training(kind, sizes, arguments.stochastic_rounding)


def _of_sizes(arguments: argparse.Namespace, any_batch: bool) -> Iterator[DescribedCall]:
    lists = (getattr(arguments, name) for name in ("dim", "dtype", "mode", "index"))
    for dim, name, mode, index in itertools.product(*lists):
        dtype, integer = getattr(torch, name), getattr(torch, index)
        weighted = arguments.weighted and mode == "sum"
        for bags, pooling in itertools.product(arguments.batch, arguments.pooling):
            yield described.bag_call(
                arguments.rows, dim, dtype=dtype, mode=mode, integer=integer, bags=bags, pooling=pooling,
                weighted=weighted, padded=arguments.padded, schedule=arguments.schedule,
                check=not arguments.unchecked,
            )  # fmt: skip
        form = FeatureForm(arguments.rows, dim, dtype, mode, arguments.padded)
        tables = table_of(form, (integer, integer), weighted)
        yield from _trained(tables, arguments, ANY_SIZE if any_batch else _sizes(arguments))


def _of_plan(plan: Plan, arguments: argparse.Namespace, any_batch: bool) -> Iterator[DescribedCall]:
    table, bags = plan.table, max(1, round(plan.trace.bags))
    dtype, integers = getattr(torch, table.dtype), _integers(table)
    pooling = round(plan.trace.lookups / bags)
    yield described.bag_call(
        table.rows, table.dim, dtype=dtype, mode=table.mode, integer=integers[0], bags=bags, pooling=pooling,
        weighted=table.weighted, padded=table.padded, schedule=plan.schedule, check=not arguments.unchecked,
    )  # fmt: skip
    tables = table_of(table.form, integers, table.weighted)
    yield from _trained(tables, arguments, ANY_SIZE if any_batch else [Size(bags, bags * pooling)])


def _of_collection_plan(
    path: str, plan: CollectionPlan, arguments: argparse.Namespace, any_batch: bool
) -> Iterator[DescribedCall]:
    tables = [
        Table(form.rows, form.dim, mode=form.mode, padding_idx=0 if form.padded else None, dtype=form.dtype)
        for form in (table.form for table in plan.feature_tables)
    ]
    described_tables = collection_of(
        path, tables, _integers(plan.form), plan.form.weighted, plan.rows(), plan.warps
    )
    lengths = [max(0, expected) / SIXTEENTHS for expected in plan.expected]
    bags = max(1, round(plan.trace.bags))
    options = {"check": not arguments.unchecked}
    yield from collection_calls(described_tables, lengths, ANY_BAGS if any_batch else [bags], **options)
    if any_batch:
        yield from mapped_calls(described_tables, lengths, **options)
    if any_batch and arguments.huge_batches:
        yield from collection_calls(described_tables, lengths, ANY_BAGS, huge=True, **options)
        yield from mapped_calls(described_tables, lengths, huge=True, **options)
    size = Size(bags, round(plan.trace.lookups))
    yield from _trained(described_tables, arguments, ANY_SIZE if any_batch else [size])


def _of_collection(path: str, arguments: argparse.Namespace, any_batch: bool) -> Iterator[DescribedCall]:
    collection = collection_in(path, arguments.mode[0])
    tables, features = tables_like(collection), len(collection.layout.dims)
    only_histories = isinstance(collection, FusedEmbeddingCollection)
    layouts = arguments.histories or (LAYOUTS if only_histories else ())
    for index in arguments.index if layouts else ():
        sizes = ANY_SIZE if any_batch else _sizes(arguments, features)
        rounding = arguments.stochastic_rounding
        yield from history_calls(
            path, tables, getattr(torch, index), layouts, sizes, arguments.training, rounding
        )
    if only_histories:
        return
    options = {"check": not arguments.unchecked}
    for index in arguments.index:
        new = partial(collection_of, path, tables, (getattr(torch, index),) * 2, arguments.weighted)
        for pooling in arguments.pooling:
            described_tables, lengths = new(expecting(features, pooling)), [pooling] * features
            yield from collection_calls(
                described_tables, lengths, ANY_BAGS if any_batch else arguments.batch, **options
            )
            if any_batch:
                yield from mapped_calls(described_tables, lengths, **options)
        described_tables = new()
        if any_batch:  # before it has learned mean bag lengths, as in a CUDA graph
            yield from collection_calls(described_tables, [0] * features, [1], **options)
        yield from _trained(
            described_tables, arguments, ANY_SIZE if any_batch else _sizes(arguments, features)
        )


def _of_columns(arguments: argparse.Namespace, any_batch: bool) -> Iterator[DescribedCall]:
    if arguments.columns == []:
        yield from _of_any_columns(arguments)
    columns = [(path, json.read(path)) for path in arguments.columns or ()]
    forms = (False, True) if any_batch else (False,)
    for (path, specifications), batch, jagged in itertools.product(columns, arguments.batch, forms):
        name, words = f"{path}: {len(specifications)} columns", f"{batch} {'jagged ' * jagged}samples"
        inputs = described.columns_batch(specifications, batch, jagged)
        module: Any = described.new_columns(specifications)
        module.bounds_check = "off" if arguments.unchecked else "on"
        yield described.DescribedCall(f"{name} of {words}", module, inputs)
        new = partial(described.new_columns, specifications)
        rounding = arguments.stochastic_rounding
        for kind in arguments.training:
            yield from training_calls(name, new, [(words, inputs)], kind, stochastic_rounding=rounding)


def _of_any_columns(arguments: argparse.Namespace) -> Iterator[DescribedCall]:
    """Yield calls of columns of each dtype, and their gradients except the gradients of tables.

    Other columns have the same kernels.
    """
    for (name, dtype), jagged in itertools.product(zip(DTYPE_NAMES, DTYPES, strict=True), (False, True)):
        columns = [Identity("any", num_embeddings=1000, embedding_dim=8, dtype=dtype)]
        batch = described.columns_batch(columns, arguments.batch[0], jagged)
        module = described.new_columns(columns)
        yield described.DescribedCall(f"columns of {name}", module, batch)
        yield described.DescribedCall(f"columns of {name}, gradients", module, batch, True, _OF_TABLES)


def _of_ikbo(arguments: argparse.Namespace) -> Iterator[DescribedCall]:
    form: dict[str, Any] = {
        "users": arguments.users,
        "candidates": arguments.candidates,
        "dtype": getattr(torch, arguments.ikbo_dtype),
    }
    for sizes in arguments.ikbo_linear:
        yield described.linear_call(*sizes, **form)
    for sizes in arguments.ikbo_attention:
        yield described.attention_call(*sizes, **form)
