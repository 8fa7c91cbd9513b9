"""The habits of this code that a machine can hold: layers, names, allocation, documents, exported symbols.

This is one file because all rules read the same lists of files.
"""

from __future__ import annotations

import graphlib
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import recfuse
from support.cases import for_each

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "include" / "recfuse.h"
PUBLIC = sorted(ROOT.glob("include/**/*.h"))
API = "\n".join(path.read_text() for path in PUBLIC)
C_FILES = sorted([*ROOT.glob("include/**/*.h"), *ROOT.glob("csrc/**/*.[ch]")])
KERNEL_FILES = sorted(ROOT.glob("csrc/**/*.cu*"))
PYTHON_FILES = sorted(
    path for room in ("python", "tests", "benchmarks", "examples") for path in ROOT.glob(f"{room}/**/*.py")
)
ROOMS = (".ci", "include", "csrc", "python", "tests", "benchmarks", "docs", "examples")
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
CPP_COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
NM = shutil.which("nm")

# Which rooms the files of a room may include: include <- core <- driver <- jit <- tune <- launches <- family
# <- torch, python. A room is a folder of csrc, csrc/gpu or csrc/families. Files of a family in a folder
# torch or python belong to the room of that name.
# The list of families is a room of its own.
LIST = "families.h"
BELOW = {"include", "core", "device", LIST}  # device: here the headers that host C and kernels both read
FAMILIES = {path.name for path in (ROOT / "csrc" / "families").iterdir() if path.is_dir()}
# Other families that a family uses: the CPU's pooling kernels are in the folder of the fused bag.
USES = {
    "embedding_bag": {"fused_embedding_bag"},
    "fused_backward": {"fused_embedding_bag"},
    "fused_embedding": {"fused_embedding_bag"},
    "fused_embedding_bag": {"fused_backward"},
    "ikbo_linear": {"fused_embedding_bag"},
    "embedding_columns": {"fused_embedding_bag"},
}
MAY_INCLUDE = {
    "include": {"include"},
    LIST: {LIST},
    "core": {"include", "core", "device"},
    "device": {"include", "device", LIST},
    "tools": BELOW | {"tools"},
    "driver": BELOW | {"driver"},
    "jit": BELOW | {"driver", "jit"},
    "tune": BELOW | {"driver", "jit", "tune"},
    "launches": BELOW | {"driver", "jit", "tune", "launches"},
    **{
        family: BELOW | {"driver", "jit", "tune", "launches", family} | USES.get(family, set())
        for family in FAMILIES
    },
    "torch": BELOW | {"driver", "launches", "torch"} | FAMILIES,
    "python": BELOW | {"tools", "driver", "jit", "tune", "launches", "python"} | FAMILIES,
}

# A library returns a status, keeps no hidden state and writes no unbounded string.
FORBIDDEN_CALL = re.compile(
    r"""\b( exit | _exit | _Exit | abort | assert | system | setenv | putenv | rand | srand | strtok
          | v?f?printf | puts | fputs | putchar | perror
          | v?sprintf | strcpy | strcat | gets | alloca )\s*\(""",
    re.VERBOSE,
)
INCLUDE = re.compile(r'^#\s*include\s*([<"])([^>"]+)', re.MULTILINE)
ALLOCATION = re.compile(r"\b(?:malloc|calloc|realloc|aligned_alloc|posix_memalign|strdup|strndup)\s*\(")
FUNCTION = re.compile(r"(?!static\b|typedef\b|extern\b)[\w\s*]+?\b(\w+)\(")
VARIABLE = re.compile(r"((?:static|_Atomic)\b[^(){}]*?(\w+))\s*(?:\[[^\]]*\]\s*)*(?:=|;)")
PYTHON_TABLE = re.compile(r"\bPy(?:MethodDef|ModuleDef|ModuleDef_Slot|Type_Slot|Type_Spec|MemberDef)\b")
GUARD = re.compile(r"/\*.*\b(?:once|lock\w*|atomic\w*|thread|mutex)\b", re.DOTALL | re.IGNORECASE)
LEFTOVER = re.compile(
    r"\b(?:TO"
    r"DO|FIX"
    r"ME|XX"
    r"X|HA"
    r"CK)\b"  # in halves, or this file would be found
    r"|/(?:home|root|work|Users|mnt)/\w"
)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code_of(path: Path) -> str:
    """C source with comments, strings and characters blanked; lines keep their numbers."""

    def blank(match: re.Match[str]) -> str:
        text = match.group()
        return '""' if text[0] in "\"'" else re.sub(r"[^\n]", " ", text)

    pattern = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    return re.sub(pattern, blank, path.read_text(), flags=re.DOTALL)


