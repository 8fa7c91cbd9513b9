"""Used by setup.py: which objects are current, the machine of the compiler, and the name of its wheels.

A cross-compiler in CC builds for another machine. Python has a variable for that, _PYTHON_HOST_PLATFORM:
it names the folders and wheels of setuptools.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sysconfig
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.modified import newer_group


def is_current(obj: str) -> bool:
    """Is an object file younger than the build's own files and all that its compiler read (see -MMD)?"""
    list_of_read = Path(obj + ".d")  # missing before the first build; a missing file counts as newer
    read = list_of_read.read_text().replace("\\\n", "").split()[1:] if list_of_read.exists() else [obj + ".d"]
    return not newer_group([__file__, "setup.py", *read], obj, missing="newer")


def compiled_for() -> str:
    """Returns the machine of the compiler in CC, or this machine. Must be called before setup()."""
    here = os.uname().machine
    if "CC" not in os.environ:
        return here
    command = [*shlex.split(os.environ["CC"]), "-dumpmachine"]
    machine = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.partition("-")[0]
    if machine != here:
        os.environ["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"
    return machine


def add_headers(folder: str, machine: str) -> list[str]:
    """Returns the folders of headers that a cross-compiler needs besides Python's own.

    Debian's pyconfig.h includes <MACHINE-linux-gnu/pythonX.Y/pyconfig.h>. This machine's file gets that name
    in `folder`: both machines are little-endian with 64-bit pointers, and the limited API needs nothing else.
    """
    if machine == os.uname().machine:
        return []
    link = Path(folder, f"{machine}-linux-gnu")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(Path(sysconfig.get_config_h_filename()).parents[1])
    return [folder]


class Wheel(bdist_wheel):
    """bdist_wheel that names the oldest glibc which has every function that the libraries need (PEP 600)."""

    def get_tag(self) -> tuple[str, str, str]:
        """Returns setuptools' tag, as a manylinux one if the libraries are built and linked with glibc."""
        python, abi, platform = super().get_tag()
        libraries = [path.read_bytes() for path in Path(self.bdist_dir).glob("recfuse/*.so")]
        minors = [int(minor) for text in libraries for minor in re.findall(rb"\0GLIBC_2\.(\d+)", text)]
        sanitized = any(b"libasan.so" in text for text in libraries)
        if minors and not sanitized and platform.startswith("linux_"):
            platform = f"manylinux_2_{max(minors)}{platform.removeprefix('linux')}"
        return python, abi, platform
