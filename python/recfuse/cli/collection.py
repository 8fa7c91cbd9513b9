"""`recfuse tune` for a collection of tables: from files, or a named workload."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from typing import Any

_UNSUPPORTED = re.compile(r"Unsupported global: GLOBAL (\S+)")  # in an error of torch.load
BATCHES = (
    "a list of tuples (indices, offsets) or (indices, offsets, per_sample_weights), or for a "
    "FusedEmbeddingBagList (offsets, indices) or (offsets, indices, row_weights)"
)
_SIZES_SEED = 1  # for the sizes of a workload's batches; --seed determines their contents


def add_arguments(parser: argparse.ArgumentParser, which: Any) -> None:
    """Add the options that only collections take; `which` is the group of options that name the
    subject of tuning.
    """
    tables = (
        "file in which torch.save wrote a recfuse.nn.FusedEmbeddingBagCollection, a FusedEmbeddingBagList, "
    )
    tables += "or a dict of [rows, dim] tensors such as a state_dict, whose tables all have --mode"
    which.add_argument("--collection", metavar="FILE", help=tables)
    model = "published model A to F, or a variant such as A-zipf1.0, with the published batch sizes"
    which.add_argument("--workload", metavar="NAME", help=model)
    resume = "file of finished measurements of a collection, from which an interrupted run continues"
    parser.add_argument("--resume", metavar="FILE", help=resume)


def problem_of(arguments: argparse.Namespace, device: str) -> tuple[Any, list[Any]]:
    """Return the collection and its batches, on a device."""
    if arguments.workload:
        return _of_workload(arguments, device)
    if not os.path.isfile(str(arguments.batches or "")):
        raise ValueError(
            f"--batches is {arguments.batches!r}; expected with --collection a file that torch.save wrote, "
            + BATCHES
        )
    collection = collection_in(arguments.collection, arguments.mode).to(device)
    return collection, _load(arguments.batches, "--batches", (list, tuple))


def _of_workload(arguments: argparse.Namespace, device: str) -> tuple[Any, list[Any]]:
    import torch

    from recfuse import nn
    from recfuse.data import workloads

    model = workloads.model(arguments.workload, seed=arguments.seed)
    dtype, integer = getattr(torch, arguments.dtype), getattr(torch, arguments.index)
    tables = [
        nn.Table(rows, dim, mode=arguments.mode, dtype=dtype)
        for rows, dim in zip(model.rows, model.dims, strict=True)
    ]
    number = int(arguments.batches or 16)
    sizes = workloads.batch_sizes(number, _SIZES_SEED)
    if arguments.batch:
        sizes[:] = arguments.batch
    batches = []
    for at, size in enumerate(sizes):
        batch = model.batch(int(size), seed=arguments.seed + 1 + at)
        batches.append(tuple(torch.from_numpy(array).to(device, integer) for array in batch))
    return nn.FusedEmbeddingBagCollection(tables, device=device), batches


def collection_in(path: str, mode: str) -> Any:
    """Return the collection in a file, or a collection of the tensors in a file."""
    import torch

    from recfuse import nn

    loaded = _load(path, "--collection", (torch.nn.Module, Mapping))
    if isinstance(loaded, torch.nn.Module):
        return loaded
    items = ((str(name), value) for name, value in loaded.items())
    tables = {name: value for name, value in items if isinstance(value, torch.Tensor) and value.dim() == 2}
    if not tables:
        raise ValueError(
            f"--collection is {path!r}, a dict without a tensor [rows, dim]; expected a state_dict of tables"
        )
    bags = [torch.nn.EmbeddingBag.from_pretrained(table, mode=mode) for table in tables.values()]
    names = [name.replace(".", "_") for name in tables]  # a module's name has no dots
    return nn.FusedEmbeddingBagCollection.from_embedding_bags(bags, names)


def _load(path: str, option: str, kinds: tuple[type, ...]) -> Any:
    """Load a file that `torch.save` wrote, without running code of the file."""
    import torch

    from recfuse import nn
    from recfuse.data.collection import CollectionTrace
    from recfuse.nn.collection_view import SAVED_CLASSES
    from recfuse.plan.collection import CollectionPlan
    from recfuse.plan.device import Device
    from recfuse.plan.features import CallForm, FeatureTable, Occupancy
    from recfuse.plan.report import Decision

    modules = nn.EmbeddingBag, torch.nn.EmbeddingBag, torch.nn.ModuleDict, torch.nn.ModuleList
    plans = CollectionPlan, FeatureTable, CallForm, CollectionTrace, Occupancy, Decision, Device
    allowed: list[Any] = [dict, *modules, *SAVED_CLASSES, *plans]
    try:
        with torch.serialization.safe_globals(allowed):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{option} is {path!r}, which torch.load does not read: {_line(error)}") from error
    if not isinstance(loaded, kinds):
        from recfuse.errors import a_type  # imported here because it imports torch

        names = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{option} is {path!r}, which holds {a_type(loaded)}; expected a {names}")
    return loaded


def _line(error: Exception) -> str:
    """Return the informative line of an error of torch.load."""
    if match := _UNSUPPORTED.search(str(error)):
        return f"it holds a {match[1]}; expected only tensors or collections of recfuse.nn"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "WeightsUnpickler error" in line), lines[0])