def room_of(path: Path) -> str:
    rooms = path.relative_to(ROOT).parts[:-1]
    if rooms[0] == "include":
        return "include"
    if path.name == LIST or path.name.endswith("_family.h"):
        return LIST
    if binding := {"torch", "python"} & set(rooms):
        return binding.pop()
    if rooms[1] == "core" and rooms[2:3] == ("tools",):
        return "tools"
    return rooms[2] if rooms[1] in ("gpu", "families") else rooms[1]


def project_files() -> Iterator[Path]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path
    yield from (path for path in sorted(ROOT.iterdir()) if path.is_file() and path.name != ".git")


def text_files() -> Iterator[tuple[Path, str]]:
    for path in project_files():
        if path.suffix in {".c", ".h", ".cu", ".cuh", ".py", ".md", ".toml", ".ipynb", ""}:
            yield path, path.read_text()


def test_there_are_files_to_lint() -> None:
    assert len(C_FILES) > 5 and len(PYTHON_FILES) > 5


def test_no_cpp_files() -> None:
    cpp = {".cc", ".cpp", ".cxx", ".hpp", ".hh", ".hxx"}
    found = {name(path) for path in project_files() if path.suffix in cpp}
    assert found <= {"examples/serving/serve.cpp"}  # user code: libtorch's interface is C++


@for_each(C_FILES, name)
def test_libraries_neither_print_nor_exit(path: Path) -> None:
    assert FORBIDDEN_CALL.findall(code_of(path)) == [], (
        "a library returns a status instead (csrc/core/status.h)"
    )


@for_each(C_FILES, name)
def test_includes_point_one_way(path: Path) -> None:
    room = room_of(path)
    for bracket, included in INCLUDE.findall(path.read_text()):
        if bracket == "<":
            owner = included.split("/")[0].lower()
            assert owner not in {"torch", "aten", "c10"}, f"{included}: declare it in csrc/torch/torch_abi.h"
            assert not owner.startswith(("cuda", "nvrtc")), (
                f"{included}: declare it in csrc/gpu/driver/cuda_abi.h"
            )
            assert owner not in {"python.h", "numpy"} or room == "python", f"{included} in {room}"
            continue
        places = [
            path.parent / included,
            ROOT / "include" / included,
            ROOT / "csrc" / included,
        ]
        found = next((place.resolve() for place in places if place.exists()), None)
        assert found is not None, f"{included} is not in the project"
        assert room_of(found) in MAY_INCLUDE[room], f"{room} may not include {name(found)}"


def test_only_the_room_of_launches_launches_kernels() -> None:
    """Families lower calls; csrc/gpu/launches finds kernels and launches them."""
    call = re.compile(r"\b(rf__launch|rf__jit_kernel|cuLaunchKernelEx)\(")
    rooms = ("csrc/gpu/driver/", "csrc/gpu/jit/", "csrc/gpu/launches/")
    found = [name(path) for path in C_FILES if call.search(code_of(path))]
    assert [path for path in found if not path.startswith(rooms)] == []
    assert "csrc/gpu/launches/run.c" in found


CORE_ROOMS = ("csrc/core/", "csrc/gpu/", "csrc/torch/", "csrc/python/")


def test_kernels_are_compiled_ahead_by_their_launches() -> None:
    """A family lowers its calls and has no function that compiles; `_C.kernel_compile` takes any kernel."""
    compiles = re.compile(r"\b\w+_compile\b")
    rooms = ("csrc/families/", "include/")
    found = {name(path): compiles.findall(code_of(path)) for path in C_FILES if name(path).startswith(rooms)}
    stub = (ROOT / "python" / "recfuse" / "_C.pyi").read_text()
    assert {path: names for path, names in found.items() if names} == {} and len(found) > 100
    assert re.findall(r"def (\w+_compile)\b", stub) == ["kernel_compile"]


