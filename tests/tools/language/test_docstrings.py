"""Docstrings of public names have the form of torch's: a summary, sections in order, examples that run."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import recfuse
from recfuse import data, nn, optim
from recfuse.nn import columns

SECTIONS = ["Args", "Attributes", "Shape", "Returns", "Raises", "Example", "Note", "Source"]
SECTION = re.compile(rf"^({'|'.join(SECTIONS)}):", re.MULTILINE)
OPERATORS = ["embedding_bag", "fused_embedding_bag", "ikbo_attention", "ikbo_linear"]
OPTIMIZERS = ["SGD", "Adagrad", "RowWiseAdagrad", "Adam"]


def public() -> Iterator[tuple[str, Any]]:
    for module in (recfuse, nn, optim, columns, data):
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isclass(found) or inspect.isfunction(found):
                yield f"{module.__name__}.{name}", found


PUBLIC = dict(public())
METHODS = {
    f"{name}.{member}": getattr(value, "fget", None) or getattr(value, "__func__", value)
    for name, found in PUBLIC.items()
    if inspect.isclass(found)
    for member, value in vars(found).items()
    if not member.startswith("_") and (isinstance(value, property | classmethod) or inspect.isfunction(value))
}


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


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_is_described(name):
    found = PUBLIC[name]
    bases = inspect.getmro(found)[:-1] if inspect.isclass(found) else (found,)
    parts = [sections(inspect.getdoc(base) or "") for base in bases if base.__module__.startswith("recfuse")]
    given = "".join(part.get("Args", "") + part.get("Attributes", "") for part in parts)
    described = set(re.findall(r"\w+", " ".join(re.findall(r"^ {4}([\w*, ]+):", given, re.MULTILINE))))
    parameters = inspect.signature(found).parameters
    if inspect.isclass(found) and "Args" in sections(inspect.getdoc(found.__init__) or ""):
        pytest.fail("describe arguments in the docstring of the class")
    assert {name for name in parameters if not name.startswith("_")} - described == set()


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
def test_a_module_says_devices_and_source(name):
    found = getattr(nn, name, None) or getattr(optim, name)
    if inspect.isclass(found) and issubclass(found, (torch.nn.Module, torch.optim.Optimizer)):
        assert {"Note", "Source"} <= set(sections(inspect.getdoc(found) or ""))
