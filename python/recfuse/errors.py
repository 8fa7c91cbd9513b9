"""Exceptions of recfuse, and their creation from errors of the C library.

torch's own ``embedding_bag`` raises ``RuntimeError`` for errors that have a more exact class in Python. Each
class here derives from both, so that code for torch's class and code for the exact class work.
"""

from __future__ import annotations

import re
from typing import NoReturn

import torch


def a_type(value: object) -> str:
    """Return the name of a value's type with its article, for messages."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def refuse_scripting(module: object) -> NoReturn:
    """Raise NotImplementedError with a reason; torch.jit.script would fail at some line of the class."""
    raise NotImplementedError(
        f"recfuse: {a_type(module)} cannot be scripted. Call recfuse.unswap(model), which restores the "
        "modules that swap has replaced, or use torch.jit.trace, torch.export or torch.compile."
    )


class ArgumentValueError(ValueError, RuntimeError):
    """An argument has a value that the operator does not allow."""


class FileFormatError(ArgumentValueError):
    """A file is damaged or has another format; names the file and the position in it."""


class ArgumentTypeError(TypeError, RuntimeError):
    """An argument has a type or dtype that the operator does not allow."""


class NotATensorError(TypeError, AttributeError):
    """An argument that must be a tensor has another type (torch raises AttributeError)."""


class IndexRangeError(IndexError, RuntimeError):
    """An index lies outside its table."""


class OffsetError(IndexError, ValueError, RuntimeError):
    """An offset does not begin a bag: it falls, or lies outside of the lookups."""


class AllocationError(MemoryError, torch.OutOfMemoryError):
    """Out of memory, on the host or on a GPU."""


class NoDeviceError(NotImplementedError):
    """There is no GPU, or no driver for it."""


class CudaError(RuntimeError):
    """The CUDA driver reported a failure of this call, or of earlier work on this GPU."""


class CompileError(RuntimeError):
    """A GPU kernel does not compile; the text is the compiler's."""


class InternalError(RuntimeError):
    """A bug of recfuse, or files of the package are missing."""


# By the names in the C library; csrc/python uses them, too.
BY_NAME: dict[str, type[Exception]] = {
    "ValueError": ArgumentValueError,
    "TypeError": ArgumentTypeError,
    "IndexError": IndexRangeError,
    "OffsetError": OffsetError,
    "MemoryError": AllocationError,
    "NotImplementedError": NotImplementedError,
    "InternalError": InternalError,
    "NoDeviceError": NoDeviceError,
    "CudaError": CudaError,
    "CompileError": CompileError,
}

# The C library writes "<name of the Python exception>: recfuse.<operator>: <detail>".
_FROM_C = re.compile(r"(\w+Error): (recfuse\..*)", re.DOTALL)
# The dispatcher's own error for an argument of the wrong Python type.
_FROM_DISPATCHER = re.compile(r"recfuse::(\w+)\(\) (Expected a value of type .*)", re.DOTALL)
_PRIVATE = re.compile(r"^_(\w+?)(?:_rows|_with_winners)?$")
"""The operators that training calls; errors name the functions that users call."""
# The library cannot choose the exception's class, and torch may add a native stack below the text.
_NATIVE_TRACE = re.compile(r"\n+(?:Exception raised from|C\+\+ CapturedTraceback).*", re.DOTALL)


def translate(error: RuntimeError) -> Exception:
    """Return the exception of recfuse for ``error``, which an operator of recfuse has raised.

    Returns ``error`` itself if it does not come from recfuse.
    """
    text = _NATIVE_TRACE.sub("", str(error))
    if match := _FROM_C.match(text):
        kind = BY_NAME.get(match[1])
        return kind(match[2]) if kind else error
    if match := _FROM_DISPATCHER.match(text):
        name = _PRIVATE.sub(r"\1", match[1])
        return ArgumentTypeError(f"recfuse.{name}: {match[2].split(chr(10))[0]}")
    return error
