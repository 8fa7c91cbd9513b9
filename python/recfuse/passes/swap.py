"""``swap`` puts recfuse's modules into a model, or its operators into a graph, in place."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from recfuse._arguments import wrong_type
from recfuse._codes import DTYPES
from recfuse.errors import ArgumentValueError, a_type
from recfuse.nn.embedding_bag import EmbeddingBag
from recfuse.nn.lookups.module import PackedLookups
from recfuse.nn.memory import advise_huge_pages
from recfuse.nn.packed.fusable import gradient_hooks, has_hooks, is_fake_parameter
from recfuse.nn.packed.holders import check_optimizers, shared_search
from recfuse.nn.packed.module import PackedModule
from recfuse.nn.packed.optimizers import Move
from recfuse.nn.packed.table import PackedTable
from recfuse.nn.packed.table_dict import TableHolder
from recfuse.optim.adoptable import check_adoptable
from recfuse.optim.adoption import adopt
from recfuse.optim.parameters import dense_tables, embedding_parameters
from recfuse.passes.apply_emb import POOL_ALL, ApplyEmb
from recfuse.passes.pattern import Pattern
from recfuse.passes.quantize_bags import QUANTIZED
from recfuse.passes.report import SwapEntry, SwapReport
from recfuse.passes.shared_tables import check_fused_alone
from recfuse.passes.torchrec_collection import TorchRecCollection, TorchRecEmbeddings
from recfuse.passes.torchrec_quantized import is_swapped, swap_quantized
from recfuse.passes.unswap import unswap

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["SwapEntry", "SwapReport", "swap", "unswap"]

_PATTERNS: tuple[type[Pattern], ...] = (TorchRecCollection, TorchRecEmbeddings, ApplyEmb)
_SWAPPED = EmbeddingBag, PackedModule, PackedLookups, *QUANTIZED
_Owners = dict[int, list[tuple[str, torch.nn.Module]]]


def swap(
    model: torch.nn.Module | ExportedProgram,
    *,
    fuse: bool = True,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    fuse_optimizers: bool = False,
    check: Iterable[Any] = (),
    patterns: Sequence[str] | None = None,
    predict: bool | str = False,
) -> SwapReport:
    """Replace embedding tables of a model, or operators in a graph, by recfuse's, in place.

    In a module, ``swap`` replaces submodules:

    - Every ``torch.nn.EmbeddingBag`` on the CPU or a CUDA device becomes a :class:`recfuse.nn.EmbeddingBag`.
      It stays the same object, with its Parameter, name and hooks.
    - With ``fuse``, every unsharded ``torchrec.EmbeddingBagCollection`` pools all its tables in one call, and
      every unsharded ``torchrec.EmbeddingCollection`` looks all its tables up in one call.
    - With ``fuse``, every ``EmbeddingBagCollection`` that TorchRec has quantised pools all its tables in one
      call, and reads their int8 and int4 rows where they lie. So does FBGEMM's module of quantised tables,
      ``IntNBitTableBatchedEmbeddingBagsCodegen``, in a model without TorchRec.
    - With ``fuse``, a model like facebookresearch/dlrm's ``DLRM_Net`` pools all its tables in one call. Such
      a model has ``emb_l``, a ModuleList of EmbeddingBag, and a method ``apply_emb(lS_o, lS_i, emb_l,
      v_W_l)``. ``swap`` reads the code of the method, and replaces it only if the code proves that one call
      gives the same result.

    In an ``ExportedProgram``, or a ``torch.fx.GraphModule`` of ATen operators, ``swap`` rewrites the graph
    (``exported.graph_module``); docs/passes.md lists the patterns. Weights do not move. For torch.compile use
    :func:`recfuse.backend`.

    Fused tables of one dtype and dim have one new Parameter. Create optimizers, and wrappers such as
    DistributedDataParallel, after the swap, or pass the optimizers to it. ``state_dict`` keeps its names, so
    checkpoints load before and after. An old reference to a weight still shows the values of the table, but
    has no gradient.

    ``swap`` leaves other modules, and the report gives the reason. A second swap changes nothing and reports
    "already swapped". :func:`unswap` restores the modules of torch and TorchRec.

    Args:
        model: any module, or a graph, as above.
        fuse: pool tables together if the model allows it. Default: True.
        optimizers: optimizers of the tables' Parameters. Their entries and state move to the new Parameters,
            and training continues as it would have. An optimizer is refused if a state is neither one number
            nor has an element, or a row, for each element or row of the Parameter.
        fuse_optimizers: update the tables of ``optimizers`` inside ``backward()``, and store no gradient. The
            script keeps its optimizers: ``step()``, ``zero_grad()``, schedulers, ``state_dict()`` and
            ``load_state_dict()`` work as before, with the same results. Reading or clipping gradients raises,
            and so does ``backward()`` without ``zero_grad()`` before it or ``step()`` after it. Supported are
            torch.optim.SGD without momentum, Adagrad and dlrm's RWSAdagrad without lr_decay, and SparseAdam,
            without weight decay. Default: False.
        check: batches, each a tuple of the model's arguments, a dict of them by name, or a pair of both.
            Copies of the model run on copies of the batches before and after, without gradients, a module in
            eval mode. If a result changes by more than the order of sums, ``swap`` leaves that match of a
            graph, or the whole module.
        patterns: the patterns to look for in a graph. Default: all.
        predict: predict the gain of a module for inference of the first batch of ``check``. True: on the GPU
            of this machine, else an H100; or the name of a GPU. See :func:`recfuse.predict`. Default: False.

    Returns:
        SwapReport: each embedding bag, and each module whose class has such a name, with its action and the
        reason; in a graph, each match. ``fused_optimizers`` are the optimizers of ``fuse_optimizers``;
        ``gain`` is the prediction of ``predict``.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module or a graph, or ``optimizers`` holds no optimizers.
        ValueError: an optimizer or DistributedDataParallel holds a Parameter that would be replaced and was
            not passed; an optimizer cannot be moved; its steps cannot be fused, such as those of
            torch.optim.Adam and AdamW, which move rows without a lookup, or of a table that a module of
            torch has too. Nothing was changed.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 16, mode="sum"), torch.nn.Linear(16, 1))
        >>> optimizer = torch.optim.Adagrad(model.parameters())
        >>> report = recfuse.swap(model, optimizers=[optimizer])
        >>> len(report.replaced), type(model[0]).__module__
        (1, 'recfuse.nn.embedding_bag')

    Note:
        Tables are fused on the CPU, or on one CUDA device; tables on several devices are replaced one by one.
        Fusing needs memory for two copies of the tables for a moment.
    """
    if predict:
        return _swap_predicted(model, fuse, optimizers, fuse_optimizers, list(check), predict)
    if _is_graph(model):
        from recfuse.passes.graph.entry import swap_graph

        if list(optimizers) or fuse_optimizers or not fuse:
            raise ArgumentValueError(
                "recfuse.swap: fuse, optimizers or fuse_optimizers is given with a graph; expected a "
                "module, since a graph keeps its Parameters and its optimizers"
            )
        return swap_graph(model, patterns, check)
    if not isinstance(model, torch.nn.Module):
        raise wrong_type("recfuse.swap: model", model, "a torch.nn.Module or a torch.export.ExportedProgram")
    if patterns is not None:
        raise ArgumentValueError(
            "recfuse.swap: patterns is given with a module; expected None, since patterns are of graphs"
        )
    optimizers = check_optimizers(optimizers, "recfuse.swap")
    batches = list(check)
    if batches:
        from recfuse.passes.graph.checks import call_of, stays_the_same

        tried: list[SwapReport] = []
        calls = [call_of(batch) for batch in batches]
        if not stays_the_same(
            model, lambda copied: tried.append(_swap_modules(copied, fuse, (), False)), calls
        ):
            tried[0].leave("the result differs from the original's on the batches of check")
            return tried[0]
    return _swap_modules(model, fuse, optimizers, fuse_optimizers)


def _swap_predicted(
    model: Any, fuse: bool, optimizers: Iterable[torch.optim.Optimizer], fuse_optimizers: bool,
    check: list[Any], where: bool | str,
) -> SwapReport:  # fmt: skip
    """Swap, and predict the model before and after."""
    from recfuse.passes.graph.checks import call_of
    from recfuse.perf.gain import Gain
    from recfuse.perf.predict import predict

    if not isinstance(model, torch.nn.Module) or _is_graph(model) or not check:
        raise ArgumentValueError(
            "recfuse.swap: predict needs a module and a batch of its arguments. Pass check=[batch]."
        )
    args, kwargs = call_of(check[0])
    inputs = kwargs if kwargs and not args else args
    gpu = where if isinstance(where, str) else None
    before = predict(model, inputs, gpu=gpu)
    report = swap(model, fuse=fuse, optimizers=optimizers, fuse_optimizers=fuse_optimizers, check=check)
    report.gain = Gain(before, predict(model, inputs, gpu=gpu))
    return report


def _is_graph(model: Any) -> bool:
    """Return whether a model is an exported program or a graph of ATen operators.

    The passes on graphs are imported only for these.
    """
    exported = getattr(sys.modules.get("torch.export"), "ExportedProgram", None)
    if exported is not None and isinstance(model, exported):
        return True
    if not isinstance(model, torch.fx.GraphModule):
        return False
    return any(isinstance(node.target, torch._ops.OpOverload) for node in model.graph.nodes)


def _swap_modules(
    model: torch.nn.Module,
    fuse: bool,
    optimizers: Sequence[torch.optim.Optimizer],
    fuse_optimizers: bool,
) -> SwapReport:
    """Replace the modules of a model, and return the report."""
    report = SwapReport()
    already = [
        named for named in model.named_modules() if isinstance(named[1], _SWAPPED) or is_swapped(named[1])
    ]
    patterns = list(_fusable_patterns(model, report)) if fuse else []
    if fuse_optimizers:
        _check_optimizers(model, patterns, optimizers)
    if fuse:
        weights = [table.weight for pattern in patterns for table in pattern.tables]
        with shared_search():
            Move(optimizers, weights, "recfuse.swap")  # raises before anything has changed
            for pattern in patterns:
                _fuse(pattern, optimizers, report)
        swap_quantized(model, report)
        _report_other_lists(model, report)
    for name, module in model.named_modules():
        _replace(name, module, report)
    for name, module in already:
        report.add(name, type(module).__name__, "already", "already swapped")
    if fuse_optimizers:
        _fuse_optimizers(model, optimizers, report)
    return report


def _check_optimizers(
    model: torch.nn.Module, patterns: Sequence[Pattern], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Raise if an optimizer cannot be fused for the tables that the swap will give to recfuse."""
    if not optimizers:
        raise ArgumentValueError(
            "recfuse.swap: fuse_optimizers is True without optimizers; expected the optimizers of the "
            "tables. Pass them, or make an optimizer of recfuse.optim afterwards."
        )
    weights: list[torch.Tensor] = [table.weight for pattern in patterns for table in pattern.tables]
    weights += embedding_parameters(model)
    bags = [
        module
        for module in model.modules()
        if type(module) is torch.nn.EmbeddingBag and _why_not_replaceable(module) is None
    ]
    weights += [bag.weight for bag in bags]
    check_adoptable(optimizers, weights, dense_tables(model), "recfuse.swap")
    modules = [module for module in model.modules() if isinstance(module, (EmbeddingBag, TableHolder))]
    tables = [table for pattern in patterns for table in pattern.tables]
    check_fused_alone(model, optimizers, weights, {*map(id, [*modules, *tables, *bags])}, "recfuse.swap")


