"""Fresh Python processes in milliseconds: forks of a server that has imported torch and nothing of recfuse.

`command()` stands for the interpreter in command lines: `-c CODE`, `-m MODULE` or a script follows it, then
arguments. It is a small client, to which the process belongs: the process has its standard files, folder,
environment and umask, gets SIGINT and SIGTERM through it, and the client ends as it. The server has read
LD_LIBRARY_PATH, PYTHONHASHSEED and the numbers of threads. Tests for which these matter, or that look at how
torch is imported, start an interpreter.

A process ends without the interpreter's finalization, which takes longer than all else, unless
FRESH_FINALIZES is set in its environment.
"""

from __future__ import annotations

import array
import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from typing import Any

STREAMS = {0: ("stdin", "r"), 1: ("stdout", "w"), 2: ("stderr", "w")}


def run_python(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """As subprocess.run of a Python with its output captured."""
    given = {"capture_output": True, "text": True, "timeout": 300, **options}
    return subprocess.run([*command(), *map(str, arguments)], **given)


_command: list[str] = []


def command() -> list[str]:
    """Returns the command that replaces the interpreter; the first call starts the server of this process."""
    if not _command:
        path = os.path.join(tempfile.mkdtemp(dir=os.environ.get("RECFUSE_TEST_SESSION")), "server")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        server = subprocess.Popen(
            [sys.executable, __file__, "serve", path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
        )  # fmt: skip
        assert server.stdout is not None and server.stdout.readline() == b"listening\n"
        atexit.register(server.communicate)  # it ends with its input
        _command.extend([sys.executable, "-I", "-S", __file__, "run", path])
    return _command


# ---- the client


def _run(path: str, arguments: list[str]) -> None:
    opened = []
    for number in STREAMS:
        try:
            os.fstat(number)
            opened.append(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the number, which no socket may have
    umask = os.umask(0)
    os.umask(umask)
    request = {"arguments": arguments, "environment": dict(os.environ), "opened": opened, "umask": umask}
    own = socket.socket(socket.AF_UNIX)
    own.connect(path)
    files = [*opened, os.open(".", os.O_RDONLY)]
    text = json.dumps(request).encode(errors="surrogateescape")
    rights = array.array("i", files)
    own.sendmsg([len(text).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    own.sendall(text)
    numbers = {signal.SIGINT, signal.SIGTERM}
    process = int.from_bytes(own.recv(8), "little")
    for number in numbers:
        signal.signal(number, lambda number, _: os.kill(process, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    status = int.from_bytes(own.recv(8), "little")
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


# ---- the server


def _serve(path: str) -> list[str]:
    """Returns in each requested process, with its arguments."""
    import numpy  # noqa: F401
    import torch  # noqa: F401

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    print("listening", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:  # its end
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _begin(connection)
        connection.close()


def _begin(connection: socket.socket) -> list[str]:
    """Forks the process, in which it returns; the other process waits for it, or kills it if the client
    ends."""
    head, rights, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(4 * 4))
    files = array.array("i")
    files.frombytes(rights[0][2])
    size, text = int.from_bytes(head, "little"), b""
    while len(text) < size:
        text += connection.recv(size - len(text))
    request = json.loads(text.decode(errors="surrogateescape"))
    process = os.fork()
    if process == 0:
        connection.close()
        _become(request, list(files))
        return request["arguments"]
    connection.sendall(process.to_bytes(8, "little"))
    ended = os.pidfd_open(process)
    ready, _, _ = select.select([connection, ended], [], [])
    if ended not in ready:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    try:
        connection.sendall(status.to_bytes(8, "little"))
    finally:
        os._exit(0)


def _become(request: dict[str, Any], files: list[int]) -> None:
    import io

    folder = files.pop()
    os.fchdir(folder)
    os.close(folder)
    os.umask(request["umask"])
    for number, (name, mode) in STREAMS.items():
        if number not in request["opened"]:
            os.close(number)
            setattr(sys, name, None)
            continue
        given = files.pop(0)
        os.dup2(given, number)
        os.close(given)
        raw = open(number, f"{mode}b", 0, closefd=False)  # noqa: SIM115 (for the whole process)
        direct = mode == "w" and bool(request["environment"].get("PYTHONUNBUFFERED"))
        buffered: Any = io.BufferedReader(raw) if mode == "r" else raw if direct else io.BufferedWriter(raw)
        stream = io.TextIOWrapper(
            buffered, encoding="utf-8", errors="backslashreplace" if number == 2 else "surrogateescape",
            line_buffering=number == 2 or os.isatty(number), write_through=direct,
        )  # fmt: skip
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [path for path in paths if path]  # its first is the folder of this file


def _main(arguments: list[str]) -> None:
    import threading

    if os.environ.get("FRESH_FINALIZES"):
        _execute(*arguments)
        return
    status: Any = 0
    try:
        _execute(*arguments)
    except SystemExit as end:
        status = end.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        status = 120  # as the interpreter
    os._exit(status or 0)


def _execute(kind: str, *rest: Any) -> None:
    import runpy
    import types

    if kind == "-c":
        code, *rest = rest  # type: ignore[assignment]
        sys.argv, sys.path[:0] = ["-c", *rest], [""]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv, sys.path[:0] = list(rest), [os.getcwd()]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = [kind, *rest], [os.path.dirname(os.path.abspath(kind))]
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "run":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})  # until they can be sent on
        _run(sys.argv[2], sys.argv[3:])
    else:
        _main(_serve(sys.argv[2]))
