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
    """The result of :func:`recfuse.backend`: a backend of torch.compile with a report for each graph."""

    def __init__(self, inner: Any, patterns: Sequence[str] | None, options: dict[str, Any]) -> None:
        """See :func:`recfuse.backend`."""
        self.inner, self.patterns, self.options = inner, patterns, options
        self.__name__ = "recfuse"  # in torch's messages
        self.reports: list[SwapReport] = []
        """A report for each compiled graph, the latest last."""

    def __call__(self, module: GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Rewrite a captured graph and compile it."""
        report = SwapReport()
        self.reports.append(report)
        with uncollected():
            swapped = self._swapped(module, inputs, report)
        return _inner_backend(self.inner, {**self.options, **options})(swapped, inputs)

    def _swapped(self, module: GraphModule, inputs: Sequence[Any], report: SwapReport) -> GraphModule:
        """Return the rewritten graph, or the captured graph if there is no match."""
        if reason := why_not_recorded(module):
            report.add("(graph)", "graph", "left", reason)
            return module
        try:
            with recorded(module, inputs) as program:
                rewrite(program, report, self.patterns)
        except Exception as error:  # from the tracer: a graph that it cannot record is compiled unchanged
            _log.warning("recfuse.backend: a graph is compiled as it is: %s", error, exc_info=True)
            report.entries.clear()
            report.add("(graph)", "graph", "left", f"the graph cannot be rewritten: {error!r}")
            return module
        return program.module if program.changed else module

    def __str__(self) -> str:
        """The reports of all graphs."""
        return "\n\n".join(map(str, self.reports)) or "recfuse.backend: nothing has been compiled yet"


def backend(inner: Any = "inductor", *, patterns: Sequence[str] | None = None, **options: Any) -> Backend:
    """Create a backend of torch.compile that puts recfuse's operators into the graphs it compiles.

    ``torch.compile(model, backend=recfuse.backend())`` does not change the model: its Parameters stay in
    place, and every call reads them. Training, ``torch.no_grad`` and dynamic shapes work as without the
    backend, and torch guards on the same shapes. A graph that cannot be rewritten is compiled unchanged, and
    the report says so.

    Args:
        inner: the compiler of the rewritten graph: the name of a backend of torch ("inductor", "aot_eager",
            "eager", ...), or a callable ``inner(graph_module, example_inputs)``. Default: "inductor".
        patterns: the patterns to look for; docs/passes.md lists them. Default: all.
        options: options of ``inner``: ``mode`` and ``options`` of inductor, as in torch.compile.

    Returns:
        Backend: the backend. ``.reports`` has a :class:`recfuse.SwapReport` for each compiled graph, and
        ``print`` shows them.

    Raises:
        TypeError: ``inner`` is neither a name nor a callable.
        ValueError: torch does not know the backend ``inner``; inductor does not know a mode or an option; a
            pattern has another name.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 16, mode="sum"), torch.nn.Linear(16, 1))
        >>> backend = recfuse.backend("eager")
        >>> torch.compile(model, backend=backend)(torch.randint(100, (4, 3))).shape
        torch.Size([4, 1])
        >>> print(backend.reports[0].swapped[0].pattern)
        bags

    Note:
        Works on the CPU and on GPUs. Gradients are those of the rewritten graph: the model's, up to the order
        of sums.

    Source: Pan et al., RECom, ASPLOS 2023; IKBO, the inference-time transformation.
    """
    if not callable(inner) and not isinstance(inner, str):
        raise ArgumentTypeError(
            f"recfuse.backend: inner is {a_type(inner)}; expected the name of a backend or a callable"
        )
    from recfuse.passes.graph.rewrite import chosen

    chosen(patterns, "recfuse.backend")
    _inner_backend(inner, dict(options))  # an unknown name or mode must raise here, not in the first call
    return Backend(inner, None if patterns is None else tuple(patterns), options)


def _inner_backend(inner: Any, options: dict[str, Any]) -> Callable[..., Any]:
    """Return the compiler; raises ValueError for an unknown name, or a bad mode or option of inductor."""
    if inner == "inductor":
        mode, inductor_options = options.pop("mode", None), options.pop("options", None)
        try:
            return torch._TorchCompileInductorWrapper(mode, inductor_options, None)
        except (RuntimeError, AttributeError, TypeError) as error:
            raise ArgumentValueError(
                f"recfuse.backend: mode is {mode!r} and options is {inductor_options!r}, which inductor "
                f"refuses: {error}"
            ) from error
    if not isinstance(inner, str):
        return lambda module, inputs: inner(module, inputs, **options)
    names = torch._dynamo.list_backends(exclude_tags=())
    if inner not in names:
        close = difflib.get_close_matches(inner, names, 1)
        meant = f". Try {close[0]!r}." if close else ""
        raise ArgumentValueError(
            f"recfuse.backend: inner is {inner!r}; expected a callable or the name of a backend of torch "
            f"({', '.join(torch._dynamo.list_backends())}){meant}"
        )
    backend = torch._dynamo.lookup_backend(inner)
    return lambda module, inputs: backend(module, inputs, **options)
