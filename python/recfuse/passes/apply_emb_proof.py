"""The proof that one call for all tables may replace a model's ``apply_emb``.

Such a method may have any effect, so it is never run: ``passes/method`` interprets its code with symbolic
lookups and row weights. The method must call each table with its own lookups and row weights, and must return
the results of the tables in their order. It must have no other effect: it writes to no object, and it reads
only values that are compared again before each later call. Code that the reader does not support is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from recfuse.errors import a_type
from recfuse.passes.method.calls import MethodReader
from recfuse.passes.method.reads import Guards, Reads
from recfuse.passes.method.source import Refused
from recfuse.passes.method.values import Argument, Constant, LookupWeights, Model, Pooled, Sequence

ARGUMENTS = ("lS_o", "lS_i", "emb_l", "v_W_l")


@dataclass(frozen=True)
class Proof:
    """The calls for which a method is proven, and the conditions of the proof."""

    tables: int
    reads_row_weights: dict[tuple[bool, bool], bool]
    """Keys: whether a call passes ``emb_l``, and ``v_W_l``. Values: whether the method uses row weights."""
    own_tables: bool  # the method reads self.emb_l, so that emb_l must be the same object
    by_position: bool  # the proof holds only for calls that pass all arguments by position
    guards: Guards


def method_of(model: torch.nn.Module) -> Any:
    """Return the ``apply_emb`` of the model's class, bound to the model."""
    static = inspect.getattr_static(type(model), "apply_emb")
    return static.__get__(model, type(model)) if hasattr(static, "__get__") else static


def defaults_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return the arguments of the model's own method whose default is None."""
    parameters = inspect.signature(method_of(model)).parameters
    return {name: None for name in ARGUMENTS if parameters[name].default is None}


def attributes_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return a model's own attributes, with its submodules and tensors, without those of its class."""
    return {**model._modules, **model._buffers, **model._parameters, **vars(model)}


def proof_of(kind: type, attributes: Mapping[str, Any], tables: int) -> Proof:
    """Prove the ``apply_emb`` of a class, for models with these attributes and this number of tables.

    Raises Refused if no call may be replaced; its text continues "apply_emb".
    """
    static = inspect.getattr_static(kind, "apply_emb")
    function = static.__func__ if isinstance(static, staticmethod) else static
    if type(function) is not FunctionType:
        raise Refused(f"is {a_type(static)}; expected a function of Python")
    reads = Reads(kind, attributes)
    method = reads.member(static, kind, "apply_emb", (Model(),))
    returned_weights, refused = {}, {}
    for has_tables in (True, False):
        for has_weights in (True, False):
            has_argument = {"emb_l": has_tables, "v_W_l": has_weights}
            values = [
                Argument(name) if has_argument.get(name, True) else Constant(None) for name in ARGUMENTS
            ]
            try:
                returned = MethodReader(reads, tables).called(method, values, {})
                returned_weights[has_tables, has_weights] = _reads_row_weights(returned, tables)
            except Refused as error:
                refused[has_tables, has_weights] = error
    if (True, True) not in returned_weights and (True, False) not in returned_weights:
        raise refused[True, True]
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    by_position = names[not isinstance(static, staticmethod) :] != ARGUMENTS or bool(code.co_flags & 0xC)
    return Proof(tables, returned_weights, reads.own_tables, by_position, reads.guards)


def _reads_row_weights(returned: Any, tables: int) -> bool:
    """Return whether row weights are used; raises Refused if one call for all tables would differ."""
    if not isinstance(returned, Sequence) or returned.is_tuple or len(returned.items) != tables:
        raise Refused("does not return a list with a tensor for each table")
    weighted = set()
    for number, pooled in enumerate(returned.items):
        if not isinstance(pooled, Pooled):
            raise Refused(f"does not return the result of table {number} as item {number}")
        if pooled.table != number:
            raise Refused(f"returns the result of table {pooled.table} as item {number}")
        weighted.add(pooled.weights == LookupWeights(number))
    if len(weighted) > 1:
        raise Refused("uses the row weights of some tables and not of others")
    return weighted.pop()
