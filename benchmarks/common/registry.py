"""The registry: a `Benchmark` has figures and peers, which are functions, and flags.

    bench = Benchmark("ikbo_linear", __doc__, modules=["figures"])
    bench.flag("--ratio", positive, 70, "candidates a user")

    @bench.figure("ratios")
    def figure_ratios(setting: Setting) -> Figure: ...

    @bench.peer("Triton")
    def triton(problem: Problem) -> Run: ...

Command lines, result files, plots and the effect of `--quick` are the same for all benchmarks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch

from common.report import Figure, Report
from common.settings import Setting, check_folder, check_plot, comma_list, positive

SAME: Any = object()
DEVICES = "cpu", "cuda"
Made = TypeVar("Made", bound=Setting)
Function = Callable[[Any], "Figure | Iterable[Figure]"]


@dataclass(frozen=True)
class Flag:
    """An argument of a command line.

    Attributes:
        default: the value, or a function of the other arguments; `cpu`: the default on the CPU.
        quick: the default with `--quick`; of a list its length.
        allowed: allowed names; None: any.
        on: the device of the flag; None: both.
        may_be_empty: allows an empty list.
    """

    name: str
    kind: Callable[[str], Any]
    default: Any
    text: str
    cpu: Any = SAME
    quick: Any = None
    allowed: Collection[str] | None = None
    on: str | None = None
    metavar: str | None = None
    may_be_empty: bool = False

    @property
    def attribute(self) -> str:
        """Its name in the parsed arguments."""
        return self.name.lstrip("-").replace("-", "_")

    def default_of(self, arguments: argparse.Namespace) -> Any:
        """Returns the default value."""
        value = self.cpu if arguments.device == "cpu" and self.cpu is not SAME else self.default
        value = value(arguments) if callable(value) else value
        if not arguments.quick or self.quick is None:
            return value
        return value[: self.quick] if isinstance(value, list) and isinstance(self.quick, int) else self.quick

    def add(self, parser: Any) -> None:
        """Adds it to a parser, with None as the parser's default."""
        if self.kind is bool:
            parser.add_argument(self.name, action="store_true", help=self.text)
            return
        values = {"": self.default, "CPU: ": self.cpu}
        known = {name: value for name, value in values.items() if value not in (SAME, None)}
        shown = [name + _shown(value) for name, value in known.items() if not callable(value)]
        text = f"{self.text} (default: {'; '.join(shown)})" if shown else self.text
        text = text.replace("%", "%%")
        parser.add_argument(self.name, type=self.kind, help=text, metavar=self.metavar)

    def check(self, parser: argparse.ArgumentParser, value: Any) -> None:
        """End the program where a list is empty, or a name is unknown."""
        message = f"{self.name}: found {_shown(value)!r}"
        names = value if isinstance(value, list) else [value] if isinstance(value, str) else []
        if self.allowed is not None and (set(names) - set(self.allowed) or value == []):
            parser.error(f"{message}; expected {', '.join(self.allowed)}")
        if value == [] and not self.may_be_empty:
            parser.error(f"{message}; expected at least a value")


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return ",".join(map(_shown, value)) if isinstance(value, list) else str(value)


