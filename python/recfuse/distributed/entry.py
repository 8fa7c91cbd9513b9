"""``shard`` and ``unshard``: the tables of a model over the ranks of a mesh, in place."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from recfuse._arguments import wrong_type
from recfuse._codes import row_bytes
from recfuse._library import VERSION
from recfuse.distributed.agreement import Description, agree, generator_state
from recfuse.distributed.applying import Prepared
from recfuse.distributed.modules import ShardedPooling
from recfuse.distributed.parallel import ignore_parts
from recfuse.distributed.plans import placements_of
from recfuse.distributed.preparing import check_memory, facts_of, prepare, shardable, why_left
from recfuse.distributed.reports import ShardEntry, ShardReport
from recfuse.distributed.restoring import restore
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.nn.packed.by_table.raw_states import PART, refuse_raw_states, watch_steps
from recfuse.nn.packed.holders import check_optimizers, shared_search
from recfuse.nn.packed.optimizers import Move
from recfuse.perf.placing.plan import ShardPlan

WHERE = "recfuse.distributed.shard"
_EXCHANGE_DTYPES = (None, torch.float32, torch.float16, torch.bfloat16)
_numbers = itertools.count()


def shard(
    module: torch.nn.Module,
    mesh: DeviceMesh | None = None,
    plan: Mapping[str, Any] | ShardPlan | str | os.PathLike[str] | None = None,
    *,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    average: bool = True,
    exchange_dtype: torch.dtype | None = None,
) -> ShardReport:
    """Shard the embedding tables of a model over the ranks of a mesh, in place.

    Every :class:`recfuse.nn.FusedEmbeddingBagCollection`, every :class:`recfuse.nn.FusedEmbeddingBagList` and
    every EmbeddingBagCollection of TorchRec that :func:`recfuse.swap` has swapped becomes sharded. Arguments,
    names and results of their calls stay: each rank passes its own samples, and gets its own pooled rows. All
    ranks of the mesh call ``shard``, the model and its ``backward()`` together, in the same order.

    Tables on the ``meta`` device get the values that one process would have drawn from the generator of this
    rank; for that each rank draws every table, and needs memory for the largest. Other tables keep their
    values; those of copied tables are rank 0's.

    Create optimizers and DistributedDataParallel afterwards, or pass the optimizers. Each rank has packed
    Parameters with its own parts. DistributedDataParallel ignores them without further calls.

    Args:
        module: a model, or a collection itself.
        mesh: the ranks, with one dimension. Default: all ranks of the default group.
        plan: for each table, by its name in the ``state_dict`` without ".weight" or by its own name: a rank,
            or ``Shard(0)`` (cut by rows), ``Shard(1)`` (columns) or ``Replicate()`` of
            ``torch.distributed.tensor``, or :class:`Cuts`. Or a plan of :func:`plan`, or the path of its
            file. Default: small tables are copied, large tables cut, and the others placed by cost.
        optimizers: optimizers of the tables, which continue with this rank's Parameters. Not with a state if
            a table is cut by columns.
        average: divide gradients of tables by the number of ranks, as DistributedDataParallel does. Default:
            True.
        exchange_dtype: the dtype of pooled rows and of their gradients between ranks, for example
            torch.bfloat16. Default: that of the result, or float32 if a table of halves is cut by rows.

    Returns:
        ShardReport: the placement of each table, the way of the exchange, and modules that were left.

    Raises:
        TypeError: an argument of another type.
        ValueError: ranks that differ in tables, plan, mesh or versions, on every rank, with the first
            difference; a plan of other tables or of another number of ranks; a module that is sharded
            already; an optimizer that holds a table and was not passed. Nothing has changed then.

    Example:
        >>> tables = recfuse.nn.FusedEmbeddingBagCollection([(1000, 16), (50, 8)])
        >>> report = recfuse.distributed.shard(tables, plan={"t0": 0, "t1": Replicate()})  # doctest: +SKIP
        >>> tables(indices, offsets)  # on every rank, with its own samples  # doctest: +SKIP

    Note:
        Ranks exchange lookups and rows by collectives: NCCL on GPUs, gloo on the CPU. A result is
        bit-identical to that of one process with the batches of all ranks, except that the sums of a table
        that is cut by rows, and the added gradients of a copied table, have another order, and that equal
        maxima of parts give their gradient to the first part. A rank that stops, or raises inside
        ``backward()``, makes the others raise within the timeout of the group.

    Source: Naumov et al., "Deep Learning Training in Facebook Data Centers", 2020 (tables on ranks, exchanges
    of indices and of pooled rows).
    """
    if not isinstance(module, torch.nn.Module):
        raise wrong_type(f"{WHERE}: module", module, "a torch.nn.Module")
    mesh = _mesh(mesh)
    group, error, prepared, description = mesh.get_group(), None, [], []
    own_optimizers: tuple[torch.optim.Optimizer, ...] = ()
    try:
        own_optimizers = check_optimizers(optimizers, WHERE)
        prepared, description = _prepare(module, mesh, plan, own_optimizers, average, exchange_dtype)
    except Exception as raised:
        error = raised
    agree(description, error, group, WHERE)
    report = None
    for one in prepared:
        exchange = one.apply(next(_numbers), average, exchange_dtype)
        report = report or ShardReport(mesh.size(), exchange.path, exchange.reason)
        for name, table, form in zip(one.keys, one.placed, one.forms, strict=True):
            sizes = tuple(part.rows * row_bytes(part.columns, form.dtype) for part in table.parts)
            ranks = tuple(part.rank for part in table.parts)
            whole = form.rows * row_bytes(form.dim, form.dtype)
            report.entries.append(ShardEntry(name, str(table), whole, ranks, sizes))
    assert report is not None
    report.left = [
        (name, why) for name, found in module.named_modules() if (why := why_left(module, name, found))
    ]
    _mark_parts(prepared)
    refuse_raw_states(own_optimizers)
    watch_steps()
    return report


def unshard(module: torch.nn.Module) -> list[str]:
    """Restore the modules that :func:`shard` has sharded, with whole tables on every rank, in place.

    All ranks call it together. Create optimizers afterwards.

    Args:
        module: a model, or a collection itself.

    Returns:
        list: the names of the restored modules.

    Raises:
        TypeError: no module. ValueError: an optimizer or DistributedDataParallel holds a table, on every
            rank. Nothing has changed then.

    Example:
        >>> recfuse.distributed.unshard(model)  # doctest: +SKIP
    """
    where = "recfuse.distributed.unshard"
    if not isinstance(module, torch.nn.Module):
        raise wrong_type(f"{where}: module", module, "a torch.nn.Module")
    found = [(name, one) for name, one in module.named_modules() if isinstance(one, ShardedPooling)]
    if not found:
        return []
    error = None
    try:
        Move((), [matrix for _, one in found for matrix in one._sharding.matrices()], where)
    except Exception as raised:
        error = raised
    agree([("modules", ", ".join(name for name, _ in found))], error, found[0][1]._sharding.group, where)
    for _, one in found:
        restore(one)
    return [name for name, _ in found]


def _mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentValueError(
            f"{WHERE}: no process group exists. Call torch.distributed.init_process_group() first."
        )
    if mesh is None:
        kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
        return init_device_mesh(kind, (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise wrong_type(f"{WHERE}: mesh", mesh, "a torch.distributed.device_mesh.DeviceMesh")
    if mesh.ndim != 1:
        raise ArgumentValueError(
            f'{WHERE}: mesh has {mesh.ndim} dimensions; expected 1. Pass a dimension of it, as mesh["name"].'
        )
    if mesh.get_coordinate() is None:
        raise ArgumentValueError(f"{WHERE}: mesh has no rank {dist.get_rank()}; expected a call on its ranks")
    return mesh


def _prepare(
    module: torch.nn.Module, mesh: DeviceMesh, plan: Any, optimizers: tuple[torch.optim.Optimizer, ...],
    average: bool, exchange_dtype: torch.dtype | None,
) -> tuple[list[Prepared], Description]:  # fmt: skip
    """Check all arguments, without a change, and describe them."""
    if exchange_dtype not in _EXCHANGE_DTYPES:
        raise ArgumentTypeError(
            f"{WHERE}: exchange_dtype is {exchange_dtype!r}; expected torch.float32, torch.float16, "
            "torch.bfloat16 or None"
        )
    modules = shardable(module)
    facts = [facts_of(name, one) for name, one in modules]
    placed = placements_of(plan, [fact for own in facts for fact in own], mesh.size())
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    with shared_search():
        prepared = [
            prepare(
                name,
                one,
                [placed[fact.name] for fact in own],
                [fact.name for fact in own],
                mesh,
                device,
                optimizers,
            )
            for (name, one), own in zip(modules, facts, strict=True)
        ]
    if device.type == "cuda":
        check_memory(prepared, torch.cuda.get_device_properties(device).total_memory)
    described: Description = [
        ("recfuse", VERSION),
        ("torch", torch.__version__),
        ("the mesh", str(mesh.mesh.tolist())),
        ("average", str(bool(average))),
        ("exchange_dtype", str(exchange_dtype)),
    ]
    for one in prepared:
        described += one.description()
    if any(one.is_meta for one in prepared):
        described.append(("the generator's state", generator_state(device)))
    return prepared, described


def _mark_parts(prepared: list[Prepared]) -> None:
    """Mark this rank's Parameters, so that no tool takes them for those of all ranks."""
    for one in prepared:
        for matrix in one.sharding.matrices():
            matrix._ddp_ignored = True  # type: ignore[attr-defined]
            setattr(matrix, PART, True)
    ignore_parts()
