"""Both operators in processes of their own, on one GPU: a cache that they share; no harm."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import gpu

pytestmark = gpu.MARKS

ONE_TABLE = """
    import sys
    import torch
    import gpu
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
