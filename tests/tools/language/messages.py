"""Reads all messages of errors and warnings, and reasons of reports, from the sources of Python and C.

A placeholder of an f-string or of printf is ``{...}`` in a text. Names that a function or a module binds to
texts are replaced by them, so that the parts of a message are read together.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.language.words import C_TOKEN

ROOT = Path(__file__).resolve().parents[3]
_MOST_FORMS = 64

# The position of the format in the arguments of C's functions and macros that fail.
C_CALLS = {
    "rf__fail": 1,
    "RF_FAIL_IF": 2,
    "RF__REFUSE_IF": 2,
    "RF__REFUSE_COLUMN_IF": 2,
    "REFUSE_STEP_IF": 1,
    "RF__PY_REFUSE_IF": 2,
    "PyErr_Format": 1,
    "PyErr_SetString": 1,
    "rf__tensor_refuse": 2,
}
# The text that such a macro or function writes before its format.
C_BEFORE = {
    "RF__REFUSE_IF": "{operator}: ",
    "RF__REFUSE_COLUMN_IF": "{operator}: column {}: ",
    "REFUSE_STEP_IF": "{operator}: column {}: step {}: ",
    "rf__tensor_refuse": "{argument} is {dtype}; expected ",
}


# Helpers of modules that write a part before the text of an argument, by its position.
_HELPERS = {
    "_value_error": ("{where}: ", 0),
    "_type_error": ("{where}: ", 0),
    "_fail": ("{where}: ", 0),
    "_fail_type": ("{where}: ", 0),
    "fail": ("{where}: ", 0),
    "_refuse": ("{where}: ", 0),
    "self._refuse": ("{where}: ", 0),
    "refuse": ("{where} ", 1),
    "_Wrong": ("{where} ", 0),
    "error_msgs.append": ("", 0),
    "parser.error": ("", 0),
    "argparse.ArgumentTypeError": ("", 0),
    "torch._check": ("", 1),
    "torch._assert_async": ("", 1),
}


class Message(NamedTuple):
    """A text as the sources have it, and the place of its call."""

    path: str
    line: int
    text: str
    call: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


class _Scopes(ast.NodeVisitor):
    """Finds calls that make messages, with the texts that names have where they are."""

    def __init__(self, path: str, tree: ast.Module) -> None:
        self._path = path
        self._bound: list[dict[str, list[ast.expr]]] = [_bindings(tree)]
        self.found: list[Message] = []
        self.visit(tree)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Reads a function with its own names."""
        self._bound.append(_bindings(node))
        self.generic_visit(node)
        self._bound.pop()

    def visit_Call(self, node: ast.Call) -> None:
        """Reads the text of an exception, a warning or a helper."""
        self.generic_visit(node)
        name = ast.unparse(node.func)
        form = _form(name, node)
        if form is None:
            return
        for text in dict.fromkeys("".join(part) for part in self._product(form)):
            self.found.append(Message(self._path, node.lineno, text, name))

    def _product(self, parts: list[str | ast.expr], seen: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        forms = [[part] if isinstance(part, str) else self._forms(part, seen) for part in parts]
        return itertools.islice(itertools.product(*forms), _MOST_FORMS)

    def _forms(self, node: ast.expr, seen: tuple[str, ...] = ()) -> list[str]:
        """All texts that an expression may have, as far as the source tells them."""
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if isinstance(node, ast.JoinedStr):
            return ["".join(parts) for parts in self._product(list(node.values), seen)]
        if isinstance(node, ast.FormattedValue) and node.conversion == -1:
            return (
                self._forms(node.value, seen)
                if isinstance(node.value, (ast.Name, ast.IfExp))
                else _opaque(node)
            )
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return ["".join(parts) for parts in self._product([node.left, node.right], seen)]
        if isinstance(node, ast.IfExp):
            return self._forms(node.body, seen) + self._forms(node.orelse, seen)
        if isinstance(node, ast.Lambda):
            return self._forms(node.body, seen)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "with_old_compiler":  # adds a remedy
            return self._forms(node.args[0], seen)
        if isinstance(node, ast.Name) and node.id not in seen:
            bound = next((names[node.id] for names in reversed(self._bound) if node.id in names), [])
            texts = [text for value in bound for text in self._forms(value, (*seen, node.id))]
            return texts if texts and len(bound) == len([v for v in bound if _is_text(v)]) else _opaque(node)
        return _opaque(node)


def _opaque(node: ast.expr) -> list[str]:
    return [f"{{{ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node)}}}"]


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.IfExp):
        return _is_text(node.body) and _is_text(node.orelse)
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _bindings(scope: ast.Module | ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """The values that a scope's own assignments give to names; inner functions and classes have theirs."""
    found: dict[str, list[ast.expr]] = {}
    if isinstance(scope, ast.FunctionDef):
        found = {
            argument.arg: [ast.Name("...")]
            for argument in ast.walk(scope.args)
            if isinstance(argument, ast.arg)
        }
    pending: list[ast.AST] = list(scope.body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)
                else:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            found.setdefault(name.id, []).append(ast.Name("..."))
        if isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.NamedExpr)) and isinstance(
            node.target, ast.Name
        ):
            value = getattr(node, "value", None)
            found.setdefault(node.target.id, []).append(
                value if isinstance(node, ast.AnnAssign) and value else ast.Name("...")
            )
        pending.extend(ast.iter_child_nodes(node))
    return found