def test_the_core_names_no_family() -> None:
    """The core knows families by csrc/families.h, which includes a header of each."""
    names = re.compile("|".join(sorted({*FAMILIES, "ikbo"})))
    core = [path for path in (*C_FILES, *KERNEL_FILES) if name(path).startswith(CORE_ROOMS)]
    assert len(core) > 100
    assert {name(path) for path in core if names.search(path.read_text())} == set()
    listed = INCLUDE.findall((ROOT / "csrc" / LIST).read_text())
    assert {path for _, path in listed} == {f"families/{family}/{family}_family.h" for family in FAMILIES}


def test_file_names_are_unique() -> None:
    """A name finds one file of csrc."""
    names = Counter(path.name for path in (*C_FILES, *KERNEL_FILES) if path.is_relative_to(ROOT / "csrc"))
    assert [file for file, count in names.items() if count > 1] == []


# Headers of two families, from the lowest to the top: a file includes only headers that come before it.
# A header's functions are in the file of its name, or in those that `DECLARED` names.
ORDER = {
    "fused_embedding_bag": (
        *("feature_rows.h", "fused_args.h", "partition/fused_map_args.h", "features.h", "staged/staged.h"),
        *("schedule/fused_schedule.h", "fused_kernel.h", "partition/traffic.h", "partition/cost.h"),
        *("partition/partition.h", "partition/cut.h", "partition/map_lower.h"),
        *("fused_lower.h", "feature_table.h", "fused_prepare.h", "fused.h"),
    ),
    "fused_backward": (
        *("backward_args.h", "small/backward_small_args.h", "bags/backward_bags_args.h"),
        *("backward.h", "small/small.h", "general/general.h", "lowering.h"),
    ),
}
DECLARED = {
    "fused_embedding_bag": {
        **dict.fromkeys(("fused_embedding_bag.c", "fused_measure.c"), "fused.h"),
        **{"geometry.c": "features.h", "schedule/describe.c": "schedule/fused_schedule.h"},
        **{f"partition/{file}.c": "partition/cut.h" for file in ("cost", "cut", "write", "check")},
    },
    "fused_backward": {
        **{f"{file}.c": "backward.h" for file in ("problem", "segments", "backward_kernel")},
        **{"bags/backward_bags.c": "backward.h", "general/layout.c": "general/general.h"},
        **{f"{file}.c": "lowering.h" for file in ("entry", "backward")},
        **{f"small/{file}.c": "small/small.h" for file in ("small_launch", "small_tasks")},
    },
}


@pytest.mark.parametrize("family", sorted(ORDER))
def test_files_of_a_family_include_downwards(family: str) -> None:
    folder = ROOT / "csrc" / "families" / family
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.glob("**/*.[ch]"))}
    files = {
        file: path
        for file, path in files.items()
        if not re.search(r"\b(cpu|torch|python|device)/|check_|check/|_family\.h$", file)
    }
    assert {file for file in files if file.endswith(".h")} == set(ORDER[family])
    for file, path in files.items():
        place = ORDER[family].index(DECLARED[family].get(file, file.replace(".c", ".h")))
        allowed = ORDER[family][: place + file.endswith(".c")]
        for _, included in INCLUDE.findall(path.read_text()):
            _, of_family, header = included.partition(f"families/{family}/")
            is_leaf = header.startswith("device/") or "check_" in header  # below all others
            assert not of_family or is_leaf or header in allowed, f"{file} includes {header}"


# Files that know the bytes of an element: for rows on the host, and in kernels.
ELEMENTS = ("csrc/core/row_format.h", "csrc/gpu/device/codes.h", "csrc/gpu/device/element.cuh")
BYTES_BY_HAND = (
    r"\bRF_(?:B?FLOAT)\d+\s*\?\s*\d",  # dtype == RF_FLOAT32 ? 4 : 2
    r"\brf_?_elements?_bytes\((?:[^()]|\([^()]*\))*\)\s*\*",  # bytes of an element times a count
    r"\*\s*(?:\(\w+\)\s*)*rf_?_elements?_bytes\(",
    r"(?:dim|dims|columns|stride|pitch)\)*\s*\*\s*(?:\(\w+\)\s*)?sizeof\s*\((?:float|double|\w+_t|rf_\w+)\)",
    r"\bsizeof\s*\((?:float|double)\)\s*\*\s*[\w.>-]*(?:dim|dims|columns|stride|pitch)\b",
)