def _fuse_optimizers(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], report: SwapReport
) -> None:
    parameters = embedding_parameters(model)
    for number, optimizer in enumerate(optimizers):
        fused = adopt(optimizer, parameters, "recfuse.swap")
        if fused is not None:
            report.fused_optimizers.append(fused)
            count = sum(len(group["params"]) for group in fused.param_groups)
            detail = f"updates {count} Parameter{'s' * (count > 1)} of tables inside backward()"
            report.add(f"optimizers[{number}]", type(optimizer).__name__, "optimizer", detail)


def _fusable_patterns(model: torch.nn.Module, report: SwapReport) -> Iterator[Pattern]:
    """Yield patterns whose tables can be pooled in one call; report why the others cannot."""
    owners, tensors = _owners(model), [*model.named_parameters(), *model.named_buffers()]
    for name, module in list(model.named_modules()):
        for pattern in filter(None, (kind.find(name, module) for kind in _PATTERNS)):
            if reason := _why_not_packed(pattern, owners, tensors) or pattern.why_not():
                report.add(pattern.path, pattern.kind, "left", reason)
            else:
                yield pattern


def _owners(model: torch.nn.Module) -> _Owners:
    """Return, by the id of each Parameter and module, the names and modules that have it as a child."""
    owners: _Owners = {}
    for name, module in model.named_modules():
        for part in (*module._parameters.values(), *module._modules.values()):
            if part is not None:
                owners.setdefault(id(part), []).append((name, module))
    return owners


