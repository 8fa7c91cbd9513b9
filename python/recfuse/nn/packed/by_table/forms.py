"""The forms of optimizers' states in ``torch.distributed.checkpoint.state_dict``: nested and flat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recfuse.errors import ArgumentValueError


def form_of(state_dict: Mapping[str, Any]) -> Nested | Flat:
    """Return a copy of a dictionary, which may be changed."""
    return Nested(state_dict) if "state" in state_dict else Flat(state_dict)


def _refuse_groups(names: Sequence[str]) -> ArgumentValueError:
    return ArgumentValueError(
        f"recfuse: torch.distributed.checkpoint.state_dict: {', '.join(names)} are in param groups with "
        "other options, and lie in packed Parameters of one group. Give the tables the same groups before "
        "recfuse.swap(model, optimizers=[optimizer])."
    )


class Nested:
    """``{"state": {name: state}, "param_groups": [{"params": [name], ...}]}``."""

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        """Copy a dictionary."""
        self._whole = dict(state_dict)
        self._state = dict(state_dict["state"])
        groups = state_dict.get("param_groups", ())
        self._groups = [{**group, "params": list(group["params"])} for group in groups]

    def names(self) -> set[Any]:
        """Return the names of Parameters."""
        return {*self._state, *(name for group in self._groups for name in group["params"])}

    def pop_state(self, name: str) -> dict[str, Any] | None:
        """Remove the state of a name and return it, or None if absent."""
        return self._state.pop(name, None)

    def set_state(self, name: str, state: Mapping[str, Any]) -> None:
        """Set the state of a name."""
        self._state[name] = dict(state)

    def rename(self, old: Sequence[str], new: Sequence[str]) -> None:
        """Replace ``old`` by ``new`` at the first of ``old``; raise if several groups have them."""
        groups = [group for group in self._groups if any(name in old for name in group["params"])]
        if len(groups) > 1:
            raise _refuse_groups(old)
        for group in groups:
            first = next(at for at, name in enumerate(group["params"]) if name in old)
            remaining = [name for name in group["params"] if name not in old]
            group["params"] = [*remaining[:first], *new, *remaining[first:]]

    def whole(self) -> dict[str, Any]:
        """Return the dictionary."""
        return {**self._whole, "state": self._state, "param_groups": self._groups}


class Flat:
    """``{"state.<name>.<entry>": value, "param_groups.<name>.<option>": value}``."""

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        """Copy a dictionary."""
        self._all = dict(state_dict)

    def names(self) -> set[Any]:
        """Return the names of Parameters."""
        prefix = "param_groups."
        return {key[len(prefix) :].rpartition(".")[0] for key in self._all if key.startswith(prefix)}

    def pop_state(self, name: str) -> dict[str, Any] | None:
        """Remove the state of a name and return it, or None if absent."""
        return self._pop(f"state.{name}.") or None

    def set_state(self, name: str, state: Mapping[str, Any]) -> None:
        """Set the state of a name."""
        self._all.update({f"state.{name}.{key}": value for key, value in state.items()})

    def rename(self, old: Sequence[str], new: Sequence[str]) -> None:
        """Give ``new`` the options of ``old``; raise if these differ."""
        options = [values for name in old if (values := self._pop(f"param_groups.{name}."))]
        if any(other != options[0] for other in options):
            raise _refuse_groups(old)
        for name in new if options else ():
            self._all.update({f"param_groups.{name}.{key}": value for key, value in options[0].items()})

    def whole(self) -> dict[str, Any]:
        """Return the dictionary."""
        return self._all

    def _pop(self, prefix: str) -> dict[str, Any]:
        keys = [key for key in self._all if key.startswith(prefix)]
        return {key[len(prefix) :]: self._all.pop(key) for key in keys}