def test_bytes_of_rows_come_from_their_format() -> None:
    by_hand = re.compile("|".join(BYTES_BY_HAND))
    found = {path: by_hand.findall(code_of(path)) for path in (*C_FILES, *KERNEL_FILES)}
    assert [name(path) for path, hits in found.items() if hits and name(path) not in ELEMENTS] == []
    examples = (
        "bytes = params->dim * (int64_t)sizeof(float)",
        "rows * rf__elements_bytes(dtype, 1)",
        "rf__elements_bytes(dtype, (int64_t)1) * dim",
        "dtype == RF_FLOAT32 ? 4 : 2",
        "(size_t)(bags * output_dim) * sizeof(float)",
    )
    assert all(by_hand.search(example) for example in examples)
    assert not by_hand.search("rf__elements_bytes(params->dtype, rows * params->dim)")


@for_each(C_FILES, name)
def test_allocations_are_checked(path: Path) -> None:
    code = code_of(path)
    for call in ALLOCATION.finditer(code):
        line = code.count("\n", 0, call.start()) + 1
        assigned = re.search(r"([\w.>\[\]-]+)\s*=\s*(?:\([^()]*\)\s*)?$", code[: call.start()])
        assert assigned, f"{name(path)}:{line}: keep the result in a variable and check it"
        kept = re.escape(assigned.group(1))
        after = code[call.end() : call.end() + 600]
        checked = re.search(rf"!\s*{kept}\b|{kept}\s*[!=]=\s*NULL|\bif\s*\(\s*{kept}\s*[)&]", after)
        assert checked, f"{name(path)}:{line}: {assigned.group(1)} is used without a check for NULL"


def definitions(path: Path) -> Iterator[tuple[int, str]]:
    """File-scope declarations and definitions that are not preprocessor lines, with their line numbers."""
    lines = code_of(path).split("\n")
    continued = False
    for number, line in enumerate(lines, 1):
        skip = continued or line.startswith("#")
        continued = skip and line.endswith("\\")
        if not skip and re.match(r"[A-Za-z_]", line):
            yield number, line


def test_no_circle_of_calls() -> None:
    """Files of C have an order: no file calls a function of a file that calls it, directly or indirectly."""
    sources = [path for path in C_FILES if path.suffix == ".c" and room_of(path) != "torch/stub"]
    owner = {
        function[1]: path
        for path in sources
        for _, line in definitions(path)
        if (function := FUNCTION.match(line)) and not line.rstrip().endswith(";")
    }
    graph = {
        path: {owner[word] for word in re.findall(r"\brf__?\w+", code_of(path)) if word in owner} - {path}
        for path in sources
    }
    assert sum(map(len, graph.values())) > len(sources)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(map(name, error.args[1])))


@for_each([path for path in C_FILES if path.suffix == ".c" and room_of(path) != "torch/stub"], name)
def test_external_functions_are_named_rf(path: Path) -> None:
    """The stub defines libtorch's names."""
    for number, line in definitions(path):
        function = FUNCTION.match(line)
        is_macro = function and function.group(1).isupper()
        if function and not is_macro and not line.rstrip().endswith(";"):
            assert function.group(1).startswith(("rf_", "PyInit_")), (
                f"{name(path)}:{number}: {function.group(1)} is neither static nor rf_ / rf__"
            )


@for_each(C_FILES, name)
def test_global_state_has_a_comment_on_its_guard(path: Path) -> None:
    source = path.read_text().split("\n")
    for number, line in definitions(path):
        variable = VARIABLE.match(line)
        if not variable or "_Thread_local" in line or PYTHON_TABLE.search(line):
            continue
        constant = re.search(r"\bconst\b[^*]*$", variable.group(1))
        guarded = GUARD.search("\n".join(source[max(0, number - 4) : number]))
        assert constant or guarded, f"{name(path)}:{number}: say in a comment what guards {variable.group(2)}"


@for_each([*C_FILES, *KERNEL_FILES, *PYTHON_FILES, ROOT / "setup.py"], name)
def test_long_files_say_why(path: Path) -> None:
    most = 500 if path.relative_to(ROOT).parts[0] in ("tests", "benchmarks") else 400
    lines = path.read_text().count("\n")
    head = "\n".join(path.read_text().split("\n")[:30])
    assert lines <= most or "one file because" in head, f"{lines} lines: split, or say why on top"
    assert path.name != "setup.py" or lines < 100