def _why_not_packed(
    pattern: Pattern, owners: _Owners, tensors: Sequence[tuple[str, torch.Tensor]]
) -> str | None:
    """Return why these tables cannot be packed, or None. ``tensors`` are all tensors of the model by name."""
    tables, holder = pattern.tables, pattern.holder
    if not tables:
        return "no table is in the list"
    if reason := pattern.why_not_packable(tensors):
        return reason
    if has_hooks(holder) or len(owners.get(id(holder), ())) > 1:
        return "the list of tables has hooks, or belongs to another module too"
    for number, table in enumerate(tables):
        if reason := _why_not_replaceable(table) or gradient_hooks(table.weight):
            return f"table {number}: {reason}"
        if type(table.weight) is not Parameter and not is_fake_parameter(table.weight):
            return f"weight of table {number} is {a_type(table.weight)}; expected a Parameter"
        if table.weight.device != tables[0].weight.device:
            return (
                f"table {number} is on {table.weight.device}; expected {tables[0].weight.device}, as table 0"
            )
        for name, owner in owners.get(id(table.weight), ()):
            if not any(owner is own_table for own_table in tables):
                return f"table {number} shares its weight with {name or 'the model'}"
        for name, owner in owners.get(id(table), ()):
            if owner is not holder:
                return f"table {number} belongs to {name or 'the model'} too"
    return None


