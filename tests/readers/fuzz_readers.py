"""Mutates files of every form that recfuse reads, and reads them.

    PYTHONPATH=python python tests/readers/fuzz_readers.py --minutes 10

A file must be read, or be refused by a FileFormatError that names it, in 2 s of processor time and twice the
memory that its reader states. Cases follow from the seed and their number, so `--first N --cases 1` repeats
case N. Files that fail stay in the folder of `--keep`.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of tests.support

from recfuse.errors import FileFormatError
from support.fuzz import corpus, mutations

MOST_SECONDS = 2.0  # of processor time, per case
PATIENCE_S = 120  # without a word from the process that reads
CASES_A_PROCESS = 2000
_MESSAGE = 3000  # characters, at most


def run_case(form: corpus.Form, data: bytes, folder: Path) -> str:
    """Reads a file; returns "read" or "refused". Raises for any other outcome."""
    path = folder / form.name
    path.write_bytes(data)
    try:
        form.read(path)
    except FileFormatError as error:
        text = str(error)
        if str(path) not in text:
            raise AssertionError(f"the error does not name the file: {text[:300]}") from error
        if len(text) > _MESSAGE:
            raise AssertionError(f"the error has {len(text)} characters") from error
        return "refused"
    return "read"


def address_space() -> int:
    """Bytes of the process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def run_process(seed: int, numbers: range, folder: Path, forms: list[corpus.Form], out: int) -> None:
    """Runs cases in this process; writes a line for each to `out`, and its files to the folder."""

    def too_long(*_: object) -> None:
        os.write(out, b"failed took more than %g s\n" % MOST_SECONDS)
        os._exit(1)

    signal.signal(signal.SIGPROF, too_long)
    trim = ctypes.CDLL(None).malloc_trim
    for number in numbers:
        case = random.Random(f"{seed} {number}")
        form = forms[number % len(forms)]
        data = mutations.mutated(case, form, forms)
        os.write(out, b"begins %d %s\n" % (number, form.name.encode()))
        trim(0)
        base, begun = address_space(), time.process_time()
        resource.setrlimit(resource.RLIMIT_AS, (base + 2 * form.bound, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        try:
            result = run_case(form, data, folder)
        except BaseException:
            signal.setitimer(signal.ITIMER_PROF, 0)
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            os.write(out, b"failed " + traceback.format_exc().replace("\n", "\\n").encode()[:3500] + b"\n")
            os._exit(1)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        os.write(out, b"%s %.4f\n" % (result.encode(), time.process_time() - begun))
    os._exit(0)


def lines_of(pid: int, source: int) -> collections.abc.Iterator[str]:
    """Yields the lines of a process, which is killed when it is silent for long."""
    rest = b""
    while True:
        if not select.select([source], [], [], PATIENCE_S)[0]:
            os.kill(pid, signal.SIGKILL)
            yield f"failed said nothing for {PATIENCE_S} s"
            return
        chunk = os.read(source, 1 << 16)
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)


def main(argv: list[str] | None = None) -> int:
    """Prints the findings; returns 1 if a case failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument(
        "--cases", type=int, default=1 << 60, help="at most (default: as many as there is time)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--keep", type=Path, default=Path("fuzz_failures"), help="folder of files that fail")
    arguments = parser.parse_args(argv)

    warnings.simplefilter("ignore")
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="recfuse_fuzz_", dir=shm if shm.is_dir() else None))
    forms = corpus.forms(folder)
    end, number, failed = time.monotonic() + 60 * arguments.minutes, arguments.first, 0
    last = arguments.first + arguments.cases
    results: collections.Counter[str] = collections.Counter()
    slowest: dict[str, tuple[float, int]] = {}
    while number < last and time.monotonic() < end:
        source, out = os.pipe()
        numbers = range(number, min(number + CASES_A_PROCESS, last))
        if (pid := os.fork()) == 0:
            os.close(source)
            run_process(arguments.seed, numbers, folder, forms, out)
        os.close(out)
        name = word = ""
        for line in lines_of(pid, source):
            word, _, rest = line.partition(" ")
            if word == "begins":
                number, name = int(rest.split()[0]), rest.split()[1]
            elif word == "failed":
                failed += 1
                results[f"{name} failed"] += 1
                keep(arguments.keep, number, name, folder, rest)
            else:
                results[f"{name} {word}"] += 1
                slowest[name] = max(slowest.get(name, (0.0, 0)), (float(rest), number))
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                break
        os.close(source)
        _, status = os.waitpid(pid, 0)
        if status and word != "failed" and time.monotonic() <= end:  # a crash, or a fault of this script
            failed += 1
            results[f"{name} failed"] += 1
            keep(arguments.keep, number, name, folder, f"ended with status {status}")
        number += 1
    shutil.rmtree(folder)
    for result, count in sorted(results.items()):
        print(f"{result}: {count:,}")
    for name, (seconds, case) in sorted(slowest.items()):
        print(f"{name}: {seconds:.3f} s at most, case {case}")
    print(f"{sum(results.values()):,} cases from {arguments.first}, seed {arguments.seed}: {failed} failed")
    return 1 if failed else 0


def keep(where: Path, number: int, name: str, folder: Path, why: str) -> None:
    """Copies a file that failed, and prints the reason."""
    where.mkdir(parents=True, exist_ok=True)
    target = where / f"{number}-{name}"
    if (folder / name).exists():
        shutil.copy(folder / name, target)
    why = why.replace("\\n", "\n")
    target.with_name(f"{target.name}.why").write_text(why)
    print(f"case {number}, {target}: {why.strip().splitlines()[-1]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
