"""The command `recfuse`: `info`, `tune` and `compile`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

_ERRORS = OSError, ValueError, TypeError, IndexError, MemoryError, NotImplementedError, RuntimeError


def _parser() -> argparse.ArgumentParser:
    from recfuse._library import VERSION
    from recfuse.cli import compile, info, tune

    parser = argparse.ArgumentParser(
        prog="recfuse", description="Embedding operators for recommendation models."
    )
    parser.add_argument("--version", action="version", version=f"recfuse {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (info, tune, compile):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own); returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except _ERRORS as error:
        parser.exit(2, f"recfuse {arguments.command}: error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"recfuse {arguments.command}: interrupted\n")