def _form(name: str, node: ast.Call) -> list[str | ast.expr] | None:
    """The text of a call as constants and expressions; None: it makes no message."""
    last = name.rpartition(".")[2]
    if not node.args or isinstance(node.args[0], ast.Starred):
        return None
    if last == "wrong_type" and len(node.args) == 3:
        return [node.args[0], " is {a_type(value)}; expected ", node.args[2]]
    if name == "fail" and len(node.args) == 2:  # of benchmarks: the parser, then the text
        return [node.args[1]]
    if name in _HELPERS and len(node.args) > _HELPERS[name][1]:
        before, at = _HELPERS[name]
        return [before, node.args[at]]
    if last in ("integer", "real") and _is_text(node.args[0]):
        return [node.args[0], " is {value}; expected {least} to {most}"]
    if (
        re.fullmatch(r"[A-Z]\w*(Error|Warning)|Exit|SystemExit", last)
        or name == "warnings.warn"
        or name in ("type(error)", "kind")
    ):
        return [node.args[0]]
    return None


def python_messages(path: Path, root: Path = ROOT) -> list[Message]:
    """The messages of a file of Python."""
    return _Scopes(str(path.relative_to(root)), ast.parse(path.read_text())).found


class _Reasons(_Scopes):
    """Finds the reasons of reports: results of functions named `why_not`, arguments `why_not`, details of
    entries that are left, and texts of Refused, which continue "apply_emb"."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Reads the results of a function whose name says that it returns a reason."""
        super().visit_FunctionDef(node)
        if re.search(r"why_not|gradient_hooks|_shared_memory|_changes", node.name):
            before = "apply_emb " if node.name == "_changes" else ""
            self._bound.append(_bindings(node))
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    self._note(inner, [before, inner.value])
            self._bound.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        """Reads the values of the name `why_not`, and of the name `reason`."""
        self.generic_visit(node)
        if isinstance(node.targets[0], ast.Name) and node.targets[0].id in ("why_not", "reason"):
            self._note(node, [node.value])

    def visit_Call(self, node: ast.Call) -> None:
        """Reads the argument of a call that is a reason."""
        ast.NodeVisitor.generic_visit(self, node)
        name = ast.unparse(node.func)
        words = {word.arg: word.value for word in node.keywords}
        is_left = len(node.args) > 3 and ast.unparse(node.args[2]) == "'left'"
        if name == "Refused" and node.args:
            self._note(node, ["apply_emb ", node.args[0]])
        elif name.endswith("report.add") and is_left:
            self._note(node, [node.args[3]])
        elif name.endswith(".leave"):
            self._note(node, [node.args[0]])
        elif "why_not" in words:
            self._note(node, [words["why_not"]])

    def _note(self, node: ast.AST, form: list[str | ast.expr]) -> None:
        for text in dict.fromkeys("".join(part) for part in self._product(form)):
            self.found.append(Message(self._path, getattr(node, "lineno", 0), text, "reason"))


