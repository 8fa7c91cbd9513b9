"""ikbo_attention's portable path for GPUs, without a GPU: its kernels run on the host.

The test replaces torch's two operators. They check their requirements (types, alignment, sequences), and
write NaN to results that torch leaves undefined.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.c_program import COMPILER, ROOT, make_once
from support.ikbo_attention import reference

CPP_COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
SOURCES = ["tests/c/torch/attention.c"]
FAMILY = "csrc/families/ikbo_attention"
SOURCES += ["csrc/core/status.c", "csrc/families/embedding_columns/tensors/columns_inputs.c"]
SOURCES += [f"csrc/torch/{name}.c" for name in ("call", "arguments", "values", "dispatch")]
SOURCES += [
    f"{FAMILY}/torch/attention_{name}.c" for name in ("arguments", "packed", "packed_inputs", "kernels")
]
SOURCES += [f"{FAMILY}/{name}.c" for name in ("check_ikbo_attention", "common", "packed/packed")]
SOURCES += ["csrc/gpu/launches/launches.c"]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

pytestmark = pytest.mark.skipif(
    COMPILER is None or CPP_COMPILER is None, reason="no C compiler, or no C++ compiler"
)


def build(path: Path) -> None:
    """The library: plain C, and packed.cu once for each vector."""
    folder = Path(torch.__file__).parent / "lib"
    common = ["-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fexceptions", "-fvisibility=hidden"]
    rooms = [f"-I{ROOT / room}" for room in ("tests/c/torch/host", "include", "csrc")]
    objects = []
    for vector in (2, 4, 8, 16):
        objects.append(f"{path}.{vector}.o")
        command = [CPP_COMPILER, "-x", "c++", "-std=c++17", *common, *rooms, f"-DRF_VECTOR={vector}"]
        command += ["-Wno-unknown-pragmas", "-c", "tests/c/torch/kernels.cu", "-o", objects[-1]]
        subprocess.run([str(part) for part in command], cwd=ROOT, check=True)
    command = [
        COMPILER,
        "-std=c11",
        *common,
        "-shared",
        "-pthread",
        "-Wl,-z,nodelete",
        *rooms[1:],
        "-DRF__MOST_SEQUENCES=23",
    ]
    command += [*SOURCES, *objects, "-o", path, f"-L{folder}", f"-Wl,-rpath,{folder}", "-ltorch_cpu", "-lm"]
    subprocess.run([str(part) for part in command], cwd=ROOT, check=True)


def is_readable(tensor: Tensor) -> bool:
    bytes_of = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
    return tensor.stride(-1) == 1 and not any(size % 16 for size in (tensor.data_ptr(), *bytes_of))


def check_sequences(
    starts: Tensor, keys: Tensor, lengths: Tensor, rows: int, most: int, positions: int
) -> None:
    for given in (starts, keys, lengths):
        assert given.dtype == torch.int32 and given.is_contiguous() and given.dim() == 1
    assert len(starts) == len(keys) == len(lengths) + 1 <= 23 + 1
    assert starts[0] >= 0 and starts[-1] <= rows and (starts.diff() >= 0).all()
    assert starts.diff().max() <= most and (lengths >= 0).all()
    assert (keys[:-1] >= 0).all() and (keys[:-1] + lengths <= positions).all()


def sequences(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, keys: Tensor, lengths: Tensor, scale: float):
    """Yields for each its number, rows, output and log-sum-exp; nothing for those without rows."""
    for at in range(len(lengths)):
        rows = slice(int(starts[at]), int(starts[at + 1]))
        there = slice(int(keys[at]), int(keys[at]) + int(lengths[at]))
        if rows.start < rows.stop:
            scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k[there].double()) * scale
            found = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[there].double())
            yield at, rows, int(lengths[at]), found, scores.logsumexp(-1)


def flash(q, k, v, starts, keys, most, most_keys, dropout, causal, debug, *, scale, seqused_k, **rest):
    assert q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype
    assert q.dim() == k.dim() == v.dim() == 3 and q.shape[1:] == k.shape[1:] == v.shape[1:]
    assert q.shape[2] % 8 == 0 and q.shape[2] <= 256 and all(map(is_readable, (q, k, v)))
    assert not (dropout or causal or debug) and not any(given is not None for given in rest.values())
    check_sequences(starts, keys, seqused_k, len(q), most, min(len(k), len(v)))
    assert seqused_k.max() <= most_keys
    out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), torch.nan)
    for _, rows, n_keys, found, sums in sequences(q, k, v, starts, keys, seqused_k, scale):
        out[rows] = found.to(out.dtype) if n_keys else 0
        lse[:, rows] = sums.float() if n_keys else torch.inf
    return out, lse, torch.zeros(2), torch.zeros(()), torch.zeros(0)


def efficient(q, k, v, starts, keys, lengths, most, most_keys, with_lse, scale):
    assert q.dim() == k.dim() == v.dim() == 4 and q.shape[0] == k.shape[0] == v.shape[0] == 1
    assert q.shape[2:] == k.shape[2:] == v.shape[2:] and all(map(is_readable, (q[0], k[0], v[0])))
    check_sequences(starts, keys, lengths, q.shape[1], most, min(k.shape[1], v.shape[1]))
    assert lengths.max() <= most_keys
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    lse = torch.full((len(lengths), q.shape[2], (most + 31) // 32 * 32 * with_lse), torch.nan)
    for at, rows, n_keys, found, sums in sequences(q[0], k[0], v[0], starts, keys, lengths, scale):
        if n_keys:
            out[0, rows] = found.to(out.dtype)
            if with_lse:
                lse[at, :, : rows.stop - rows.start] = sums.float()
    return out, lse, torch.zeros(()), torch.zeros(())


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    torch.ops.load_library(str(make_once(["attention on the host"], ".so", build)))
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash, "CPU")
    other = torch.library.Library("recfuse_efficient", "DEF")
    other.define(
        "attend(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor keys, Tensor lengths, int most, "
        "int most_keys, bool with_lse, float scale) -> (Tensor, Tensor, Tensor, Tensor)"
    )
    other.impl("attend", efficient, "CPU")
    yield torch.ops.recfuse_attention
    library._destroy()
    other._destroy()


def laid_out(tensor: Tensor, may_share: bool = True) -> Tensor:
    """Returns the same elements with some strides and address, with NaN between them; or the first item
    for all."""
    form = random.choice(("plain", "plain", "permuted", "framed", "odd", "every other", "shared"))
    if form == "permuted":
        order = random.sample(range(tensor.dim()), tensor.dim())
        return tensor.permute(order).contiguous().permute([order.index(d) for d in range(tensor.dim())])
    if form == "framed" or form == "odd":
        more = [16 if form == "framed" else random.randint(0, 3) for _ in tensor.shape]
        big = torch.full([size + extra for size, extra in zip(tensor.shape, more, strict=True)], torch.nan)
        places = (
            slice(extra // 2, extra // 2 + size) for size, extra in zip(tensor.shape, more, strict=True)
        )
        view = big.to(tensor.dtype)[tuple(places)]
        return view.copy_(tensor)
    if form == "every other":
        big = torch.full([*tensor.shape[:-1], 2 * tensor.shape[-1]], torch.nan).to(tensor.dtype)
        return big[..., ::2].copy_(tensor)
    if form == "shared" and may_share and tensor.numel() and tensor.shape[0] > 1:
        return tensor[:1].expand(tensor.shape)
    return tensor


def random_users(users: int, positions: int, integers: torch.dtype):
    """Returns arguments about keys; the valid values that they stand for; positions of all, 0: not jagged;
    and whether they are invalid."""
    form, bad = random.randint(0, 2), random.random() < 0.3
    if form == 0:
        return {}, {}, 0, False
    lengths = torch.tensor([random.randint(0, positions) for _ in range(users)], dtype=integers)
    if form == 1:
        given = lengths.clone()
        if bad and users:
            at = random.randrange(users)
            given[at] = random.choice((-3, positions + 7))
            lengths[at] = max(0, min(positions, int(given[at])))
        return {"kv_lengths": given}, {"kv_lengths": lengths}, 0, bad and users > 0
    offsets = torch.cat((torch.tensor([3]), lengths)).cumsum(0).to(integers)
    total = int(offsets[-1]) + 2
    if bad:
        offsets[random.randint(0, users)] = random.choice((-5, 0, total, total + 9))
    wrong = bool((offsets < 0).any() or (offsets > total).any() or (offsets.diff() < 0).any())
    return {"kv_offsets": offsets}, {"kv_offsets": offsets}, total, wrong


def keys_of(user: int, k: Tensor, good: dict[str, Tensor]) -> slice:
    if "kv_offsets" in good:
        first, end = (int(at) for at in good["kv_offsets"][user : user + 2])
        return slice(first, end) if 0 <= first <= end <= len(k) else slice(0, 0)
    return slice(0, int(good["kv_lengths"][user]) if good else k.shape[1])


def expected(q: Tensor, k: Tensor, v: Tensor, users: list[int], good: dict[str, Tensor], scale: float | None):
    """The reference, an item at a time; users of -1 have no keys."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float64)
    for at, user in enumerate(users):
        if user >= 0:
            there = keys_of(user, k, good)
            one, two = (given[there] if "kv_offsets" in good else given[user, there] for given in (k, v))
            tensors = (given[None].double() for given in (q[at], one, two))
            out[at : at + 1], lse[at : at + 1] = reference(*tensors, torch.zeros(1, dtype=torch.int64), scale)
    return out, lse


