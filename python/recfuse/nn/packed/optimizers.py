"""Moves of optimizers' entries and state when Parameters are packed or unpacked, and checks for others.

Packing joins many Parameters into one, row by row. An optimizer whose step treats every element (SGD, Adam,
Adagrad, RMSprop, ...) or every row (row-wise Adagrad) independently continues unchanged when its state moves
too. Tables of any other optimizer keep a Parameter each, so that its step and state stay correct.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from recfuse._arguments import wrong_type
from recfuse.errors import ArgumentValueError
from recfuse.nn.packed.by_table.slots import keep_order, order_of
from recfuse.nn.packed.holders import (
    attributes,
    check_holders,
    check_optimizers,
    containers,
    groups_of,
    items,
    with_wrapped,
)
from recfuse.nn.packed.optimizer_state import Entry, Target, described, gathered, kinds_of
from recfuse.nn.packed.row_wise import is_row_wise, shared_matrices


class Move:
    """A move of the entries of optimizers from old to new Parameters.

    Attributes:
        tags: a tag per weight; only weights with equal tags may share a Parameter.
    """

    def __init__(self, optimizers: Iterable[Optimizer], weights: Sequence[Tensor], prefix: str) -> None:
        """Plan the move, without changes.

        A weight may occur several times. ``prefix`` is the name of the caller, for errors.

        Raises:
            ValueError, TypeError: an optimizer or state cannot be moved, named with entry and shape; an
                optimizer or wrapper that is not in ``optimizers`` holds a weight.
        """
        self._weights = list(weights)
        self._numbers = {id(weight): number for number, weight in reversed(list(enumerate(weights)))}
        self._prefix = prefix
        self._optimizers = with_wrapped(check_optimizers(optimizers, prefix))
        for optimizer in self._optimizers:  # optimizers of recfuse.optim have two methods for this class
            if hasattr(optimizer, "_before_move"):
                optimizer._before_move()
        # Lists of Parameters and states, each once, even if optimizers share it; the innermost counts.
        lists = {
            id(group["params"]): (optimizer, group)
            for optimizer in self._optimizers
            for group in groups_of(optimizer)
            if any(self._is_old(entry) for entry in group["params"])
        }
        states = {
            id(state): (optimizer, state)
            for optimizer in self._optimizers
            if isinstance(state := vars(optimizer).get("state"), MutableMapping)
        }
        for optimizer, group in lists.values():
            self._check_optimizer(optimizer, group)
        self._apart = self._separate_weights()
        self._groups = [group for _, group in lists.values()]
        self._orders = [
            (optimizer, order_of(optimizer, group["params"])) for optimizer, group in lists.values()
        ]
        self._states = [state for _, state in states.values()]
        self._named = list(itertools.chain(*map(self._named_parameters, self._optimizers)))
        self._entries = [self._entries_of(optimizer, state) for optimizer, state in states.values()]
        self._gradients = [self._gradient(weight) for weight in self._weights]
        self.tags: list[Hashable] = [self._tag(number) for number in range(len(self._weights))]
        check_holders(self._weights, self._optimizers, prefix)

    def apply(self, targets: Sequence[Target]) -> None:
        """Move all entries, states and gradients.

        In a param group the new Parameters are in the order of ``targets``, at the position of the first old
        Parameter. New state is complete before an optimizer changes, which needs memory for both for a
        moment.
        """
        with torch.no_grad():
            states = [self._new_state(entries, targets) for entries in self._entries]
            gradients = [gathered(target, self._gradients) for target in targets]
        for group, (optimizer, places) in zip(self._groups, self._orders, strict=True):
            self._replace(group, targets)
            self._order(optimizer, group, places, targets)
        for mapping in self._named:
            self._rename(mapping, targets)
        for state, new in zip(self._states, states, strict=True):
            _exchange(state, {key for key in state if self._is_old(key)}, new)
        for weight in self._weights:
            weight.grad = None
        for target, gradient in zip(targets, gradients, strict=True):
            target.parameter.grad = gradient
        for optimizer in self._optimizers:
            if hasattr(optimizer, "_numel_cache"):  # LBFGS counts its elements once
                optimizer._numel_cache = None
            if hasattr(optimizer, "_after_move"):
                optimizer._after_move(self._weights)

    def _is_old(self, entry: Any) -> bool:
        return id(entry) in self._numbers

    def _check_optimizer(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        kind = type(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS) and any(optimizer.state.values()):
            raise ArgumentValueError(
                f"{self._prefix}: {kind.__name__} has made steps, and its state (old_dirs, old_stps, ...) "
                "covers all its Parameters. Create a new optimizer afterwards."
            )
        if not isinstance(group["params"], list):
            prefix = f"{self._prefix}: params of a param group of {kind.__name__}"
            raise wrong_type(prefix, group["params"], "a list")

    def _separate_weights(self) -> set[int]:
        """Return the weights that must have a separate Parameter.

        These are the weights of an optimizer that may not step each row independently, or of an optimizer
        that it wraps.
        """
        separate = set()
        for optimizer in self._optimizers:
            if not is_row_wise(optimizer):
                groups = itertools.chain(*map(groups_of, with_wrapped([optimizer])))
                entries = itertools.chain(*(group["params"] for group in groups))
                separate |= {self._numbers[id(entry)] for entry in entries if self._is_old(entry)}
        return separate

    def _named_parameters(self, optimizer: Optimizer) -> Iterator[MutableMapping[str, Any]]:
        """Iterate over dictionaries from names to Parameters, as TorchRec's KeyedOptimizer has.

        Raises:
            ValueError: another container holds a Parameter.
        """
        lists = {id(group["params"]) for group in groups_of(optimizer)}
        for attribute, value in attributes(optimizer).items():
            for container in containers(value):
                is_key = isinstance(container, Mapping) and any(map(self._is_old, container))
                if id(container) in lists or not (is_key or any(map(self._is_old, items(container)))):
                    continue
                if is_key or not isinstance(container, MutableMapping):
                    raise ArgumentValueError(
                        f"{self._prefix}: {type(optimizer).__name__} holds Parameters of the tables in its "
                        f"attribute {attribute!r}, where they cannot be replaced. Create it afterwards."
                    )
                yield container

    def _entries_of(self, optimizer: Optimizer, state: Mapping[Any, Any]) -> dict[int, dict[str, Entry]]:
        """Return the entries of each weight that has a state."""
        entries: dict[int, dict[str, Any]] = {}
        kinds: dict[str, list[str]] = {}
        shared, whole = shared_matrices(), set()
        for number, weight in enumerate(self._weights):
            if not (values := state.get(weight)):
                continue
            if not isinstance(values, dict):
                prefix = f"{self._prefix}: the state that {type(optimizer).__name__} keeps of a Parameter"
                raise wrong_type(prefix, values, "a dict")
            entries[number] = values
            if number in self._apart and id(weight) not in shared:
                whole.add(number)
                continue
            for key, value in values.items():
                possible = kinds_of(value, weight)
                kinds[key] = [kind for kind in kinds.get(key, possible) if kind in possible]
                if not kinds[key]:
                    raise ArgumentValueError(
                        f"{self._prefix}: state entry {key!r} of {type(optimizer).__name__} is "
                        f"{described(value)} for a Parameter of shape {tuple(weight.shape)}; expected its "
                        "shape, a first dimension of its rows, or one number. Make the optimizer "
                        "afterwards."
                    )
        return {
            number: {
                key: Entry(value, "whole" if number in whole else kinds[key][0])
                for key, value in values.items()
            }
            for number, values in entries.items()
        }

    def _gradient(self, weight: Tensor) -> Entry | None:
        gradient = weight.grad
        if gradient is None:
            return None
        if "element" not in kinds_of(gradient, weight):
            raise ArgumentValueError(
                f"{self._prefix}: the gradient of a table's weight is {described(gradient)}; expected a "
                f"gradient of its shape {tuple(weight.shape)}, dense or sparse COO by rows. Set it to None "
                "before."
            )
        return Entry(gradient, "element")

    def _tag(self, number: int) -> Hashable:
        weight, gradient = self._weights[number], self._gradients[number]
        apart = number if number in self._apart else None
        groups = tuple(
            at for at, group in enumerate(self._groups) if any(entry is weight for entry in group["params"])
        )
        state = tuple(
            (at, key, entry.tag())
            for at, entries in enumerate(self._entries)
            for key, entry in sorted(entries.get(number, {}).items(), key=lambda item: str(item[0]))
        )
        return apart, groups, state, None if gradient is None else gradient.tag()

    def _new_state(
        self, entries: Mapping[int, Mapping[str, Entry]], targets: Sequence[Target]
    ) -> dict[Parameter, dict[str, Any]]:
        """Return the state of the new Parameters whose first piece had a state."""
        return {
            target.parameter: {
                key: gathered(target, {number: values.get(key) for number, values in entries.items()})
                for key in entries[target.pieces[0].source]
            }
            for target in targets
            if target.pieces and target.pieces[0].source in entries
        }

    def _replace(self, group: dict[str, Any], targets: Sequence[Target]) -> None:
        """Replace the old Parameters in the same list, which others may share, at the first old position."""
        old, names = list(group["params"]), group.get("param_names")
        sources = {self._numbers[id(entry)] for entry in old if self._is_old(entry)}
        new = [target for target in targets if any(piece.source in sources for piece in target.pieces)]
        first = next(at for at, entry in enumerate(old) if self._is_old(entry))

        def exchange(values: list[Any], replacements: list[Any]) -> None:
            remaining = [value for value, entry in zip(values, old, strict=True) if not self._is_old(entry)]
            values[:] = [*remaining[:first], *replacements, *remaining[first:]]

        exchange(group["params"], [target.parameter for target in new])
        if names is not None:
            name_of = {id(entry): name for entry, name in zip(old, names, strict=True)}
            olds = [name_of.get(id(self._weights[target.pieces[0].source]), "") for target in new]
            exchange(names, [_renamed(name, target.name) for name, target in zip(olds, new, strict=True)])

    def _order(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        places: Sequence[tuple[Tensor, int]],
        targets: Sequence[Target],
    ) -> None:
        """Keep the order of tables in a group, because a ``state_dict`` uses it."""
        new = {
            (piece.source, piece.source_row): (target.parameter, piece.row)
            for target in targets
            for piece in target.pieces
        }
        moved = [new.get((self._numbers.get(id(p), -1), row), (p, row)) for p, row in places]
        params = list(dict.fromkeys(parameter for parameter, _ in moved))
        if len(params) == len(moved) == len(group["params"]):  # each table is a Parameter
            names = group.get("param_names")
            if names is not None:
                name_of = dict(zip(group["params"], names, strict=True))
                names[:] = [name_of[parameter] for parameter in params]
            group["params"][:] = params
        keep_order(optimizer, group["params"], moved)

    def _rename(self, mapping: MutableMapping[str, Any], targets: Sequence[Target]) -> None:
        """Replace Parameters in a dictionary by name."""
        name_of = {self._numbers[id(value)]: name for name, value in mapping.items() if self._is_old(value)}
        new = {
            _renamed(name_of[target.pieces[0].source], target.name): target.parameter
            for target in targets
            if target.pieces and target.pieces[0].source in name_of
        }
        _exchange(mapping, set(name_of.values()), new)


def _exchange(mapping: MutableMapping[Any, Any], old_keys: set[Any], new: Mapping[Any, Any]) -> None:
    """Put new entries at the position of the first old entry; keep the order of the others."""
    before = list(mapping.items())
    mapping.clear()
    for key, value in before:
        if key in old_keys:
            mapping.update(new)
        else:
            mapping[key] = value


def _renamed(old: str, name: str) -> str:
    """Return ``name`` with the path of the module of a Parameter ``old``.

    ``old`` is a table's weight or a packed Parameter, for example ``emb_l.packed_dim16``.
    """
    parts = old.split(".")
    parts = parts[:-2] if parts[-1] == "weight" else parts[:-1]
    if parts and name.startswith(f"{parts[-1]}."):  # the submodule with the tables
        parts.pop()
    return ".".join((*parts, name))
