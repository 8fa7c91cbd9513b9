"""Messages of errors and warnings: ``<operator>: <argument> is <found>; expected <allowed>. <Remedy>.``

Reasons of reports have this form without the operator."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

READER = runpy.run_path(str(Path(__file__).with_name("messages.py")))
ROOT: Path = READER["ROOT"]

# Words of no field, or of another way to say "expected".
BANNED = re.compile(
    r"\b(?:must|shall|what|who|whoever|nobody|ones|gives?|gave|beside|ahead|anew|behind|asked for|asks? for"
    r"|(?:is|are) allowed|allowed (?:is|are)|needed (?:is|are)|none of|please|sorry)\b"
    r"|, expected (?!lookups)\b"
    r"|\bone(?=$|[;,.)]| (?:for|a|an|each|or|that|which|in|on|at|before|and|has|is)\b)"
)
# The verbs with which a remedy begins.
REMEDIES = """
    Add Align Apply Assign Calibrate Call Capture Cast Change Check Close Compile Compute Concatenate
    Convert Copy Create Cut Detach Export Fill Fork Free Freeze Give Hash Import Install Keep Leave Load
    Make Merge Move Name Omit Open Pack Pad Pass Pin Place Plan Put Raise Read Register Reinstall Remove
    Rename Repeat Replace Report Run Save See Set Shorten Split Store Swap Take Train Try Tune Unset
    Unswap Update Use Wait Write
