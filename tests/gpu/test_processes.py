"""Both operators in processes of their own, on one GPU: one cache for all, forks, the sanitizers; no harm."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support import gpu

pytestmark = gpu.MARKS

ONE_TABLE = """
    import sys
    import torch
    from support import gpu
    for dim in map(int, sys.argv[1:]):
        gpu.run_and_check(gpu.Case(dim=dim, mode="max"))
    print("fine")
"""
FUSED = """
    import sys
    import torch
    import recfuse
    torch.manual_seed(1)
    collection = recfuse.nn.FusedEmbeddingBagCollection([(9, int(dim)) for dim in sys.argv[1:]])
    count = len(sys.argv) - 1
    given = torch.randint(0, 9, (count * 40,)), torch.arange(0, count * 40 + 1, 4)
    want = collection(*given)
    got = collection.to("cuda")(*(one.cuda() for one in given))
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)
    print("fine")
"""


@pytest.mark.parametrize(("script", "kernels"), ((ONE_TABLE, 3), (FUSED, None)), ids=("one table", "fused"))
def test_four_processes_with_one_empty_cache(tmp_path: Path, script: str, kernels: int | None) -> None:
    call = {"environment": {"RECFUSE_CACHE_DIR": str(tmp_path)}, "timeout": 200}
    with ThreadPoolExecutor(4) as pool:
        children = [pool.submit(gpu.run_alone, script, "12", "44", "60", **call) for _ in range(4)]
    assert [child.result() for child in children] == ["fine\n"] * 4
    names = [path.name for path in tmp_path.rglob("*")]
    assert kernels in (None, len([name for name in names if name.endswith(".cubin")]))
    assert not [name for name in names if "tmp" in name]


FORBIDDEN = """
    import torch
    import recfuse
    table, zeros = torch.ones(5, 12, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
    collection = recfuse.nn.FusedEmbeddingBagCollection([(9, 4), (9, 8)], device="cuda")
    try:
        {}
    except NotImplementedError as error:
        print(error)
    recfuse.check()
"""


@pytest.mark.parametrize(
    ("call", "parts"),
    (
        ('recfuse.embedding_bag(zeros, table, zeros[:2], mode="sum")',
         ("rf_embedding_bag", "recfuse compile --arch")),
        ('collection(zeros, torch.arange(5, device="cuda"))', ("fused_embedding_bag",)),
    ),
    ids=("one table", "fused"),
)  # fmt: skip
def test_compiling_can_be_forbidden(tmp_path: Path, call: str, parts: tuple[str, ...]) -> None:
    environment = {"RECFUSE_CACHE_DIR": str(tmp_path), "RECFUSE_JIT": "off"}
    found = gpu.run_alone(FORBIDDEN.format(call), environment=environment)
    for part in (*parts, gpu.arch(), str(tmp_path), "RECFUSE_JIT=off"):
        assert part in found
    assert list(tmp_path.rglob("*.cubin")) == []


FORK = textwrap.dedent("""
    import os, pickle, select
    import torch
    import recfuse

    def use():
        table = torch.ones(10, 8, device="cuda")
        indices, offsets = torch.arange(10, device="cuda"), torch.tensor([0, 4], device="cuda")
        found = recfuse.embedding_bag(indices, table, offsets, mode="sum")[:, 0].tolist()
        recfuse.check()
        return found, (indices, table, offsets)

    def in_child(body):
        read, write = map(os.fdopen, os.pipe(), ("rb", "wb"))
        child = os.fork()
        if child == 0:
            try:
                found = body()
            except BaseException as error:
                found = f"{type(error).__name__}: {error}".splitlines()[0]
            try:
                pickle.dump(found, write)
                write.flush()
            finally:
                os._exit(0)
        write.close()
        if not select.select([read], [], [], 60)[0]:
            os.kill(child, 9)
            raise TimeoutError("the child hangs")
        return pickle.load(read), os.waitpid(child, 0)[1]
""")


def test_a_fork_before_cuda_is_used() -> None:
    """Both sides use the GPU afterwards."""
    script = """
        recfuse.embedding_bag(torch.arange(4), torch.ones(5, 3), torch.tensor([0, 2]))
        print(*in_child(lambda: use()[0]))
        print(use()[0])
    """
    assert gpu.run_alone(FORK + textwrap.dedent(script)) == "[4.0, 6.0] 0\n[4.0, 6.0]\n"


def test_a_fork_after_cuda_was_used() -> None:
    """The child gets an error, and the parent continues."""
    script = """
        given = use()[1]
        collection = recfuse.nn.FusedEmbeddingBagCollection([(9, 4), (9, 8)], device="cuda")
        features = torch.arange(8, device="cuda"), torch.arange(9, device="cuda")
        want = collection(*features)
        print(*in_child(lambda: torch.ops.recfuse.check(0)))
        print(*in_child(lambda: recfuse.embedding_bag(*given, mode="sum")))
        print(*in_child(lambda: collection(*features)))
        print(use()[0], torch.equal(collection(*features), want))
    """
    *children, parent = gpu.run_alone(FORK + textwrap.dedent(script)).splitlines()
    assert len(children) == 3 and "fork" in children[0]
    assert all("Error" in child and child.endswith(" 0") for child in children)
    assert parent == "[4.0, 6.0] True"


def test_a_loaders_process_maps_without_a_gpu() -> None:
    """A forked process, as of torch's DataLoader: its mappings are pinned here."""
    script = """
        collection = recfuse.nn.FusedEmbeddingBagCollection([(9, 4), (9, 8)], device="cuda")
        given = torch.arange(8) % 9, torch.arange(9)
        moved = [one.cuda() for one in given]
        want = collection(*moved)
        mapping = in_child(lambda: collection.map(given[1]))[0].pin_memory()
        assert mapping.tensor.is_pinned()
        assert torch.equal(collection(*moved, mapping=mapping), want)
        print("fine")
    """
    assert gpu.run_alone(FORK + textwrap.dedent(script)) == "fine\n"


EXIT = """
    import torch
    import recfuse
    table = torch.ones(5, 12, device="cuda", requires_grad=True)
    users = torch.ones(2, 3, 9, 2, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    picked = torch.tensor([0, 1, 1], device="cuda")
    out = recfuse.ikbo_attention(users[0], users[0], users[1], picked).float().sum()
    (out + recfuse.embedding_bag(picked, table, picked[:1] * 0).sum()).backward()
    {}
"""
ENDS = ("", "raise SystemExit(0)", "import gc; del table, users, out; gc.collect()")


@pytest.mark.parametrize("end", ENDS, ids=("end of the script", "SystemExit", "tensors are released first"))
def test_an_exit_right_after_a_backward_pass_is_clean(end: str) -> None:
    with ThreadPoolExecutor(16) as pool:  # more processes than cores: autograd's threads are often preempted
        children = [pool.submit(gpu.run_alone, EXIT.format(end)) for _ in range(32)]
    assert [child.result() for child in children] == [""] * 32


def _sanitizer(kernels: str) -> tuple[list[str], bool]:
    """Returns the command, and whether it is restricted to kernels whose names contain this; the option
    for that has had several names."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("no compute-sanitizer on PATH")
    options = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=60).stdout
    for option in ("--kernel-regex", "--kernel-name", "--filter"):
        if option in options and "kns" in options:
            return [program, option, f"kns={kernels}"], True
    return [program], False


# The tool ends with an internal error if it skips torch's kernels.
NEEDS_ALL_KERNELS = ("racecheck", "ikbo_sanitizer.py")
# torch's attention of float32, whose kernels have hazards, has names that end in "rf_sm80".
OURS = {("racecheck", "ikbo_attention_sanitizer.py"): "rf_ikbo"}
SANITIZED = "sanitizer.py", "fused_sanitizer.py", "ikbo_sanitizer.py", "ikbo_attention_sanitizer.py"


@pytest.mark.parametrize("script", SANITIZED)
@pytest.mark.parametrize("tool", ("memcheck", "racecheck", "initcheck"))
def test_the_sanitizer_finds_nothing(tool: str, script: str) -> None:
    command, ours_alone = _sanitizer(OURS.get((tool, script), "rf_"))
    if tool == "initcheck" and not ours_alone:
        pytest.skip("this compute-sanitizer cannot leave torch's own kernels out")
    if (tool, script) == NEEDS_ALL_KERNELS:
        command = command[:1]
    path = str(gpu.ROOT / "tests" / "gpu" / script)
    done = subprocess.run(
        [*command, "--tool", tool, "--error-exitcode", "9", sys.executable, path, tool],
        capture_output=True, text=True, timeout=500,
        env=gpu.child_environment({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[:6000] + done.stderr[-4000:]
