"""Rules that hold for each of many cases, in one test each: thousands of tests take seconds to schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def for_each(
    cases: Iterable[Any], name: Callable[[Any], str] = str
) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Makes a test of a rule for one case. The test checks all cases and names each that breaks the rule."""

    every = list(cases)

    def decorate(rule: Callable[[Any], None]) -> Callable[[], None]:
        def test() -> None:
            broken = []
            for case in every:
                try:
                    rule(case)
                except (AssertionError, pytest.fail.Exception) as error:
                    broken.append(f"{name(case)}: {error}")
                except Exception as error:
                    raise RuntimeError(f"the rule itself fails for {name(case)}") from error
            assert not broken, f"{len(broken)} of {len(every)} cases:\n" + "\n".join(broken)
            assert every

        test.__name__, test.__module__, test.__doc__ = rule.__name__, rule.__module__, rule.__doc__
        return test

    return decorate
