"""The pattern of facebookresearch/dlrm: ``emb_l``, a list of tables, and ``apply_emb``, which pools them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse.nn.packed.pooling import refuse_proxy
from recfuse.nn.table_list import FusedEmbeddingBagList
from recfuse.passes.apply_emb_proof import (
    ARGUMENTS,
    Proof,
    attributes_of,
    defaults_of,
    method_of,
    proof_of,
)
from recfuse.passes.method.reads import Guards
from recfuse.passes.method.source import Refused
from recfuse.passes.pattern import Pattern

POOL_ALL = "Call recfuse.nn.FusedEmbeddingBagList(bags).pool(offsets, indices), which pools them in one call."
_MISSING = object()


class ApplyEmb(Pattern):
    """A module with the form of dlrm's ``DLRM_Net``; its ``emb_l`` holds the tables."""

    def __init__(self, name: str, model: Any) -> None:
        """``name`` is the path of the model in its root module."""
        super().__init__(f"{name}.emb_l" if name else "emb_l", model.emb_l, model.emb_l)
        self.model = model
        self.proof: Proof | None = None

    @classmethod
    def find(cls, name: str, module: torch.nn.Module) -> ApplyEmb | None:
        """Return the pattern if the module has the list and a method with these argument names."""
        tables = module._modules.get("emb_l")
        method = getattr(module, "apply_emb", None)
        if type(tables) is not torch.nn.ModuleList or not callable(method):
            return None
        try:
            return cls(name, module) if tuple(inspect.signature(method).parameters) == ARGUMENTS else None
        except (TypeError, ValueError):  # a callable without a signature
            return None

    @classmethod
    def find_fused(cls, name: str, module: torch.nn.Module) -> ApplyEmb | None:
        """Return the pattern if the module has the method of ``fuse`` and its list is still packed."""
        packed = isinstance(module._modules.get("emb_l"), FusedEmbeddingBagList)
        return cls(name, module) if packed and has_fused_method(module) else None

    def why_not(self) -> str | None:
        """Return a reason if the proof fails that one call for all tables equals the method."""
        if any(table.include_last_offset for table in self.tables):
            return "a table has include_last_offset"
        if "apply_emb" in vars(self.model):
            return f"apply_emb was replaced on the object. {POOL_ALL}"
        try:
            self.proof = proof_of(type(self.model), attributes_of(self.model), len(self.tables))
        except Refused as refused:
            return f"apply_emb {refused}. {POOL_ALL}"
        return None

    def fuse(self, optimizers: Sequence[torch.optim.Optimizer]) -> str:
        """Pack the list, and give the model a method that pools it."""
        tables = self.tables
        assert self.proof is not None
        method = FusedApplyEmb(self.model, self.proof)
        self.model.emb_l = FusedEmbeddingBagList(tables, optimizers=optimizers)
        self.model.apply_emb = method
        return f"{len(tables)} tables in one call, by apply_emb{method.exceptions()}"

    def restore(self, bags: Sequence[torch.nn.EmbeddingBag]) -> str:
        """Give the model a list of tables, and restore the method of its class."""
        tables = torch.nn.ModuleList(bags)
        tables.training = self.owner.training
        del self.model.apply_emb
        self.model.emb_l = tables
        return f"torch.nn.ModuleList of {len(bags)} torch.nn.EmbeddingBag, and the model's own apply_emb"


def _is_same(actual: Any, value: Any) -> bool:
    return type(actual) is type(value) and actual == value


def has_fused_method(module: torch.nn.Module) -> bool:
    """Return whether a module has the method of ``fuse``; it may have replaced its packed tables since."""
    return isinstance(vars(module).get("apply_emb"), FusedApplyEmb)


class FusedApplyEmb:
    """A DLRM's ``apply_emb``: one call, as long as ``emb_l`` is packed and the guards of its proof hold."""

    def __init__(self, model: torch.nn.Module, proof: Proof) -> None:
        """The class of ``model`` has the ``apply_emb`` that ``proof`` describes and that other calls use."""
        self.model, self.defaults = model, defaults_of(model)
        self._rest_on(proof)

    def _rest_on(self, proof: Proof) -> None:
        self.proof, self.flags = proof, proof.guards.flags
        self.absent, self.inherited = tuple(sorted(proof.guards.absent)), frozenset(proof.guards.inherited)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state from which another process can prove its own code again."""
        return {
            "model": self.model,
            "defaults": self.defaults,
            "tables": self.proof.tables,
            "flags": self.flags,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, and prove its method again: the class may have other code in this process."""
        self.model, self.defaults = state["model"], state["defaults"]
        try:
            proof = proof_of(type(self.model), state["flags"], state["tables"])
        except Refused:
            proof = Proof(state["tables"], {}, False, True, Guards())
        self._rest_on(proof)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the model's own method."""
        return inspect.signature(method_of(self.model))

    def exceptions(self) -> str:
        """Return, for the report, a description of the calls that still run the model's own method."""
        proven = self.proof.reads_row_weights
        if (True, True) not in proven:
            return " where v_W_l is None; other calls are its own"
        return "" if any(proven.values()) else ", without row weights, as the model's own"

    def __call__(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Pool table k with offsets ``lS_o[k]``, indices ``lS_i[k]`` and row weights ``v_W_l[k]`` (or None).

        Takes the arguments of the model's own method, by position or name, with its defaults.
        """
        refuse_proxy(args[1] if len(args) > 1 else kwargs.get("lS_i"))
        positional = dict(zip(ARGUMENTS, args, strict=False))
        bound = {**self.defaults, **positional, **kwargs}
        if (
            len(args) > len(ARGUMENTS)
            or len(bound) != len(ARGUMENTS)
            or any(name not in bound or (name in positional and name in kwargs) for name in ARGUMENTS)
            or (self.proof.by_position and len(args) != len(ARGUMENTS))
            or not self._fused(bound)
        ):
            return method_of(self.model)(*args, **kwargs)
        weighted = self.proof.reads_row_weights[bound["emb_l"] is not None, bound["v_W_l"] is not None]
        return self._tables(bound).pool(bound["lS_o"], bound["lS_i"], bound["v_W_l"] if weighted else None)

    def _tables(self, bound: dict[str, Any]) -> Any:
        return self.model.emb_l if bound["emb_l"] is None else bound["emb_l"]

    def _fused(self, bound: dict[str, Any]) -> bool:
        proof, tables = self.proof, self._tables(bound)
        if not isinstance(tables, FusedEmbeddingBagList) or not tables.has_kernel:
            return False
        if (bound["emb_l"] is not None, bound["v_W_l"] is not None) not in proof.reads_row_weights:
            return False
        if len(tables) != proof.tables or (proof.own_tables and tables is not self.model.emb_l):
            return False
        # Dynamo cannot trace reads of __dict__, and guards on code itself.
        if not torch.compiler.is_dynamo_compiling() and not (
            self.inherited.isdisjoint(vars(self.model)) and proof.guards.code_is_same()
        ):
            return False
        return not any(hasattr(self.model, name) for name in self.absent) and all(
            _is_same(getattr(self.model, name, _MISSING), value) for name, value in self.flags.items()
        )
