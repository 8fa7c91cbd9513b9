"""Memory of large sparse gradients on the CPU, which later gradients reuse (csrc/core/buffer_cache.c)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import recfuse

DIM = 64
LARGE = (32 << 20) // (DIM * 4) + 1000  # rows of a gradient whose memory is cached
SMAPS = Path("/proc/self/smaps_rollup")


def gradient(rows: int, scale: float = 1.0) -> torch.Tensor:
    """That of a bag a row: row r of the values is `scale` * r."""
    bag = recfuse.nn.FusedEmbeddingBagCollection([(rows, DIM)], sparse=True)
    output = bag(torch.arange(rows).flip(0), torch.arange(rows + 1))
    output.backward((torch.arange(rows).flip(0) * scale)[:, None].expand(-1, DIM).contiguous())
    (weight,) = bag.parameters()
    found = weight.grad
    assert isinstance(found, torch.Tensor) and found.is_sparse and found.is_coalesced()
    return found


def holds(found: torch.Tensor, rows: int, scale: float = 1.0) -> bool:
    """Returns true if it equals `gradient`."""
    return bool((found.values() == (torch.arange(rows) * scale)[:, None]).all())


@pytest.fixture(autouse=True)
def few_blocks() -> Iterator[None]:
    """Others' blocks are not in the way: as many of this size as are kept take their places."""
    blocks = [gradient(LARGE) for _ in range(4)]
    del blocks
    yield


@pytest.mark.parametrize("more", (0, 100, -100))
def test_the_next_gradient_takes_the_memory(more):
    first = gradient(LARGE)
    places = {first.values().data_ptr()}
    del first
    for step in range(3):
        found = gradient(LARGE + more * step, step + 1.0)
        assert holds(found, LARGE + more * step, step + 1.0)
        places.add(found.values().data_ptr())
        del found
    assert len(places) == 1


@pytest.mark.long
def test_gradients_that_live_keep_their_memory():
    living = [gradient(LARGE, scale) for scale in range(6)]
    assert len({found.values().data_ptr() for found in living}) == 6
    view = living[3].values()[5:]
    del living[1::2]
    again = [gradient(LARGE, -1.0 - scale) for scale in range(3)]
    assert all(holds(found, LARGE, 2.0 * number) for number, found in enumerate(living))
    assert all(holds(found, LARGE, -1.0 - number) for number, found in enumerate(again))
    assert bool((view == (torch.arange(5, LARGE) * 3.0)[:, None]).all())


def test_a_much_larger_gradient_has_its_own():
    small = gradient(LARGE)
    place = small.values().data_ptr()
    del small
    large = gradient(3 * LARGE)
    assert holds(large, 3 * LARGE)
    assert large.values().data_ptr() != place


@pytest.mark.long
def test_threads_reuse_gradient_memory_concurrently():
    wrong = []

    def work(number: int) -> None:
        for step in range(6):
            scale = float(10 * number + step)
            found = gradient(LARGE, scale)
            if not holds(found, LARGE, scale):
                wrong.append(scale)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))  # raises their exceptions
    assert wrong == []


def lazily_free() -> int:
    """Bytes that the system may take back."""
    found = re.search(r"LazyFree: +(\d+) kB", SMAPS.read_text()) if SMAPS.exists() else None
    if found is None:
        pytest.skip("this system does not say what it may take back")
    return int(found[1]) << 10


def test_the_system_may_take_kept_memory_back():
    before = lazily_free()
    found = gradient(LARGE)  # in cached memory
    taken = lazily_free()
    del found
    assert taken < before - (24 << 20)
    assert lazily_free() > before - (8 << 20)


def test_a_gradient_may_be_moved_to_shared_memory():
    found = gradient(LARGE)
    values = found.values()
    values.share_memory_()
    assert values.is_shared() and holds(found, LARGE)
