"""Builds recfuse/librecfuse.so (operators for torch), recfuse/_C.abi3.so (tools, linked against it) and
recfuse/librecfuse_core.so (the same without csrc/torch, for programs without torch). Needs a C11 compiler,
Python's and NumPy's headers; no torch, no CUDA. CC=aarch64-linux-gnu-gcc builds for that machine. DEBUG=1: no
optimisation, assertions and symbols; SANITIZE=1: address and undefined-behaviour sanitizers.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent))  # which build backends leave out
from build_rules import Wheel, add_headers, compiled_for, is_current

MACHINE = compiled_for()
MODES = [switch for switch in ("DEBUG", "SANITIZE") if os.environ.get(switch)]
CFLAGS = ["-std=c11", "-O3", "-g0", "-Wall", "-Wextra", "-Werror", "-fPIC", "-pthread"]
CFLAGS += ["-fexceptions", "-fvisibility=hidden", "-ffp-contract=off"]
LDFLAGS = ["-pthread", "-Wl,-z,nodelete", "-Wl,--as-needed", "-lm", "-ldl"]
LIBRARY = ["-Wl,--no-undefined", "-Wl,-soname,librecfuse.so", "-Wl,-rpath,$ORIGIN/../torch/lib"]
CORE_LIBRARY = "-Wl,--no-undefined,-soname,librecfuse_core.so"
CFLAGS += ["-O0", "-g", "-UNDEBUG"] if "DEBUG" in MODES else []
if "SANITIZE" in MODES:
    LDFLAGS += ["-fsanitize=address,undefined"]
    CFLAGS += ["-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", LDFLAGS[-1]]
    CFLAGS += ["-fno-wrapv"]  # Python's own flags have -fwrapv, which hides signed overflow
COMMON = {"include_dirs": ["include", "csrc", numpy.get_include()], "extra_compile_args": CFLAGS}
# Instruction sets by file name; such files are empty on other machines. Kernels are selected at run time.
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, *["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]]
ISA_FLAGS = {"_avx2.c": AVX2, "_avx512.c": AVX512} if MACHINE == "x86_64" else {}


def sources(*patterns: str) -> list[str]:
    """Files that match, in an order that does not depend on the file system."""
    return sorted(found for pattern in patterns for found in glob(pattern, recursive=True))


class BuildExt(build_ext):
    """build_ext for plain-C objects, of which one is a Python module."""

    def get_ext_filename(self, fullname: str) -> str:
        """The libraries have no Python tag; the module has abi3's."""
        path = super().get_ext_filename(fullname)
        return path.split(".")[0] + ".so" if "librecfuse" in fullname else path

    def build_extensions(self) -> None:
        """Compiles changed files with their instruction set's flags; links the operators against the stub."""
        self.build_temp = os.path.join(self.build_temp, *MODES)
        self.compiler.include_dirs += add_headers(os.path.join(self.build_temp, "headers"), MACHINE)
        self.force = True  # links again: the last build may have been of another mode
        self.parallel = None  # each extension links against the one before; files are compiled in parallel
        compile_one, compile_all = self.compiler._compile, self.compiler.compile
        pool, jobs = ThreadPoolExecutor(os.cpu_count()), []  # results are awaited below

        def compile_if_changed(obj, src, ext, cc_args, postargs, pp_opts):  # type: ignore[no-untyped-def]
            if not is_current(obj):
                flags = [*postargs, *ISA_FLAGS.get("_" + src.split("_")[-1], []), "-MMD", "-MF", obj + ".d"]
                jobs.append(pool.submit(compile_one, obj, src, ext, cc_args, flags, pp_opts))

        self.compiler._compile = compile_if_changed
        self.compiler.compile = lambda *a, **k: (compile_all(*a, **k), [job.result() for job in jobs])[0]
        # Python's own link flags may carry its folder on the building machine.
        self.compiler.linker_so = [flag for flag in self.compiler.linker_so if "-rpath" not in flag]
        OPERATORS.extra_objects = [self.build_stub()]
        TOOLS.extra_objects = [self.get_ext_fullpath(OPERATORS.name)]
        super().build_extensions()

    def build_stub(self) -> str:
        """Builds a libtorch_cpu.so with only the names of csrc/torch/torch_abi.h; returns its path."""
        path = os.path.join(self.build_temp, "stub", "libtorch_cpu.so")
        source = "csrc/torch/stub/libtorch_cpu.c"
        objects = self.compiler.compile([source], self.build_temp, None, ["csrc"], extra_postargs=["-fPIC"])
        self.compiler.link_shared_object(objects, path, extra_postargs=["-Wl,-soname,libtorch_cpu.so"])
        return path


ROOMS = ("core", "core/threads", "gpu/**", "families/**", "torch")  # without the stub
C_SOURCES = [path for path in sources(*(f"csrc/{room}/*.c" for room in ROOMS)) if "/python/" not in path]
CORE_SOURCES = [path for path in C_SOURCES if "/torch/" not in path]
CORE = Extension("recfuse.librecfuse_core", CORE_SOURCES, extra_link_args=[*LDFLAGS, CORE_LIBRARY], **COMMON)
OPERATORS = Extension("recfuse.librecfuse", C_SOURCES, extra_link_args=[*LDFLAGS, *LIBRARY], **COMMON)
TOOLS = Extension(
    "recfuse._C",
    sources("csrc/python/*.c", "csrc/families/*/python/*.c", "csrc/core/tools/*.c"),
    extra_link_args=[*LDFLAGS, "-Wl,-rpath,$ORIGIN"],
    py_limited_api=True,
    **COMMON,
)

if __name__ == "__main__":
    options = {"bdist_wheel": {"py_limited_api": "cp310"}}
    commands = {"build_ext": BuildExt, "bdist_wheel": Wheel}
    setup(ext_modules=[CORE, OPERATORS, TOOLS], cmdclass=commands, options=options)
