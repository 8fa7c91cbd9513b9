"""Optimizers when Parameters are packed or unpacked: moves their entries and state, finds those forgotten.

Packing makes one Parameter of many, row by row. An optimizer whose step treats every element (SGD, Adam,
Adagrad, RMSprop, ...) or every row (row-wise Adagrad) for itself works on as before when
its state moves along.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.nn.packed.optimizer_parts import all_of, containers, given, groups_of
from recfuse.nn.packed.optimizer_state import Entry, Piece, described, gathered, kinds_of

# The step of these treats a Parameter as one matrix: packed with other tables it would be another step.
_WHOLE_MATRIX = {
    getattr(torch.optim, name): why
    for name, why in (
        ("Adafactor", "scales its step by the size of the whole Parameter"),
        ("Muon", "makes the step of the whole Parameter orthogonal"),
    )
    if hasattr(torch.optim, name)
}


class Target(NamedTuple):
    """A new Parameter, and what it is made of."""

    parameter: Parameter
    name: str  # as in named_parameters() of the module that owns it
    pieces: list[Piece]

    @property
    def rows(self) -> int:
        """Of the new Parameter, gap rows included."""
        return self.parameter.shape[0]


class Move:
    """How the entries of optimizers go from old Parameters to new ones.

    Attributes:
        tags: one a weight; only weights with equal tags may be packed into one Parameter.
    """

    def __init__(self, optimizers: Sequence[Optimizer], weights: Sequence[Parameter], what: str) -> None:
        """Reads everything and changes nothing; see :func:`plan_move`."""
        self._weights = list(weights)
        self._numbers = {id(weight): number for number, weight in reversed(list(enumerate(weights)))}
        self._what = what
        self._optimizers = all_of(given(optimizers, what))
        self._lists = _distinct(
            (optimizer, group)
            for optimizer in self._optimizers
            for group in groups_of(optimizer)
            if any(id(entry) in self._numbers for entry in group["params"])
        )
        self._states = _distinct_states(self._optimizers)
        for optimizer, group in self._lists:
            self._check_optimizer(optimizer, group)
        self._named = [
            mapping for optimizer in self._optimizers for mapping in self._named_parameters(optimizer)
        ]
        self._entries = [self._entries_of(optimizer, state) for optimizer, state in self._states]
        self._gradients = [self._gradient(weight) for weight in self._weights]
        self.tags: list[Hashable] = [self._tag(number) for number in range(len(self._weights))]

    def apply(self, groups: Sequence[tuple[Parameter, str, Sequence[tuple[int, int]]]]) -> None:
        """Moves everything to the new Parameters of a packed module.

        New state is complete before the first optimizer changes, which takes the memory of both for a moment.
        The old Parameters' ``grad`` goes along.

        Args:
            groups: for each new Parameter its name in its module, and for each weight in it the weight's
                number and first row.
        """
        self.apply_targets(
            [
                Target(
                    parameter,
                    name,
                    [
                        Piece(number, 0, self._weights[number].shape[0], first_row)
                        for number, first_row in dict.fromkeys(
                            (self._numbers[id(self._weights[number])], first_row)
                            for number, first_row in members
                        )
                    ],
                )
                for parameter, name, members in groups
            ]
        )

    def apply_targets(self, targets: Sequence[Target]) -> None:
        """As :meth:`apply`, with any pieces. Parameters of one param group come in the order of
        ``targets``, where the first of the old ones was.
        """
        with torch.no_grad():
            states = [[self._state_of(target, entries) for target in targets] for entries in self._entries]
            gradients = [
                gathered(target.pieces, target.parameter.shape[0], self._gradients) for target in targets
            ]
        for _, group in self._lists:
            self._replace(group, targets)
        for mapping in self._named:
            self._rename(mapping, targets)
        for (_, state), moved in zip(self._states, states, strict=True):
            self._exchange(state, [(t.parameter, v) for t, v in zip(targets, moved, strict=True) if v])
        for weight in self._weights:
            weight.grad = None
        for target, gradient in zip(targets, gradients, strict=True):
            target.parameter.grad = gradient
        for optimizer in self._optimizers:
            if hasattr(optimizer, "_numel_cache"):  # LBFGS counts its elements once
                optimizer._numel_cache = None

    def _check_optimizer(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        kind = type(optimizer)
        for matrix_wise, why in _WHOLE_MATRIX.items():
            if isinstance(optimizer, matrix_wise):
                raise ArgumentValueError(
                    f"{self._what}: {kind.__name__} {why}, so its step of packed tables would be another; "
                    "use an optimizer that works on elements or rows, or leave these tables unpacked"
                )
        if isinstance(optimizer, torch.optim.LBFGS) and any(optimizer.state.values()):
            raise ArgumentValueError(
                f"{self._what}: {kind.__name__} has made steps, and its state (old_dirs, old_stps, ...) runs "
                "over all its Parameters at once; make a new one afterwards"
            )
        if not isinstance(group["params"], list):
            raise ArgumentTypeError(
                f"{self._what}: params of a param group of {kind.__name__} is a "
                f"{type(group['params']).__name__}, must be a list"
            )

    def _named_parameters(self, optimizer: Optimizer) -> Iterator[MutableMapping[str, Any]]:
        """Dictionaries from names to Parameters, as TorchRec's KeyedOptimizer has; refuses other places."""
        lists = {id(group["params"]) for group in groups_of(optimizer)}
        for attribute, value in vars(optimizer).items():
            if attribute in ("param_groups", "state"):
                continue
            for container in containers(value):
                if id(container) in lists:
                    continue
                inside = container.values() if isinstance(container, Mapping) else container
                keys = container if isinstance(container, Mapping) else ()
                if not any(id(item) in self._numbers for item in (*inside, *keys)):
                    continue
                if isinstance(container, MutableMapping) and not any(id(k) in self._numbers for k in keys):
                    yield container
                    continue
                raise ArgumentValueError(
                    f"{self._what}: {type(optimizer).__name__} holds Parameters of the tables in its "
                    f"attribute {attribute!r}, where they cannot be replaced; make it afterwards"
                )

    def _entries_of(self, optimizer: Optimizer, state: Mapping[Any, Any]) -> dict[int, dict[str, Entry]]:
        """The entries of each weight that has a state."""
        found: dict[int, dict[str, Any]] = {}
        for number, weight in enumerate(self._weights):
            values = state.get(weight)
            if not values:
                continue
            if not isinstance(values, dict):
                raise ArgumentTypeError(
                    f"{self._what}: the state that {type(optimizer).__name__} keeps of a Parameter is a "
                    f"{type(values).__name__}, must be a dict"
                )
            found[number] = values
        kinds: dict[str, list[str]] = {}
        for number, values in found.items():
            for key, value in values.items():
                possible = kinds_of(value, self._weights[number])
                kinds[key] = [kind for kind in kinds.get(key, possible) if kind in possible]
                if not kinds[key]:
                    raise ArgumentValueError(
                        f"{self._what}: state entry {key!r} of {type(optimizer).__name__} is "
                        f"{described(value)} for a Parameter of shape {tuple(self._weights[number].shape)}, "
                        "must be of its shape, have a first dimension of its rows, or be one number; make "
                        "the optimizer afterwards"
                    )
        return {
            number: {key: Entry(value, kinds[key][0]) for key, value in values.items()}
            for number, values in found.items()
        }

    def _gradient(self, weight: Parameter) -> Entry | None:
        gradient = weight.grad
        if gradient is None:
            return None
        if "element" not in kinds_of(gradient, weight):
            raise ArgumentValueError(
                f"{self._what}: the gradient of a table's weight is {described(gradient)}, must be of its "
                f"shape {tuple(weight.shape)}, dense or sparse COO by rows; set it to None before"
            )
        return Entry(gradient, "element")

    def _tag(self, number: int) -> Hashable:
        weight, gradient = self._weights[number], self._gradients[number]
        return (
            tuple(
                place
                for place, (_, group) in enumerate(self._lists)
                if any(entry is weight for entry in group["params"])
            ),
            tuple(
                (place, key, entry.tag())
                for place, entries in enumerate(self._entries)
                for key, entry in sorted(entries.get(number, {}).items(), key=lambda item: str(item[0]))
            ),
            None if gradient is None else gradient.tag(),
        )

    def _state_of(self, target: Target, entries: Mapping[int, Mapping[str, Entry]]) -> dict | None:
        first = entries.get(target.pieces[0].source) if target.pieces else None
        if first is None:
            return None
        return {
            key: gathered(
                target.pieces,
                target.parameter.shape[0],
                {number: values.get(key) for number, values in entries.items()},
            )
            for key in first
        }

    def _replace(self, group: dict[str, Any], targets: Sequence[Target]) -> None:
        """Puts the new Parameters where the first old one was; the list stays the same object, for those
        who share it.
        """
        old, names = group["params"], group.get("param_names")
        inside = {self._numbers[id(entry)] for entry in old if id(entry) in self._numbers}
        here = [target for target in targets if any(piece.source in inside for piece in target.pieces)]
        first = next(place for place, entry in enumerate(old) if id(entry) in self._numbers)
        keep = [place for place, entry in enumerate(old) if id(entry) not in self._numbers]
        before = sum(place < first for place in keep)
        if names is not None:
            name_of = {id(entry): name for entry, name in zip(old, names, strict=True)}
            renamed = [
                _renamed(name_of.get(id(self._weights[target.pieces[0].source]), ""), target.name)
                for target in here
            ]
            kept_names = [names[place] for place in keep]
            names[:] = [*kept_names[:before], *renamed, *kept_names[before:]]
        kept = [old[place] for place in keep]
        old[:] = [*kept[:before], *(target.parameter for target in here), *kept[before:]]

    def _exchange(self, state: MutableMapping[Any, Any], new: Sequence[tuple[Parameter, Any]]) -> None:
        """Puts the new Parameters' state where the first old one's was."""
        before = list(state.items())
        state.clear()
        for key, value in before:
            if id(key) in self._numbers:
                state.update(new)
            else:
                state[key] = value

    def _rename(self, mapping: MutableMapping[str, Any], targets: Sequence[Target]) -> None:
        """Replaces Parameters in a dictionary by name; the order of the others stays."""
        before = list(mapping.items())
        name_of = {self._numbers[id(value)]: name for name, value in before if id(value) in self._numbers}
        new = {
            _renamed(name_of[target.pieces[0].source], target.name): target.parameter
            for target in targets
            if target.pieces and target.pieces[0].source in name_of
        }
        mapping.clear()
        for name, value in before:
            if id(value) in self._numbers:
                mapping.update(new)
            else:
                mapping[name] = value