"""
# The verbs of facts; a fact may also begin with "no".
FACTS = re.compile(
    r"\b(?:found|came|is|are|was|were|has|have|had|does|do|did|cannot|can|could|would|will|failed|fails|needs?"
    r"|takes?|begins?|ends?|lies?|holds?|belongs?|reads?|keeps?|makes?|finds?|writes?|returns?|reported"
    r"|refers?|rise|fall|names?|moves?|nests|differ|share|pins|leaves|counts?|hashes|exists?|knows?|runs"
    r"|differs|shares|forbids|pools|launches|supports?|mix|expects?)\b"
)
# A level of a prefix: a few words without a verb, such as an operator, a function, a column or a feature.
LEVEL = re.compile(r"(?:\{[^{}]*\}|[^\s:;,.{}]|\.(?=\S))+(?: (?:\{[^{}]*\}|[^\s:;,{}])+){0,5}: ")
PLACEHOLDER = re.compile(r"\{(?:[^{}]|\{[^{}]*\})*\}")
# Messages of others, and a note in parentheses.
PASSED_ON = re.compile(r"[{}]+(?: \([^()]*\))*")
QUOTED = re.compile(r"'[^' ]*'|\"[^\"]*\"|`[^`]*`")

# The verbs of the reasons why a method is not proven, after its name.
PROOF = re.compile(
    r"apply_emb (?:asserts|calls|changes|compares|iterates|passes|raises|repeats|uses|writes|zips) "
)
REASONS = ("passes/", "nn/packed/fusable.py")  # the files that write reasons of reports

# Files whose messages get their prefix from a caller in Python, and that caller.
PREFIXED_LATER = {
    "python/recfuse/_files.py": "parsing() writes the function and the path",
    "python/recfuse/cli/": "main() writes the command, as argparse does",
    "python/recfuse/data/traces/": "traces.read writes the path",
    "python/recfuse/nn/columns/": "Column.__post_init__ and from_json write the column",
    "python/recfuse/perf/calibration.py": "Calibration.load writes the path",
    "python/recfuse/plan/": "Plan.load writes the path",
    "python/recfuse/torchrec/calibrated_planner.py": "_chosen() writes the planner",
    "python/recfuse/tuner/collection/": "the file is ignored; nothing shows the message",
}
# Messages whose form others define.
EXEMPT = {
    "module 'recfuse' has no attribute {name}": "Python's own text of a module's AttributeError",
}


def split_prefix(text: str) -> tuple[str, str]:
    """The levels of the prefix, and the rest."""
    prefix = ""
    while found := LEVEL.match(text):
        if FACTS.search(PLACEHOLDER.sub("", found[0])) or not text[found.end() :]:
            break
        prefix, text = prefix + found[0], text[found.end() :]
    return prefix, text


def offences(text: str, prefixed: bool = True) -> Iterator[str]:
    """The rules of CONTRIBUTING.md, Errors, that a message breaks."""
    text = PLACEHOLDER.sub("{}", text)
    prefix, rest = split_prefix(text)
    if prefixed and not prefix and not text.startswith("{}"):
        yield "no prefix"
    plain = QUOTED.sub("''", rest)
    if found := BANNED.search(prefix + plain):
        yield f'the word "{found[0]}"'
    fact, *remedies = re.split(r"(?<=[^.])\. (?=[A-Z{`])|\n(?=[A-Z])", plain)
    fact, _, expected = fact.partition("; expected ")
    if ";" in fact + expected:
        yield 'a semicolon that is not followed by "expected"'
    if re.search(r":\s(?!\{\}$)", fact + expected):
        yield "a colon in a sentence"
    if re.match(r"(?:[A-Z](?![A-Z])[a-z]* |An? |The )", fact):
        yield "a capital at the beginning"
    if (
        not fact.startswith("no ")
        and not FACTS.search(fact)
        and not re.fullmatch(r"[{}]+(?: \([^()]*\))*", fact)
    ):
        yield "a fact without a verb"
    for remedy in remedies:
        if not remedy.startswith("{}") and remedy.split()[0] not in REMEDIES.split():
            yield f'a sentence that begins with "{remedy.split()[0]}"'
    if (plain[-1] == ".") != bool(remedies) and not plain.endswith(("...", "{}")):
        yield "a final stop without a remedy, or a remedy without a final stop"


def is_text(text: str) -> bool:
    """Whether a text is more than placeholders, a name or a number."""
    return " " in PLACEHOLDER.sub("", text).strip(" :") and text not in EXEMPT


def python_messages() -> list[Any]:
    paths = sorted((ROOT / "python").rglob("*.py"))
    return [m for path in paths for m in READER["python_messages"](path) if is_text(m.text)]


def c_messages() -> list[Any]:
    paths = sorted((ROOT / "csrc").rglob("*.[ch]"))
    return [m for path in paths for m in READER["c_messages"](path) if is_text(m.text)]


def messages_of_programs() -> list[Any]:
    paths = [path for folder in ("benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
    return [m for path in paths for m in READER["python_messages"](path) if is_text(m.text)]


def reasons() -> list[Any]:
    folder = ROOT / "python" / "recfuse"
    paths = [
        path for path in sorted(folder.rglob("*.py")) if str(path.relative_to(folder)).startswith(REASONS)
    ]
    return [m for path in paths for m in READER["reasons"](path) if is_text(m.text)]


def offences_of_reason(text: str) -> list[str]:
    """A reason has the form of a message without its prefix."""
    return [
        o for o in offences(text, prefixed=False) if o != "a fact without a verb" or not PROOF.match(text)
    ]


def is_prefixed(path: str) -> bool:
    """Whether the message itself names the operator; libtorch's boundary and _C name it for C."""
    return path.startswith("python/") and not path.startswith(tuple(PREFIXED_LATER))


@pytest.mark.parametrize(
    "read, least", [(python_messages, 500), (c_messages, 450), (messages_of_programs, 60)]
)
def test_messages_have_one_form(read, least):
    messages = read()
    assert len(messages) > least
    wrong = [f"{m}\n    {broken}" for m in messages for broken in offences(m.text, is_prefixed(m.path))]
    assert wrong == [], "\n".join(wrong)


def test_reasons_have_one_form():
    found = reasons()
    assert len(found) > 150
    wrong = [f"{reason}\n    {broken}" for reason in found for broken in offences_of_reason(reason.text)]
    assert wrong == [], "\n".join(wrong)


@pytest.mark.parametrize(
    "text, broken",
    [
        ("a weight of float64; must be float32", 'the word "must"'),
        ("its weight is float64; use float32", 'a semicolon that is not followed by "expected"'),
        ("apply_emb table 0", "a fact without a verb"),
        ("weight is float64; expected float32. Cast it", "a final stop without a remedy"),
    ],
)
def test_a_reason_of_another_form(text, broken):
    assert any(found.startswith(broken) for found in offences_of_reason(text))


