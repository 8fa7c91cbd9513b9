"""`recfuse info`: versions, CPU, GPU and CUDA libraries."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "info",
        help="print versions, the CPU, the GPU and CUDA libraries",
        description="Prints versions, the CPU, the GPU, the kernel cache and the CUDA libraries. For a "
        "missing library it prints the folders that were searched.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def _rows(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Convert the record of `info.collect()` to (name, value) lines for a reader."""
    from recfuse.info import describe_cache

    cuda = record["cuda"]
    isa = f"{record['isa']} in use; this CPU has {', '.join(record['isa_available'])}"
    if record["isa_ignored"]:
        isa += f"; {record['isa_ignored']}"
    rows = [
        ("recfuse", record["recfuse"]),
        ("library", f"{record['library']}, {record['library_path']}"),
        ("torch", f"{record['torch']} (CUDA {cuda['torch_cuda'] or 'not in this build'})"),
        ("numpy", record["numpy"]),
        ("fbgemm", record["fbgemm"] or "not installed (only benchmarks use it)"),
        ("python", f"{record['python']}, {sys.executable}"),
        ("platform", record["platform"]),
        ("CPU", f"{record['cpu']}, {record['cores']} cores"),
        ("last-level cache", f"{record['last_level_cache_bytes'] / 2**20:.0f} MiB"),
        ("instruction set", isa),
        ("threads", str(record["threads"])),
        ("huge pages", record["huge_pages"]),
        ("commit", record["commit"] or "unknown (not a git checkout)"),
        ("GPU", ", ".join(cuda["gpus"]) or "none found"),
    ]
    for name, where in cuda["libraries"].items():
        version = f"{where['version']}, " if where.get("version") else ""
        path = where["found"] and f"{version}{where['found']}"
        rows.append((name, path or "missing; looked in\n" + "\n".join(where["looked_in"])))
    cache = cuda["kernel_cache"]
    text = describe_cache(cache)
    if cache["folder"] and not cache["refused"]:
        text = f"{cache['entries']} kernels, {cache['bytes'] / 2**20:.1f} MiB in {text}"
        if cache["ignored"]:
            text += f"; {cache['ignored']} ignored, which others may have written"
    rows.append(("kernel cache", text))
    compiling = "allowed" if cache["allowed"] else "forbidden by RECFUSE_JIT=off"
    rows.append(("compiling kernels", compiling))
    missing = ", ".join(cuda["missing"])
    rows.append(("kernels", f"CPU; for CUDA this machine lacks {missing}" if missing else "CPU and CUDA"))
    return rows


def _print_unwrapped(rows: list[tuple[str, str]]) -> None:
    """Print to a file or a pipe, such as a bug report or grep: never folds a line, whatever its length."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        for number, line in enumerate(value.split("\n")):
            print(f"{'' if number else name:<{width}} {line}".rstrip())


def run(arguments: argparse.Namespace) -> int:
    """Print versions, devices and libraries."""
    from recfuse import info

    record = info.collect()
    if arguments.json:
        print(json.dumps(record, indent=2))
        return 0
    if not sys.stdout.isatty():
        _print_unwrapped(_rows(record))
        return 0
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(record):
        table.add_row(name, value)
    Console(highlight=False, markup=False).print(table)
    return 0