def run_case(ops: Any) -> None:
    dtype, integers = random.choice(list(TOLERANCE)), random.choice((torch.int32, torch.int64))
    users, candidates = random.choice((0, 1, 2, 3, 7)), random.choice((0, 1, 5, 20, 70))
    queries, own_queries = random.choice((0, 1, 1, 2, 30, 600)), random.choice((0, 1, 3))
    kv_heads, group = random.choice((0, 1, 1, 2, 3)), random.choice((1, 1, 2, 4))
    if queries > 2:
        candidates = min(candidates, 20 if queries == 30 else 5)
    dim, positions = random.choice((0, 1, 7, 8, 8, 16, 40, 264)), random.choice((0, 1, 2, 9))
    scale = random.choice((None, 0.3))
    given, good, total, bad = random_users(users, positions, integers)
    sizes = (total,) if total else (users, positions)
    k, v = (torch.randn(*sizes, kv_heads, dim).to(dtype) for _ in range(2))
    for tensor in (k, v) if k.numel() else ():  # NaN wherever no user has a key
        used = torch.zeros(sizes, dtype=torch.bool)
        for user in range(users):
            used[keys_of(user, k, good) if total else (user, keys_of(user, k, good))] = True
        tensor[~used] = torch.nan
    q = laid_out(torch.randn(candidates, queries, kv_heads * group, dim).to(dtype))
    q_user = laid_out(torch.randn(users, own_queries, kv_heads * group, dim).to(dtype))
    k, v = (laid_out(one, may_share=not good) for one in (k, v))
    map_ = torch.randint(0, max(users, 1), (candidates,), dtype=integers)
    if candidates and (users == 0 or random.random() < 0.3):
        map_[torch.randint(0, candidates, (3,))] = random.choice((-1, users, 1 << 30))
    found_users = [user if 0 <= user < users else -1 for user in map_.tolist()]
    ops.set_capability(random.choice((7, 8)) if dtype == torch.float16 else 8)
    with_lse = random.random() < 0.7
    found = ops.packed(q_user, q, k, v, map_, scale, **given, bounds_check="on" if with_lse else "off")
    want = (*expected(q_user, k, v, list(range(users)), good, scale),
            *expected(q, k, v, found_users, good, scale))  # fmt: skip
    for one, two in zip(found[: 4 if with_lse else 2], (want[0], want[2], want[1], want[3]), strict=False):
        torch.testing.assert_close(one.double(), two, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if (bad or -1 in found_users) and with_lse:
        with pytest.raises(RuntimeError, match=r"argument \d+\[\d+\] is"):
            ops.packed(q_user, q, k, v, map_, scale, **given)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 10))]
)
def test_random_calls(ops: Any, seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    for _ in range(40):
        run_case(ops)
