"""TorchRec's own model-parallel tests on gloo, case by case, in a process whose kernels are chosen already.

A test that draws its arguments with Hypothesis is a list of cases: the combinations that Hypothesis draws,
without those whose kernel needs a cache. Skips for want of GPUs, or of gloo's reduce-scatter, which torch has
by now, are dropped.
"""

from __future__ import annotations

import json
import os
import time
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import Phase, settings
from hypothesis.errors import UnsatisfiedAssumption
from torchrec.distributed.test_utils import test_model_parallel, test_model_parallel_base
from torchrec.distributed.tests import test_model_parallel_hierarchical

DRAWS = 300
_IN_A_CACHE = ("uvm", "key_value", "virtual_table")
_WITH_CACHES = "test_sharding_multiple_kernels"  # tests that place tables in one
_DROPPED = ("Gloo", "bounds_check_indices")  # skips that begin so

Case = dict[str, Any]


class _OnGloo(unittest.TestCase):
    backend = "gloo"

    def skipTest(self, reason: str) -> None:
        """Skips, except for what works by now."""
        if not reason.startswith(_DROPPED):
            super().skipTest(reason)

    def _test_sharding(self, *arguments: Any, **named: Any) -> None:
        super()._test_sharding(*arguments, **{**named, "backend": "gloo"})  # type: ignore[misc]


class ModelParallel(_OnGloo, test_model_parallel._ModelParallelBase):
    """Sharding types, two processes."""


class StateDict(_OnGloo, test_model_parallel_base.ModelParallelStateDictBase):
    """Checkpoints, one process."""


class SparseOnly(_OnGloo, test_model_parallel_base.ModelParallelSparseOnlyBase):
    """Collections without a dense part."""


class Hierarchical(_OnGloo, test_model_parallel_hierarchical.ModelParallelHierarchicalTest):
    """Two hosts of two processes."""

    def setUp(self) -> None:
        """Sets up for gloo."""
        test_model_parallel.ModelParallelTestShared.setUp(self, backend="gloo")


CLASSES = (StateDict, SparseOnly, ModelParallel, Hierarchical)


def _without_skips(test: Callable[..., Any]) -> Callable[..., Any]:
    while getattr(test, "__unittest_skip__", False):
        test = test.__wrapped__  # type: ignore[attr-defined]
    return test


def _draw(kind: type[unittest.TestCase], name: str, test: Any) -> list[Case]:
    """Arguments of a test, each combination once, in the order of their text."""
    drawn: dict[str, Case] = {}

    def record(self: Any, **case: Any) -> None:
        drawn.setdefault(repr(sorted(case.items(), key=str)), case)

    inner, test.hypothesis.inner_test = test.hypothesis.inner_test, record
    chosen = settings(
        max_examples=DRAWS, derandomize=True, database=None, deadline=None, phases=[Phase.generate]
    )
    before, test._hypothesis_internal_use_settings = test._hypothesis_internal_use_settings, chosen
    try:
        test(kind(name))
    finally:
        test.hypothesis.inner_test, test._hypothesis_internal_use_settings = inner, before
    return [drawn[key] for key in sorted(drawn)]


def cases_of(most: int) -> Iterator[tuple[type[unittest.TestCase], str, Case, Callable[..., Any]]]:
    """Class, name, arguments and function of each case, at most so many of a test, evenly chosen."""
    for kind in CLASSES:
        for name in unittest.TestLoader().getTestCaseNames(kind):
            if name.startswith(_WITH_CACHES):
                continue
            test = _without_skips(getattr(kind, name))
            if not hasattr(test, "hypothesis"):
                yield kind, name, {}, test
                continue
            cases = [
                case
                for case in _draw(kind, name, test)
                if not any(word in str(case.get("kernel_type", "")) for word in _IN_A_CACHE)
            ]
            step = max(len(cases) / most, 1.0)
            for at in range(min(most, len(cases))):
                yield kind, name, cases[int(at * step)], test.hypothesis.inner_test


def run_case(
    kind: type[unittest.TestCase], name: str, case: Case, test: Callable[..., Any]
) -> tuple[str, str]:
    """Returns passes, fails or skipped, and the reason."""
    one = kind(name)
    try:
        kind.setUpClass()
        one.setUp()
        try:
            test(one, **case)
        finally:
            one.tearDown()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except UnsatisfiedAssumption:
        return "skipped", "an assumption of the test does not hold"
    except Exception as error:
        return "fails", f"{type(error).__name__}: {error}"
    return "passes", ""


def main(out: str, most: int) -> None:
    """Runs all cases, and writes a line of JSON for each."""
    record = Path(os.environ["SUITE_RECORD"])
    with open(out, "w") as results:
        for kind, name, case, test in cases_of(most):
            record.write_text("")
            begin = time.monotonic()
            status, reason = run_case(kind, name, case, test)
            made = record.read_text()
            line = {
                "test": f"{kind.__name__}.{name}",
                "case": {key: getattr(value, "__name__", None) or str(value) for key, value in case.items()},
                "status": status,
                "reason": reason,
                "seconds": round(time.monotonic() - begin, 1),
                "kernels": {"recfuse": made.count("r"), "other": made.count("f")},
            }
            print(line["test"], line["status"], line["seconds"], reason.strip().splitlines()[-1:], flush=True)
            print(json.dumps(line), file=results, flush=True)