def reasons(path: Path, root: Path = ROOT) -> list[Message]:
    """The reasons of reports in a file of Python. A reason of Refused is read where it is raised, not where
    it is passed on."""
    found = _Reasons(str(path.relative_to(root)), ast.parse(path.read_text())).found
    passed_on = re.compile(r"(?<=^apply_emb )\{(?:self|refused)\}(?: \(.*\)$)?")
    return [message._replace(text=passed_on.sub("is refused", message.text)) for message in found]


def _blank(match: re.Match[str]) -> str:
    return (
        match[0] if match[0].startswith('"') or match[0].startswith("'") else re.sub(r"[^\n]", " ", match[0])
    )


def without_comments(text: str) -> str:
    """C without comments and definitions of macros, with all positions kept."""
    text = C_TOKEN.sub(_blank, text)
    return re.sub(r"^#\s*define\b(?:[^\n]*\\\n)*[^\n]*", _blank, text, flags=re.MULTILINE)


_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|[()\[\]{},]|[^"\'()\[\]{},]+')


def c_arguments(text: str, start: int) -> list[tuple[int, str]]:
    """The arguments, with their positions, of the call whose parenthesis opens before `start`."""
    depth, begin, found = 0, start, []
    for token in _TOKEN.finditer(text, start):
        if token[0] in ("(", "[", "{"):
            depth += 1
        elif depth and token[0] in (")", "]", "}"):
            depth -= 1
        elif depth == 0 and token[0] in (",", ")"):
            found.append((begin, text[begin : token.start()]))
            begin = token.end()
            if token[0] == ")":
                break
    return found


# A run of literals and of macros that stand for conversions, such as "%" PRId64 " rows".
C_TEXT = re.compile(
    r'(?:\b(?:PRI[a-z]\d+|RF__I64)\s*)*"(?:\\.|[^"\\\n])*"(?:\s*(?:"(?:\\.|[^"\\\n])*"|PRI[a-z]\d+|RF__I64))*'
)

_CONVERSION = r"%[-+ #0-9.*]*(?:\x01|(?:hh|h|ll|l|z|j)?[diuoxXeEfgGscpSRUA])"


def c_text(run: str) -> str:
    """The text of a run, with {...} for each conversion."""
    parts = re.findall(r'"((?:\\.|[^"\\\n])*)"|(RF__I64)|(PRI)', run)
    text = "".join("{}" if whole else "\x01" if macro else literal for literal, whole, macro in parts)
    text = text.replace('\\"', '"').replace("\\n", "\n").replace("%%", "\0")
    return re.sub(_CONVERSION, "{}", text).replace("\0", "%")


def c_messages(path: Path, root: Path = ROOT) -> list[Message]:
    """The messages of a file of C; macros that write a prefix add it."""
    text = without_comments(path.read_text())
    found = []
    for call in re.finditer(rf"\b({'|'.join(C_CALLS)})\(", text):
        arguments = c_arguments(text, call.end())
        at = C_CALLS[call[1]]
        if len(arguments) <= at:
            continue  # its definition or declaration
        if arguments[at][1].strip() == '"%s"' and at + 1 < len(arguments):
            at += 1
        line = text.count("\n", 0, call.start()) + 1
        for run in C_TEXT.findall(arguments[at][1]):
            whole = C_BEFORE.get(call[1], "") + c_text(run)
            found.append(Message(str(path.relative_to(root)), line, whole, call[1]))
    return found