def test_reasons_are_read(tmp_path):
    (tmp_path / "module.py").write_text(
        'HERE = "weight is pinned"\n'
        "def _why_not(table):\n"
        "    if table.mode:\n"
        '        return f"mode is {table.mode}"\n'
        "    return HERE\n"
        "def find(report, error):\n"
        '    report.add("name", "kind", "left", f"no memory: {error}")\n'
        '    report.add("name", "kind", "fused", "one call")\n'
        '    yield Match([], why_not="an input is written to in place")\n'
        '    raise Refused(f"calls {error}")\n'
    )
    assert {reason.text for reason in READER["reasons"](tmp_path / "module.py", tmp_path)} == {
        "mode is {table.mode}",
        "weight is pinned",
        "no memory: {error}",
        "an input is written to in place",
        "apply_emb calls {error}",
    }


@pytest.mark.parametrize(
    "text",
    [
        'recfuse.embedding_bag: mode is {mode}; expected "sum", "mean" or "max"',
        "recfuse.tune: the collection is on the CPU. Move the collection to a GPU, by collection.cuda().",
        "recfuse.embedding_columns: column {}: no memory for {} steps",
        "{where} is {found}; expected {least} to {most}. Pass {most} at most.",
        "Calibration.load: {path} is not JSON: {error}",
    ],
)
def test_a_message_of_that_form(text):
    assert list(offences(text)) == []


@pytest.mark.parametrize(
    "text, broken",
    [
        ("mode is {mode}; expected a str", "no prefix"),
        ("recfuse.f: mode is {mode}, must be a str", 'the word "must"'),
        ("recfuse.f: rows is {rows}; expected one for each table", 'the word "one"'),
        ("recfuse.f: mode is {mode}; pass a str", 'a semicolon that is not followed by "expected"'),
        ("recfuse.f: mode is {mode}; expected a str; expected a str", "a semicolon that is not"),
        ("recfuse.f: tables are given: pass one table", "a colon in a sentence"),
        ("recfuse.f: The mode is {mode}", "a capital at the beginning"),
        ("recfuse.f: an unknown mode", "a fact without a verb"),
        ("recfuse.f: mode is {mode}. It is unknown.", 'a sentence that begins with "It"'),
        ("recfuse.f: mode is {mode}.", "a final stop without a remedy"),
        ("recfuse.f: mode is {mode}. Pass a str", "a final stop without a remedy, or a remedy without"),
    ],
)
def test_a_message_of_another_form(text, broken):
    assert any(found.startswith(broken) for found in offences(text))


def test_python_is_read(tmp_path):
    (tmp_path / "module.py").write_text(
        'WHERE = "recfuse.f"\n'
        "def f(value, flag):\n"
        '    kind = "a list" if flag else "a dict"\n'
        "    if value:\n"
        '        raise ValueError(f"{WHERE}: value is {value!r}; expected " + kind)\n'
        '    raise wrong_type("recfuse.f: value", value, kind)\n'
    )
    assert {m.text for m in READER["python_messages"](tmp_path / "module.py", tmp_path)} == {
        "recfuse.f: value is {value}; expected a list",
        "recfuse.f: value is {value}; expected a dict",
        "recfuse.f: value is {a_type(value)}; expected a list",
        "recfuse.f: value is {a_type(value)}; expected a dict",
    }


def test_c_is_read(tmp_path):
    (tmp_path / "file.c").write_text(
        '#define F(x) RF_FAIL_IF(x, 1, "a macro")\n'
        '/* RF_FAIL_IF(x, 1, "a comment"); */\n'
        'RF_FAIL_IF(a(b, ")"), RF_ERR_VALUE, "rows is %" PRId64 "; expected "\n  "%s", rows, "1, 2");\n'
        'RF__REFUSE_IF(dim < 0, RF_ERR_VALUE, "dim is " RF__I64, dim);\n'
        'return rf__fail(status, deep ? "a is %5.1f%%" : "b is %zu", a);\n'
    )
    assert [m.text for m in READER["c_messages"](tmp_path / "file.c", tmp_path)] == [
        "rows is {}; expected {}",
        "{operator}: dim is {}",
        "a is {}%",
        "b is {}",
    ]
