"""The state of a search on the GPU: the candidates so far, their times, and the best."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from functools import partial

from recfuse.ops.schedules import Schedule
from recfuse.tuner.compile import Job, compile_all
from recfuse.tuner.log import Log, counted, missing, spilled
from recfuse.tuner.table.measure import Bench, race
from recfuse.tuner.table.problem import Problem
from recfuse.tuner.table.screening import Device, first_third


class Search(Log):
    """Compiles, times and compares candidates, and records each decision."""

    def __init__(
        self,
        problem: Problem,
        arch: str,
        deadline: float,
        progress: bool | None,
        seed: int,
        predict: bool = False,
    ) -> None:
        """Create a search without measurements. `predict`: `screened` drops candidates by the model."""
        super().__init__()
        self.problem = problem
        self.bench = Bench(problem)
        self.us: dict[str, float] = {}
        """Microseconds per batch of every timed schedule, by its complete text; "" is the default."""
        self.best = ""
        """The fastest schedule so far."""
        self._arch = arch
        self._deadline = deadline
        self._progress = progress
        self._predict = predict
        self._random = random.Random(seed)
        self._default = ""  # the complete text of the default
        # Complete text of each compiled schedule; None: it cannot win.
        self._complete: dict[str, str | None] = {}

    @property
    def time_is_up(self) -> bool:
        """Whether the deadline has passed; no measurement may begin after it."""
        return time.monotonic() > self._deadline

    def measure_default(self) -> float:
        """Return the microseconds of the defaults; raise the error of the compiler or of the run."""
        result = compile_all({"": self._job("")})[""]
        if isinstance(result, Exception):
            raise result
        # Each batch completes the default by its own size, so the default is timed without a completed text.
        self._default, self._complete[""] = result["schedule"], ""
        results, _ = race(self.bench.measure, [""], self._deadline)
        self.us[""] = results[""].us
        self.note("default", "", self.us[""], True, f"schedule without a plan: {self._default}")
        return self.us[""]

    def screened(self, name: str, candidates: list[Schedule]) -> list[Schedule]:
        """Return the candidates to measure: with `predict` those that the model ranks in the first third."""
        if not self._predict:
            return candidates
        self._random.shuffle(candidates)
        bags = sum(batch.bags for batch in self.problem.batches) // len(self.problem.batches)
        device = Device.of(self.problem.weight.device)
        ranked = first_third(candidates, device, bags, Schedule.parse(self._default))
        why = f"not measured: the model ranks {len(ranked)} before them"
        self.note(name, f"{len(candidates) - len(ranked)} candidates", None, False, why)
        return ranked

    def step(self, name: str, candidates: Iterable[Schedule], keep: int = 1) -> list[Schedule]:
        """Time candidates and the best schedule so far in turns. Returns the `keep` fastest of
        all, the fastest first.
        """
        texts = [str(candidate) for candidate in candidates]
        self._random.shuffle(texts)
        fresh = self._compile(name, texts)
        runners = list(dict.fromkeys([self.best, *fresh]))
        if fresh and not self.time_is_up:
            results, errors = race(self.bench.measure, runners, self._deadline)
            for text, error in errors.items():
                self.note(name, text, None, False, f"does not run: {error}")
            self.us.update({text: result.us for text, result in results.items()})
            ranked = sorted(results, key=self.us.__getitem__)
            self.best = ranked[0]
            for rank, text in enumerate(ranked):
                slower = f"{self.us[ranked[0]] / self.us[text]:.2f}x as fast as the fastest"
                why = f"{slower if rank else 'the fastest'}, {counted(results[text].rounds)}"
                self.note(name, text, self.us[text], rank < keep, why)
        elif fresh:
            self.note(name, f"{len(fresh)} candidates", None, False, "not timed: the budget is spent")
        tried = {self._complete.get(text) for text in texts} - {None, self.best}
        by_time = sorted((text for text in tried if text in self.us), key=self.us.__getitem__)
        return [Schedule.parse(text or self._default) for text in [self.best, *by_time][:keep]]

    def _job(self, text: str) -> Job:
        return partial(self.problem.compile, self._arch, text)

    def _compile(self, step: str, texts: list[str]) -> list[str]:
        """Compile candidates; return the complete texts that may win and have no time yet.
        Records why others cannot win.
        """
        new = [text for text in dict.fromkeys(texts) if text not in self._complete]
        jobs = {text: self._job(text) for text in new}
        results = compile_all(jobs, deadline=self._deadline, progress=self._progress, label=step)
        if len(results) < len(new):
            uncompiled = f"{len(new) - len(results)} candidates"
            self.note(step, uncompiled, None, False, "not compiled: the budget is spent")
        for text, result in results.items():
            why = missing(result) or (spilled(result) and f"spills {spilled(result)}")
            if why:
                self._complete[text] = None
                self.note(step, text, None, False, why)
            else:
                self._complete[text] = self._complete[result["schedule"]] = result["schedule"]
        complete = (self._complete.get(text) for text in texts)
        return list(dict.fromkeys(text for text in complete if text is not None and text not in self.us))
