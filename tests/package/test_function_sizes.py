"""The sizes of functions of Python: lines and parameters."""

from __future__ import annotations

import ast
from pathlib import Path

from support.cases import for_each

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*ROOT.glob("python/recfuse/**/*.py"), *ROOT.glob("benchmarks/**/*.py")])


def name(path: Path) -> str:
    """Return the path of a file in the project."""
    return str(path.relative_to(ROOT))


_LONG = {
    "define_gradients": "registers the functions of an operator, which share its schema",
    "embedding_bag": "is the path of a bag, without calls of functions in between",
    "compare": "is the loop that measures candidates in turns",
}
_MANY_PARAMETERS = {
    "python/recfuse/ops": "operators, their Functions and fakes",
    "python/recfuse/optim/kinds.py": "the options of torch's optimizers",
    "python/recfuse/nn/target_attention.py": "the arguments of a call of the operator",
    "python/recfuse/perf/described.py": "the sizes of a described call",
    "python/recfuse/torchrec/tables.py": "the signature of FBGEMM's module",
    "python/recfuse/tuner/__init__.py": "recfuse.tune",
    "python/recfuse/nn/quantized/bag.py": "the options of torch's EmbeddingBag",
    "python/recfuse/nn/quantized/stored.py": "the arguments of a call of the operator",
    "python/recfuse/distributed": "the parts of a sharded module",
    "python/recfuse/passes/graph/sequences": "the arguments of a call of the operator",
    "python/recfuse/timing.py": "recfuse.timing.compare",
    "python/recfuse/passes/patterns/ikbo_linear.py": "the operands of the operator in a graph",
    "benchmarks/ikbo_attention/triton_peer.py": "kernels of Triton",
    "benchmarks/ikbo_linear/triton_peer.py": "kernels of Triton",
    "benchmarks/common": "the loop of measurements and its plots",
    "benchmarks/drawings/panels.py": "a picture of panels",
}
"""Functions of more than 60 lines, and files or folders of functions with more than seven parameters: why."""


@for_each(FILES, name)
def test_functions_are_short(path: Path) -> None:
    """A function has at most 60 lines without its docstring, and seven parameters."""
    has_reason = any(name(path).startswith(folder) for folder in _MANY_PARAMETERS)
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        begin = function.body[1 if ast.get_docstring(function) and len(function.body) > 1 else 0].lineno
        lines = (function.end_lineno or begin) - begin + 1
        assert lines <= 60 or function.name in _LONG, f"{function.name} has {lines} lines: split it"
        parameters = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
        count = sum(parameter.arg not in ("self", "cls", "ctx") for parameter in parameters)
        assert count <= 7 or has_reason, f"{function.name} has {count} parameters: group them in a dataclass"