def _fuse(pattern: Pattern, optimizers: Sequence[torch.optim.Optimizer], report: SwapReport) -> None:
    kind = pattern.kind
    try:
        report.add(pattern.path, kind, "fused", pattern.fuse(optimizers))
    except torch.OutOfMemoryError as error:
        reason = f"no memory for a second copy of the tables, to pack them: {error}"
        report.add(pattern.path, kind, "left", reason)


def _report_other_lists(model: torch.nn.Module, report: SwapReport) -> None:
    """Report the lists of bags that no pattern can pool, with the remedy ``POOL_ALL``."""
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList) or name in report.names():
            continue
        if sum(isinstance(child, torch.nn.EmbeddingBag) for child in module) > 1:
            report.add(name, type(module).__name__, "left", f"the bags have separate calls. {POOL_ALL}")


def _replace(name: str, module: torch.nn.Module, report: SwapReport) -> None:
    """Swap a module if it is a single bag."""
    kind = type(module).__name__
    if type(module) is torch.nn.EmbeddingBag:
        if reason := _why_not_replaceable(module):
            report.add(name, kind, "left", reason)
            return
        # A change of class keeps the object, so that hooks, other parents and tied parameters stay valid.
        # The new class adds no state.
        module.__class__ = EmbeddingBag
        advise_huge_pages(module.weight.detach())
        report.add(name, kind, "replaced", "recfuse.nn.EmbeddingBag")
    elif isinstance(module, (*_SWAPPED, PackedTable)) or is_swapped(module):
        return
    elif isinstance(module, torch.nn.EmbeddingBag):
        parametrized = hasattr(module, "parametrizations")
        reason = "weight is parametrized" if parametrized else "a subclass may have another forward"
        report.add(name, kind, "left", reason)
    elif "EmbeddingBag" in kind and name not in report.names():
        reason = f"the class is {kind}; expected torch.nn.EmbeddingBag. See its children."
        report.add(name, kind, "left", reason)


def _why_not_replaceable(table: torch.nn.EmbeddingBag) -> str | None:
    if "forward" in vars(table):
        return "forward was replaced on the object"
    if getattr(table, "qconfig", None) is not None:
        return "qconfig is set, and quantisers support only torch's class"
    weight = table.weight
    if weight.dtype not in DTYPES:
        return f"weight is {weight.dtype}; expected float32, float16 or bfloat16"
    if weight.device.type not in ("cpu", "cuda", "meta"):
        return f"weight is on {weight.device}; expected cpu, cuda or meta"
    return None
