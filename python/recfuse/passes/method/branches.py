"""``Branches``: known facts about the input, writes to variables and lists, and both sides of a branch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from recfuse.passes.method.reads import Reads
from recfuse.passes.method.source import Refused
from recfuse.passes.method.values import (
    Constant,
    Contents,
    Frame,
    Merger,
    Sequence,
    Test,
    contents_of,
    put_back,
)


class Branches:
    """Evaluates branches for a number of tables. At first, no fact about the input is known.

    If a branch depends on the input, both sides are evaluated, each with the facts that hold in it. The
    writes of each side are recorded, undone and merged.
    """

    def __init__(self, reads: Reads, tables: int) -> None:
        """See the class."""
        self.reads, self.tables = reads, tables
        self.facts: dict[Any, bool] = {}
        self._journals: list[tuple[int, dict[int, tuple[Sequence | Frame, Contents]]]] = []
        self._is_lazy = False

    def assign(self, frame: Frame, name: str, value: Any) -> None:
        """Assign a value to a variable."""
        self._note(frame)
        frame.names[name] = value

    def written(self, sequence: Sequence) -> list[Any]:
        """Return the items of a list for a write, and record the write."""
        if self._is_lazy:
            raise Refused("writes to a list inside a generator")
        self._note(sequence)
        sequence.writes += 1
        return sequence.items

    @contextmanager
    def lazy(self) -> Iterator[None]:
        """Mark the evaluation of expressions that Python evaluates later, or never."""
        before, self._is_lazy = self._is_lazy, True
        try:
            yield
        finally:
            self._is_lazy = before

    def _note(self, container: Sequence | Frame) -> None:
        if not self._journals:
            return
        begin, journal = self._journals[-1]
        if container.number < begin and id(container) not in journal:  # others are new here
            journal[id(container)] = container, contents_of(container)

    def truth(self, value: Any) -> bool | Test:
        """Return the truth of a value: a bool, or a Test if it depends on the input."""
        if isinstance(value, Constant):
            return bool(value.value)
        if isinstance(value, Sequence):
            return bool(value.items)
        if isinstance(value, Test):
            for facts, result in ((value.if_true, True), (value.if_false, False)):
                if len(facts) == 1 and self.facts.get(facts[0][0]) is facts[0][1]:
                    return result
            return value
        raise Refused("branches on a value that is known only in a call")

    def either(self, test: bool | Test, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
        """Return the value of the branch that runs, or the merged value if the input decides."""
        if isinstance(test, bool):
            return if_true() if test else if_false()
        facts = {**self.facts, **dict(test.if_true)}, {**self.facts, **dict(test.if_false)}
        before, merger = self.facts, Merger(facts)
        values, changes = [], []
        for self.facts, branch in zip(facts, (if_true, if_false), strict=True):
            self._journals.append((merger.begin, {}))
            values.append(branch())
            _, journal = self._journals.pop()
            changes.append({key: (box, old, contents_of(box)) for key, (box, old) in journal.items()})
            for box, old in journal.values():
                put_back(box, old)
        self.facts = before
        for key, (box, old, _) in {**changes[0], **changes[1]}.items():
            self._note(box)
            new = [change[key][2] if key in change else old for change in changes]
            put_back(box, merger.contents(*new))
        if all(isinstance(value, tuple) for value in values):  # completions
            if values[0][0] != values[1][0]:
                raise Refused("leaves a loop or returns, depending on the input")
            return values[0][0], merger.merge(values[0][1], values[1][1])
        return merger.merge(*values)
