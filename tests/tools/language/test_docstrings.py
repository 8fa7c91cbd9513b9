"""Docstrings of public names have the form of torch's: a summary, sections in order, examples that run."""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import recfuse
from recfuse import data, info, nn, ops, optim, plan, timing, traces, workloads
from recfuse.nn import columns

SECTIONS = ["Args", "Attributes", "Shape", "Returns", "Raises", "Example", "Note", "Source"]
SECTION = re.compile(rf"^({'|'.join(SECTIONS)}):", re.MULTILINE)
OPERATORS = ["embedding_bag", "fused_embedding_bag", "ikbo_attention", "ikbo_linear"]
OPTIMIZERS = ["SGD", "Adagrad", "RowWiseAdagrad", "Adam"]
MODULES = [recfuse, nn, optim, columns, data, ops, plan, traces, workloads, timing, info]
# Names that pages of docs mention, in modules that list no public names.
MENTIONED = """
    recfuse.passes.report.SwapEntry recfuse.perf.calibration.Calibration recfuse.perf.explain.known_gpus
    recfuse.perf.placement.Placement recfuse.perf.placement.Shard recfuse.perf.placement.Table
    recfuse.perf.placement.place recfuse.perf.prediction.Prediction
    recfuse.perf.tracing.unallocated.unallocated
"""
with contextlib.suppress(ImportError):  # TorchRec may be missing
    MODULES.append(importlib.import_module("recfuse.torchrec"))


def public() -> Iterator[tuple[str, Any]]:
    for module in MODULES:
        names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
        for name in names:
            found = getattr(module, name)
            own = hasattr(module, "__all__") or getattr(found, "__module__", None) == module.__name__
            if own and (inspect.isclass(found) or inspect.isfunction(found)):
                yield f"{module.__name__}.{name}", found
    for path in MENTIONED.split():
        module_name, _, name = path.rpartition(".")
        yield path, getattr(importlib.import_module(module_name), name)


PUBLIC = dict(public())
KINDS = (property, classmethod, staticmethod)
MEMBERS = {
    f"{name}.{member}": value
    for name, found in PUBLIC.items()
    if inspect.isclass(found)
    for member, value in vars(found).items()
    if not member.startswith("_") and (isinstance(value, KINDS) or inspect.isfunction(value))
}
METHODS = {
    name: getattr(value, "fget", None) or getattr(value, "__func__", value) for name, value in MEMBERS.items()
}
CALLS = [name for name, value in MEMBERS.items() if not isinstance(value, property)]


def sections(text: str) -> dict[str, str]:
    """The parts of a docstring by their titles; "" is the part before them."""
    _, *parts = SECTION.split(f"\n{text}")
    return {"": SECTION.split(text)[0], **dict(zip(parts[::2], parts[1::2], strict=True))}


@pytest.mark.parametrize("name", [*PUBLIC, *METHODS])
def test_a_docstring_begins_with_a_summary(name):
    text = inspect.getdoc(PUBLIC.get(name) or METHODS[name])
    assert text is not None
    summary, _, rest = text.partition("\n")
    assert summary.endswith("."), summary
    assert rest == "" or rest.startswith("\n"), "the summary is one line"
    assert not re.match(r"(What|Whether|How|Who|Which|None|One)\b", summary), summary


@pytest.mark.parametrize("name", [*PUBLIC, *METHODS])
def test_sections_have_one_order(name):
    text = inspect.getdoc(PUBLIC.get(name) or METHODS[name]) or ""
    titles = SECTION.findall(text)
    assert titles == [title for title in SECTIONS if title in titles]


def described(text: str) -> set[str]:
    """The names that Args and Attributes of a docstring describe."""
    parts = sections(text)
    given = parts.get("Args", "") + parts.get("Attributes", "")
    return set(re.findall(r"\w+", " ".join(re.findall(r"^ {4}([\w*, ]+):", given, re.MULTILINE))))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_is_described(name):
    found = PUBLIC[name]
    bases = inspect.getmro(found)[:-1] if inspect.isclass(found) else (found,)
    own = [described(inspect.getdoc(base) or "") for base in bases if base.__module__.startswith("recfuse")]
    parameters = inspect.signature(found).parameters
    if inspect.isclass(found) and "Args" in sections(inspect.getdoc(found.__init__) or ""):
        pytest.fail("describe arguments in the docstring of the class")
    assert {name for name in parameters if not name.startswith("_")} - set().union(*own) == set()


def faults(function: Callable[..., Any], is_method: bool) -> list[str]:
    """The parts that the docstring of a function or method lacks."""
    text, signature = inspect.getdoc(function) or "", inspect.signature(function)
    parts, result = sections(text), str(signature.return_annotation)
    if result in ("NoReturn", "typing.NoReturn"):
        return []
    arguments = {
        name for name in signature.parameters if name not in ("self", "cls") and not name.startswith("_")
    }
    found = [f"Args: {name}" for name in sorted(arguments - described(text))] if is_method else []
    # A method whose summary says what it returns needs no section.
    returns = result not in ("None", str(inspect.Signature.empty)) and not result.startswith("Iterator")
    if returns and "Returns" not in parts and not (is_method and text.startswith("Return ")):
        found.append("Returns")
    return found + (["Raises"] if raises(function) and "Raises" not in parts else [])


def raises(function: Callable[..., Any]) -> bool:
    body = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(body))


@pytest.mark.parametrize("name", [name for name, found in PUBLIC.items() if inspect.isfunction(found)])
def test_a_function_describes_its_result_and_its_errors(name):
    assert faults(PUBLIC[name], is_method=False) == []


@pytest.mark.parametrize("name", CALLS)
def test_a_method_describes_its_arguments_result_and_errors(name):
    assert faults(METHODS[name], is_method=True) == []


@pytest.mark.parametrize("name", [name for name, found in PUBLIC.items() if inspect.isclass(found)])
def test_a_class_describes_errors_of_its_constructor(name):
    members = vars(PUBLIC[name])
    constructors = [members[key] for key in ("__init__", "__post_init__") if key in members]
    constructors = [made for made in constructors if made.__code__.co_filename != "<string>"]
    if any(map(raises, constructors)):
        assert "Raises" in sections(inspect.getdoc(PUBLIC[name]) or "")


def test_missing_parts_are_found():
    def bare(self: Any, path: str) -> int:
        """Compute."""
        raise ValueError(path)

    def short(self: Any) -> int:
        """Return 1."""
        return 1

    assert faults(bare, is_method=True) == ["Args: path", "Returns", "Raises"]
    assert faults(bare, is_method=False) == ["Returns", "Raises"]
    assert faults(short, is_method=True) == [] and faults(short, is_method=False) == ["Returns"]


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run(name):
    found = PUBLIC[name]
    text = inspect.getdoc(found) or ""
    assert "Example" in sections(text)
    names = {"torch": torch, "recfuse": recfuse}
    test = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    assert test.examples
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    assert report == []


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_has_every_section(name):
    parts = sections(inspect.getdoc(getattr(recfuse, name)) or "")
    assert set(SECTIONS) - set(parts) == {"Attributes"}


@pytest.mark.parametrize("name", [*recfuse.nn.__all__, *OPTIMIZERS])
def test_a_module_documents_devices_and_source(name):
    found = getattr(nn, name, None) or getattr(optim, name)
    if inspect.isclass(found) and issubclass(found, (torch.nn.Module, torch.optim.Optimizer)):
        assert {"Note", "Source"} <= set(sections(inspect.getdoc(found) or ""))