def plan_move(
    optimizers: Sequence[Optimizer], weights: Sequence[Parameter], what: str = "recfuse.passes.swap"
) -> Move:
    """Plans how optimizers go on with Parameters that are about to be packed; changes nothing.

    Args:
        optimizers: those that may hold the weights.
        weights: the Parameters ``[rows, dim]`` that will be replaced; one may occur several times.
        what: who asks, for the errors.

    Raises:
        ValueError, TypeError: an optimizer or state that cannot be moved; names optimizer, entry and shape.
    """
    return Move(optimizers, weights, what)


def _distinct(
    groups: Iterator[tuple[Optimizer, dict[str, Any]]],
) -> list[tuple[Optimizer, dict[str, Any]]]:
    """Each list of Parameters once, however many optimizers share it; the innermost comes last."""
    found = {id(group["params"]): (optimizer, group) for optimizer, group in groups}
    return list(found.values())


def _distinct_states(optimizers: Sequence[Optimizer]) -> list[tuple[Optimizer, MutableMapping[Any, Any]]]:
    """Each state dictionary once, however many optimizers share it."""
    found: dict[int, tuple[Optimizer, MutableMapping[Any, Any]]] = {}
    for optimizer in optimizers:
        state = vars(optimizer).get("state")
        if isinstance(state, MutableMapping):
            found[id(state)] = (optimizer, state)
    return list(found.values())


def _renamed(old: str, name: str) -> str:
    """A name in a module that held, or will hold, a table ``old``, as ``ebc.embedding_bags.t1.weight``; a
    packed Parameter ``ebc.packed_dim16`` has no "weight" in its name.
    """
    parts = old.split(".")
    if parts[-1] == "weight":
        parts = parts[:-2]
        if parts and parts[-1] == "embedding_bags":
            parts.pop()
    else:
        parts.pop()
    return ".".join((*parts, name))