# Files of csrc above 300 lines, and functions above 60 lines or with more than seven parameters.
LONG_FILES = {
    "csrc/families/fused_backward/small/lists.cuh": "one list: its layout, its positions and its bags",
    "csrc/families/fused_embedding/fused_embedding_cpu.c": "checks, copies and gradient of one layout",
    "csrc/families/fused_embedding_bag/cpu/pool.c": "one loop: blocks of a worker and its prefetches",
}
LONG_FUNCTIONS = {
    "rf_backward_keys": "functions for its two loops change the machine code",
    "steps_sum": "a function for its second pass changes the machine code",
    "rf_ikbo_attention_group": "passes of one block, which share its registers",
}
MANY_PARAMETERS = {
    "sum_bags": "a struct changes the registers of the loop",
    "rf_column_report": "a call, whose arguments are in registers",
    "rf_epilogue_store": "a struct changes the machine code of rounded steps",
    "rf_hash_strings_cpu": "public",
    "sum_chunk": "constants of an inlined loop",
    "sum_rows_from": "constants of an inlined loop",
    "rf_copy_box": "the operands of one instruction",
}


def functions_of(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yields name, number of parameters and number of lines of each function that is defined in a file."""
    code = re.sub(
        r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", lambda part: "\n" * part[0].count("\n"), code_of(path), flags=re.M
    )
    code = re.sub(r"\b__(?:launch_bounds|attribute|align)__\((?:[^()]|\([^()]*\))*\)", "", code)
    for match in re.finditer(
        r"^[A-Za-z_][^;{}=]*?\b(\w+)\(((?:[^()]|\([^()]*\))*)\)[^;{}()=]*\{", code, re.M
    ):
        end = code.find("\n}", match.end())
        yield match[1], match[2].count(",") + 1, code.count("\n", match.start(), end) + 2


def test_files_and_functions_of_csrc_are_short() -> None:
    files = [path for path in (*C_FILES, *KERNEL_FILES) if path.is_relative_to(ROOT / "csrc")]
    functions = [function for path in files for function in functions_of(path)]
    assert len(functions) > 1500
    assert {name(path) for path in files if path.read_text().count("\n") > 300} <= {*LONG_FILES}
    assert {function for function, _, lines in functions if lines > 60} <= {*LONG_FUNCTIONS}
    assert {function for function, count, _ in functions if count > 7} <= {*MANY_PARAMETERS}


def test_folders_are_small() -> None:
    """Results of benchmarks are one folder a GPU, as many as were measured; docs has a page a topic."""
    folders = Counter(path.parent for path in project_files() if "results" not in path.parts)
    most = {ROOT / "docs": 25}
    assert {name(folder): files for folder, files in folders.items() if files > most.get(folder, 20)} == {}


def test_no_fixture_has_the_name_of_pytest_benchmark_s() -> None:
    """Where that plugin is installed, it ends the session at a fixture `benchmark` of another type."""
    texts = {path: path.read_text() for path in ROOT.glob("tests/**/*.py")}
    assert [name(path) for path, text in texts.items() if re.search(r"^def benchmark\(", text, re.M)] == []


def test_no_leftovers_and_no_machine_paths() -> None:
    found = [
        f"{name(path)}:{number}: {line.strip()[:80]}"
        for path, text in text_files()
        for number, line in enumerate(text.split("\n"), 1)
        if LEFTOVER.search(line)
    ]
    assert found == []


def public_functions() -> list[str]:
    return re.findall(r"^RF_API [\w\s*]*?\b(\w+)\(", API, flags=re.MULTILINE)


def test_public_prototypes_are_documented() -> None:
    lines = API.split("\n")
    prototypes = [at for at, line in enumerate(lines) if line.startswith("RF_API ")]
    assert len(prototypes) == len(public_functions()) > 5
    bare = [lines[at] for at in prototypes if not lines[at - 1].rstrip().endswith("*/")]
    assert bare == []


def test_public_pointers_say_their_shape() -> None:
    fields = re.findall(r"^    (?!.*\(\*)[\w ]+\*\w+;.*$", API, flags=re.MULTILINE)
    assert len(fields) > 5
    assert [field for field in fields if not re.search(r"/\* .*\[", field)] == []


# Headers of csrc/python need Python's; files included once per vector width are not headers.
ALONE = [
    path
    for path in C_FILES
    if path.suffix == ".h" and room_of(path) != "python" and "#ifndef" in path.read_text()
]


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("path", ALONE, ids=name)
def test_headers_stand_alone(path: Path) -> None:
    assert COMPILER is not None
    standards = ["c99", "c11"] if path in PUBLIC else ["c11"]
    for standard in standards:
        compile_alone([COMPILER, "-x", "c", f"-std={standard}"], path)


@pytest.mark.skipif(CPP_COMPILER is None, reason="no C++ compiler")
def test_public_header_is_usable_from_cpp() -> None:
    assert CPP_COMPILER is not None
    compile_alone([CPP_COMPILER, "-x", "c++", "-std=c++11"], HEADER)


def compile_alone(command: list[str], path: Path) -> None:
    flags = [
        "-pedantic",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fsyntax-only",
        f"-I{ROOT}/include",
        f"-I{ROOT}/csrc",
    ]
    source = f'#include "{path}"\nstatic const int used = 0;\nint main(void) {{ return used; }}\n'
    done = subprocess.run([*command, *flags, "-"], input=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(NM is None, reason="no nm (binutils)")
@pytest.mark.parametrize("library", ("librecfuse.so", "librecfuse_core.so"))
def test_the_library_exports_the_public_names_alone(library: str) -> None:
    assert NM is not None
    path = Path(recfuse.__file__).with_name(library)
    done = subprocess.run([NM, "-D", "--defined-only", path], capture_output=True, text=True, check=True)
    exported = {line.split()[-1].split("@")[0] for line in done.stdout.splitlines()}
    of_torch = set(shared_functions("tensors.h"))
    expected = set(public_functions()) | set(shared_functions())
    assert exported == expected - (of_torch if "core" in library else set())


def shared_functions(of: str = "") -> list[str]:
    """Returns the internal functions of the library that recfuse._C calls, declared in headers with this
    suffix."""
    headers = [path.read_text() for path in C_FILES if path.suffix == ".h" and name(path).endswith(of)]
    return [
        found for text in headers for found in re.findall(r"^RF__SHARED [\w ]+?\*?(rf__\w+)\(", text, re.M)
    ]


@pytest.mark.skipif(NM is None, reason="no nm (binutils)")
def test_the_library_exports_no_more_internal_names_than_the_module_needs() -> None:
    assert NM is not None
    module = Path(recfuse.__file__).with_name("_C.abi3.so")
    done = subprocess.run([NM, "-D", "--undefined-only", module], capture_output=True, text=True, check=True)
    assert set(re.findall(r"\brf__\w+", done.stdout)) == set(shared_functions())


def test_switches_are_few_and_in_the_readme() -> None:
    sources = [*C_FILES, *ROOT.glob("python/**/*.py")]
    used = {word for path in sources for word in re.findall(r"[\"'](RECFUSE_[A-Z_]+)[\"']", path.read_text())}
    readme = (ROOT / "README.md").read_text()
    listed = set(re.findall(r"^\| `(RECFUSE_[A-Z_]+)` \|", readme, flags=re.MULTILINE))
    assert used == listed
    assert 0 < len(listed) <= 10


def test_documents_name_files_that_exist() -> None:
    pages = [name(page) for page in sorted((ROOT / "docs").glob("*.md"))]
    for document in ("README.md", "CONTRIBUTING.md", *pages):
        text = (ROOT / document).read_text()
        paths = re.findall(rf"`((?:{'|'.join(map(re.escape, ROOMS))})/[\w./-]*)`", text)
        links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
        assert paths or links
        named = [path for path in [*paths, *links] if not re.search(r"[/_]X[./]", path)]  # X: any operator
        folders = (ROOT, (ROOT / document).parent)  # of names and of links
        missing = [path for path in named if not any((folder / path).exists() for folder in folders)]
        assert missing == [], document


def test_versions_agree() -> None:
    version = re.search(r'#define RECFUSE_VERSION "([^"]+)"', HEADER.read_text())
    assert version is not None
    project = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    changes = re.search(r"^## \[?(\d[^\] ]*)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert project is not None and changes is not None
    assert recfuse.__version__ == version.group(1) == project.group(1) == changes.group(1)
