"""``backend``: graph passes as a backend of torch.compile, before inductor or any other."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from recfuse.errors import ArgumentTypeError, ArgumentValueError, a_type
from recfuse.passes.graph.progress import uncollected
from recfuse.passes.graph.rewrite import rewrite
from recfuse.passes.graph.tracing import recorded, why_not_recorded
from recfuse.passes.report import SwapReport

_log = logging.getLogger("recfuse")


class Backend:
    """What :func:`recfuse.backend` returns: a backend of torch.compile with a report of each graph."""

    def __init__(self, inner: Any, patterns: Sequence[str] | None, options: dict[str, Any]) -> None:
        """See :func:`recfuse.backend`."""
        self.inner, self.patterns, self.options = inner, patterns, options
        self.__name__ = "recfuse"  # in torch's messages
        self.reports: list[SwapReport] = []
        """One for each graph that was compiled, the latest last."""

    def __call__(self, module: GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Rewrites a captured graph and compiles it."""
        report = SwapReport()
        self.reports.append(report)
        with uncollected():
            swapped = self._swapped(module, inputs, report)
        return _inner_backend(self.inner, {**self.options, **options})(swapped, inputs)

    def _swapped(self, module: GraphModule, inputs: Sequence[Any], report: SwapReport) -> GraphModule:
        """The rewritten graph; the captured one where nothing was found."""
        if reason := why_not_recorded(module):
            report.add("(graph)", "graph", "left", reason)
            return module
        try:
            with recorded(module, inputs) as program:
                rewrite(program, report, self.patterns)
        except Exception as error:  # of the tracer: a graph that it cannot record is compiled as it is
            _log.warning("recfuse.backend: a graph is compiled as it is: %s", error, exc_info=True)
            report.entries.clear()
            report.add("(graph)", "graph", "left", f"it cannot be rewritten: {type(error).__name__}: {error}")
            return module
        return program.module if program.changed else module

    def __str__(self) -> str:
        """The reports."""
        return "\n\n".join(map(str, self.reports)) or "recfuse.backend: nothing has been compiled yet"


def backend(inner: Any = "inductor", *, patterns: Sequence[str] | None = None, **options: Any) -> Backend:
    """A backend of torch.compile that swaps recfuse's operators into the graphs it is given.

    ``torch.compile(model, backend=recfuse.backend())`` leaves the model as it is: its Parameters stay where
    they are, and every call reads them, so no call can read an old weight. Gradients are those of the
    rewritten graph. Training, ``torch.no_grad`` and dynamic shapes work as without it, and torch guards on no
    more shapes than without it. A graph that cannot be read is compiled without a change, and
    ``print(backend)`` says so.

    Args:
        inner: what compiles the rewritten graph: the name of a backend of torch ("inductor", "aot_eager",
            "eager", ...), or a callable ``inner(graph_module, example_inputs)``.
        patterns: the kinds of patterns to look for; by default all: see docs/passes.md.
        options: of ``inner``: ``mode`` and ``options`` of inductor, as torch.compile has them.

    Returns:
        The backend. ``.reports`` has a :class:`recfuse.SwapReport` for each graph that was compiled.

    Raises:
        TypeError, ValueError: ``inner`` is no backend that torch knows; inductor does not know a mode or an
            option; a pattern has another name.
    """
    if not callable(inner) and not isinstance(inner, str):
        raise ArgumentTypeError(
            f"recfuse.backend: inner is {a_type(inner)}, must be the name of a backend or a callable"
        )
    from recfuse.passes.graph.rewrite import chosen

    chosen(patterns, "recfuse.backend")
    _inner_backend(inner, dict(options))  # an unknown name or mode is an error here, not in the first call
    return Backend(inner, None if patterns is None else tuple(patterns), options)


def _inner_backend(inner: Any, options: dict[str, Any]) -> Callable[..., Any]:
    """Raises ValueError for a name that torch does not know, and for a mode or options of inductor."""
    if inner == "inductor":
        mode, own = options.pop("mode", None), options.pop("options", None)
        try:
            return torch._TorchCompileInductorWrapper(mode, own, None)
        except (RuntimeError, AttributeError, TypeError) as error:
            raise ArgumentValueError(
                f"recfuse.backend: mode is {mode!r} and options is {own!r}, which inductor refuses: {error}"
            ) from error
    if not isinstance(inner, str):
        return lambda module, inputs: inner(module, inputs, **options)
    known = torch._dynamo.list_backends(exclude_tags=())
    if inner not in known:
        close = difflib.get_close_matches(inner, known, 1)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        raise ArgumentValueError(
            f"recfuse.backend: inner is {inner!r}, must be a callable or the name of a backend of torch: "
            f"{', '.join(torch._dynamo.list_backends())}.{meant}"
        )
    found = torch._dynamo.lookup_backend(inner)
    return lambda module, inputs: found(module, inputs, **options)