class Benchmark:
    """Figures, peers and flags of a benchmark; `main` is its program."""

    def __init__(
        self,
        package: str,
        description: str | None,
        modules: Iterable[str],
        *,
        rounds: int | None = None,
        quick_rounds: int | None = 3,
        plots: str | None = None,
        device: str | None = "cpu",
    ) -> None:
        """`modules` of the package register figures. `plots`: prefix of the names of plots; None: no plots.

        `device`: the default; None: the GPU if available.
        """
        self.peers: dict[str, Callable[..., Any]] = {}
        self.figures: dict[str, dict[str, Function]] = {device: {} for device in DEVICES}
        self.groups: dict[str, list[str]] = {}
        self._defaults: dict[str, list[str]] = {device: [] for device in DEVICES}
        self._all: dict[str, list[str]] = {device: [] for device in DEVICES}
        self._last: list[Function] = []
        self._checks: list[Callable[[argparse.ArgumentParser, argparse.Namespace], None]] = []
        self._package, self._modules, self._description = package, list(modules), description
        self._setting: type[Setting] = Setting
        self._plots, self._device = plots, device
        self._flags: list[Flag] = []
        if rounds is not None:
            text = "samples of each candidate"
            self.flag("--rounds", positive, rounds, text, quick=quick_rounds)

    def flag(
        self, name: str, kind: Callable[[str], Any] = str, default: Any = None, text: str = "", **more: Any
    ) -> None:
        """Adds a `Flag`."""
        self._flags.append(Flag(name, kind, default, text, **more))

    def figure(
        self, name: str, *, on: Iterable[str] = DEVICES, default: bool | None = True, group: str | None = None
    ) -> Callable[[Function], Function]:
        """Registers a figure for devices.

        `default`: measured if no figure is named; None: not even by "all". `group`: a name for several
        figures.
        """

        def register(function: Function) -> Function:
            for device in on:
                self.figures[device][name] = function
                self._defaults[device] += [name] if default else []
                self._all[device] += [name] if default is not None else []
            if group is not None:
                self.groups.setdefault(group, []).append(name)
            return function

        return register

    def peer(self, *names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Registers a function that creates a contestant, under its name in tables and result files.

        A function with several names gets the name before its other arguments.
        """

        def register(make: Callable[..., Any]) -> Callable[..., Any]:
            self.peers.update({name: partial(make, name) if len(names) > 1 else make for name in names})
            return make

        return register

    def setting(self, made: type[Made]) -> type[Made]:
        """Registers the class of the argument of figures, by default `Setting`."""
        self._setting = made
        return made

    def last(self, function: Function) -> Function:
        """Registers figures that follow from the others of a run."""
        self._last.append(function)
        return function

    def check(self, function: Callable[[argparse.ArgumentParser, argparse.Namespace], None]) -> Any:
        """Registers a check of the arguments, which may complete them."""
        self._checks.append(function)
        return function

    def load(self) -> None:
        """Imports the modules that register figures, peers and flags."""
        for module in self._modules:
            import_module(f"{self._package}.{module}")

    def parse(
        self, command_line: list[str] | None = None
    ) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
        """Parses, completes and checks the command line; ends the program if it cannot be satisfied."""
        self.load()
        parser = self._parser()
        arguments = parser.parse_args(command_line)
        arguments.device_found = arguments.device is None
        arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if arguments.device != "cpu" and not torch.cuda.is_available():
            parser.error(f"--device {arguments.device}: torch finds no GPU. Pass --device cpu.")
        if arguments.seed < 0:
            parser.error(f"--seed: found {arguments.seed}; expected an integer of at least 0")
        check_folder(parser, "--json", arguments.json)
        if self._plots is not None and arguments.plots is not None:
            check_plot(parser, arguments.plots / "figure.png", "--plots")
        if arguments.threads is not None:
            torch.set_num_threads(arguments.threads)
        arguments.figures = self._chosen(parser, arguments)
        for flag in self._flags:
            if getattr(arguments, flag.attribute) is None:
                setattr(arguments, flag.attribute, flag.default_of(arguments))
            flag.check(parser, getattr(arguments, flag.attribute))
        for check in self._checks:
            check(parser, arguments)
        return parser, arguments

    def _parser(self) -> argparse.ArgumentParser:
        form = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(f"{self._package}.py", None, self._description, formatter_class=form)
        add = parser.add_argument
        names = list(dict.fromkeys(name for of_device in self.figures.values() for name in of_device))
        listed = ", ".join([*names, *self.groups, "all"])
        add("named", nargs="*", metavar="FIGURE", help=f"what to measure, of {listed}")
        defaults = "; ".join(
            f"{device}: {','.join(choices)}" for device, choices in self._defaults.items() if choices
        )
        add("--figures", type=comma_list, help=f"the same, joined by commas (default: {defaults})")
        shown = self._device or "the GPU where there is one"
        add("--device", default=self._device, choices=DEVICES, help=f"default: {shown}")
        add("--threads", type=positive, help="threads of every candidate (default: torch's)")
        add("--json", type=Path, metavar="FILE", help="write the figures and every sample")
        add("--markdown", action="store_true", help="print tables in Markdown")
        add("--seed", type=int, default=0, help="of tables and inputs (default: 0)")
        add("--quick", action="store_true", help="a trial run: its figures are not to be quoted")
        if self._plots is not None:
            add("--plots", type=Path, metavar="FOLDER", help="write each figure as a PNG")
        groups: dict[str | None, Any] = {None: parser}
        for flag in self._flags:
            if flag.on not in groups:
                groups[flag.on] = parser.add_argument_group(f"only with --device {flag.on}")
            flag.add(groups[flag.on])
        return parser

    def _chosen(self, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[str]:
        """Returns the figures of a run, in the order of the command line."""
        known = self.figures[arguments.device]
        named = [*arguments.named, *(arguments.figures or [])]
        if not named and arguments.figures is None:
            return list(self._defaults[arguments.device])
        groups = {"all": self._all[arguments.device], **self.groups}
        chosen = [each for name in named for each in groups.get(name, [name])]
        Flag("--figures", comma_list, None, "", allowed=known).check(parser, chosen)
        return list(dict.fromkeys(chosen))

    def run(
        self, parser: argparse.ArgumentParser, arguments: argparse.Namespace, device: str | None = None
    ) -> None:
        """Measures; rewrites the JSON file after each figure. `device`: the device of the figures; None:
        the run's."""
        report = Report(arguments)
        for name, figure in self.figures_of(parser, arguments, device):
            plot = figure.plot or f"{self._plots}_{name.replace(' ', '_')}"
            report.add_figure(name, figure, plot)

    def figures_of(
        self, parser: argparse.ArgumentParser, arguments: argparse.Namespace, device: str | None = None
    ) -> Iterator[tuple[str, Figure]]:
        """Names in the JSON file, and figures, each as soon as it is measured."""
        setting, known = self._setting(parser, arguments), self.figures[device or arguments.device]
        chosen = [(name, known[name]) for name in arguments.figures]
        for name, function in [*chosen, *(("", function) for function in self._last)]:
            for figure in _each(function(setting)):
                yield figure.name or name, figure
        if speed := vars(setting).get("copy_speed"):
            name = "copy_bytes_per_s" if setting.on_gpu else "read_bandwidth_bytes_per_s"
            yield name, Figure([], {}, speed)

    def main(self) -> None:
        """The program."""
        self.run(*self.parse())


def _each(figures: Figure | Iterable[Figure]) -> Iterable[Figure]:
    return [figures] if isinstance(figures, Figure) else figures
