"""The command `recfuse`: `info`, `tune`, `compile`, `explain`, `predict` and `place`."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

_ERRORS = OSError, ValueError, TypeError, IndexError, MemoryError, NotImplementedError, RuntimeError


def _parser() -> argparse.ArgumentParser:
    from recfuse._library import VERSION
    from recfuse.cli import compile, explain, info, place, predict, tune

    parser = argparse.ArgumentParser(
        prog="recfuse", description="Embedding operators for recommendation models."
    )
    parser.add_argument("--version", action="version", version=f"recfuse {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (info, tune, compile, explain, predict, place):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the arguments of the process); returns the exit status.

    An error ends the process with status 2 and a line of text, an interrupt with 130. If the reader of the
    output has gone away, the status is 141, as a shell reports SIGPIPE.
    """
    command = "recfuse"
    if sys.stderr is None:  # closed; print() would otherwise write to standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, "standard output is closed")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a path may contain bytes that are not text
        try:
            arguments = _parser().parse_args(argv)
            command += f" {arguments.command}"
            return int(arguments.run(arguments))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _end(141, "")
    except _ERRORS as error:
        _end(2, f"{command}: error: {str(error).removeprefix(f'{command}: ')}\n")
    except KeyboardInterrupt:
        _end(130, f"{command}: interrupted\n")


def _end(status: int, text: str) -> NoReturn:
    """End the process with a message, even if standard output fails."""
    sys.stderr.write(text)
    sys.stderr.flush()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:  # the interpreter would flush again, and print a traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if any(thread.name.startswith("recfuse-compile") for thread in threading.enumerate()):
        os._exit(status)  # the compilation of a kernel cannot be stopped, and takes up to half a minute
    raise SystemExit(status)
