"""``ExportedGraph``: the graph of an ``ExportedProgram``, with updates of its signature."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Node

from recfuse.passes.graph.nodes import storage_of
from recfuse.passes.graph.program import Program

_OF_STATE = (InputKind.PARAMETER, InputKind.BUFFER)


class ExportedGraph(Program):
    """A Program whose constants become constants of the exported program; its state does not change."""

    compares_sizes = True

    def __init__(self, exported: ExportedProgram) -> None:
        """Read the graph of an exported program. Raises ValueError if it cannot be read."""
        self.exported = exported
        module = exported.graph_module
        by_name = {node.name: node for node in module.graph.nodes if node.op == "placeholder"}
        inputs = []
        by_memory: dict[int, list[Node]] = {}
        for spec in exported.graph_signature.input_specs:
            node = by_name.get(getattr(spec.arg, "name", ""))
            if node is None:
                continue
            if spec.kind is InputKind.USER_INPUT:
                inputs.append(node)
            elif spec.kind in _OF_STATE:
                weight = exported.state_dict.get(str(spec.target))
                node.meta["recfuse_name"] = spec.target
                node.meta["recfuse_requires_grad"] = weight is not None and weight.requires_grad
            state = exported.state_dict.get(str(spec.target), exported.constants.get(str(spec.target)))
            if isinstance(state, Tensor):
                by_memory.setdefault(storage_of(state), []).append(node)
        super().__init__(module, inputs, by_memory.values())
        self.gradients = True  # a call of the user may need them
        self._constants_of = {
            spec.arg.name: str(spec.target)
            for spec in exported.graph_signature.input_specs
            if spec.kind is InputKind.CONSTANT_TENSOR
        }

    def _constant_at(self, node: Node) -> Tensor | None:
        constant = self.exported.constants.get(self._constants_of.get(node.name, ""))
        return constant if isinstance(constant, Tensor) else None

    def _keep(self, name: str, tensor: Tensor) -> Node:
        exported, specs = self.exported, self.exported.graph_signature.input_specs
        while name in exported.constants:
            name += "_"
        first = next((at for at, spec in enumerate(specs) if spec.kind is InputKind.USER_INPUT), len(specs))
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        before = placeholders[first] if first < len(placeholders) else self._first_call()
        with self.graph.inserting_before(before):
            node = self.graph.placeholder(name)
        spec = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name=node.name), node.name)
        specs.insert(first, spec)
        exported.constants[node.name] = tensor
        self._order[node] = (self._order[before][0] - 0.5, next(self._numbers))
        self.effects.region[node] = 0
        self.changed = True
        return node

    def _first_call(self) -> Node:
        return next(node for node in self.graph.nodes if node.op != "placeholder")

    def replace(self, old: Node, new: Node) -> None:
        """Replace a node as a Program does, and rename outputs in the signature."""
        super().replace(old, new)
        self.exported.graph_signature.replace_all_uses(old.name, new.name)

    def finish(self) -> None:
        """Finish as a Program does, and validate the exported program."""
        changed = self.changed
        super().finish()
        if changed:
            for node in self.graph.nodes:
                node.meta.pop("recfuse_name", None)
                node.meta.pop("recfuse_requires_grad", None)
            with torch._guards.tracing(None):
                self.exported.validate()
