"""The proof that one call for all tables may take the place of a model's ``apply_emb``.

Such a method may do anything, and it is not run: its code is read (``passes/method``), with values that stand
for any lookups and row weights. It must call each table with its own lookups and row weights, return what the
tables return, in their order, and do nothing else: write to nothing, and read nothing that is not compared
before each later call. What the reader does not know is no proof.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from recfuse.passes.method.calls import MethodReader
from recfuse.passes.method.reads import Guards, Reads
from recfuse.passes.method.source import Refused
from recfuse.passes.method.values import Argument, Constant, LookupWeights, Model, Pooled, Sequence

ARGUMENTS = ("lS_o", "lS_i", "emb_l", "v_W_l")


@dataclass(frozen=True)
class Proof:
    """Of which calls a method is proven, and what must be as it was for that."""

    tables: int
    reads_row_weights: dict[tuple[bool, bool], bool]
    """Of calls with and without ``emb_l`` and ``v_W_l``: whether the method uses row weights."""
    own_tables: bool  # it reads self.emb_l, which the argument must be
    by_position: bool  # of calls that pass all arguments by position alone
    guards: Guards


def method_of(model: torch.nn.Module) -> Any:
    """The ``apply_emb`` of the model's class, bound to it."""
    static = inspect.getattr_static(type(model), "apply_emb")
    return static.__get__(model, type(model)) if hasattr(static, "__get__") else static


def defaults_of(model: torch.nn.Module) -> dict[str, Any]:
    """What the model's own method gives its arguments that are not given, where that is None."""
    parameters = inspect.signature(method_of(model)).parameters
    return {name: None for name in ARGUMENTS if parameters[name].default is None}


def attributes_of(model: torch.nn.Module) -> dict[str, Any]:
    """What a model has itself, its modules and tensors included."""
    return {**model._modules, **model._buffers, **model._parameters, **vars(model)}


def proof_of(kind: type, attributes: Mapping[str, Any], tables: int) -> Proof:
    """Reads the ``apply_emb`` of a class, of models with these attributes and as many tables. Raises Refused,
    whose text goes on after "its apply_emb", where no call of it may be replaced.
    """
    static = inspect.getattr_static(kind, "apply_emb")
    function = static.__func__ if isinstance(static, staticmethod) else static
    if type(function) is not FunctionType:
        raise Refused(f"is no function of Python ({type(static).__name__})")
    reads = Reads(kind, attributes)
    method = reads.member(static, kind, "apply_emb", (Model(),))
    found, refused = {}, {}
    for has_tables in (True, False):
        for has_weights in (True, False):
            given = {"emb_l": has_tables, "v_W_l": has_weights}
            values = [Argument(name) if given.get(name, True) else Constant(None) for name in ARGUMENTS]
            try:
                returned = MethodReader(reads, tables).called(method, values, {})
                found[has_tables, has_weights] = _reads_row_weights(returned, tables)
            except Refused as error:
                refused[has_tables, has_weights] = error
    if (True, True) not in found and (True, False) not in found:
        raise refused[True, True]
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    by_position = names[not isinstance(static, staticmethod) :] != ARGUMENTS or bool(code.co_flags & 0xC)
    return Proof(tables, found, reads.own_tables, by_position, reads.guards)


def _reads_row_weights(returned: Any, tables: int) -> bool:
    """Whether row weights are used; raises Refused where one call for all tables returns something else."""
    if not isinstance(returned, Sequence) or returned.is_tuple or len(returned.items) != tables:
        raise Refused("does not return a list with one tensor a table")
    weighted = set()
    for number, pooled in enumerate(returned.items):
        if not isinstance(pooled, Pooled):
            raise Refused(f"does not return what table {number} returns as item {number}")
        if pooled.table != number:
            raise Refused(f"returns what table {pooled.table} returns at another place, {number}")
        weighted.add(pooled.weights == LookupWeights(number))
    if len(weighted) > 1:
        raise Refused("uses the row weights of some tables and not of others")
    return weighted.pop()
