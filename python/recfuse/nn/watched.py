"""Knowing at no cost that no packed table, and no parameter of one, has been replaced."""

from __future__ import annotations

from typing import Any


class _Latest:
    """The last change to any of them all; one object each, so that two at once are two."""

    change: object = object()


class Watched(dict[str, Any]):
    """A module's ``_parameters`` or ``_modules``, which notes that it was written to. Copies are plain."""

    def __setitem__(self, name: str, value: Any) -> None:
        """Notes the change when it is done, as all below."""
        super().__setitem__(name, value)
        _Latest.change = object()

    def __delitem__(self, name: str) -> None:
        """As dict's."""
        super().__delitem__(name)
        _Latest.change = object()

    def __ior__(self, other: Any) -> Watched:
        """As dict's."""
        self.update(other)
        return self

    def pop(self, *arguments: Any) -> Any:
        """As dict's."""
        value = super().pop(*arguments)
        _Latest.change = object()
        return value

    def popitem(self) -> tuple[str, Any]:
        """As dict's."""
        item = super().popitem()
        _Latest.change = object()
        return item

    def clear(self) -> None:
        """As dict's."""
        super().clear()
        _Latest.change = object()

    def update(self, *arguments: Any, **values: Any) -> None:
        """As dict's."""
        super().update(*arguments, **values)
        _Latest.change = object()

    def setdefault(self, name: str, default: Any = None) -> Any:
        """As dict's."""
        value = super().setdefault(name, default)
        _Latest.change = object()
        return value

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        """Copies and pickles are plain dicts."""
        return dict, (dict(self),)


def watched(module: Any, name: str) -> Watched:
    """Makes a module's ``_parameters`` or ``_modules`` watched, and returns it."""
    own = module.__dict__[name]
    if type(own) is not Watched:
        own = module.__dict__[name] = Watched(own)
    return own


def latest_change() -> object:
    """Another object after each change to any of them."""
    return _Latest.change
