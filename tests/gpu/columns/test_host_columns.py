"""Rows of frozen tables on the host, looked up by CPU threads for which only a GPU's stream waits."""

from __future__ import annotations

import copy
import gc
import textwrap
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import recfuse
import recfuse.nn.columns.host as host_module
from recfuse.nn import EmbeddingColumns
from recfuse.nn.columns import Bucketize, Hash, Identity, Numeric
from recfuse.nn.columns.host import HostSplit
from support import gpu

pytestmark = gpu.MARKS
ROWS, SAMPLES = 50_000, 256


@pytest.fixture(autouse=True)
def _all_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "MOST_ROWS", -1)


def columns_of(dtype: torch.dtype = torch.float32) -> list[Any]:
    return [
        Identity("b", ROWS, 32, pooling="sum", placement="host", dtype=dtype, invalid="error"),
        Bucketize("a", [0.25, 0.5], 8, dtype=dtype),
        Hash("h", ROWS, 16, pooling="mean", placement="host", dtype=dtype),
        Numeric("n"),
        Identity("c", ROWS, 32, placement="host", dtype=dtype, scale=0.3),
    ]


def frozen(dtype: torch.dtype = torch.float32) -> EmbeddingColumns:
    return EmbeddingColumns(columns_of(dtype), device=gpu.DEVICE).requires_grad_(False)


def batch_of(seed: int, samples: int = SAMPLES) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def integers(*size: int) -> Tensor:
        return torch.randint(0, ROWS, size, generator=generator)

    return {
        "a": torch.rand(samples, generator=generator),
        "b": (integers(samples * 5), torch.arange(samples + 1) * 5),
        "h": (integers(samples * 3), torch.arange(samples + 1) * 3),
        "n": torch.rand(samples, generator=generator),
        "c": integers(samples),
    }


def within_the_call(module: EmbeddingColumns) -> EmbeddingColumns:
    """The same columns, whose rows are looked up like those of trained tables."""
    return copy.deepcopy(module).requires_grad_(True)


def busy() -> None:
    """Work for about a tenth of a second."""
    torch.cuda._sleep(200_000_000)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    calls: list[bool] = []
    call = HostSplit.deferred
    monkeypatch.setattr(HostSplit, "deferred", lambda *given: calls.append(True) or call(*given))
    return calls


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("samples", (0, 1, 33, 256, 5000))
def test_bits_are_those_of_a_call_that_waits(
    samples: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, calls = frozen(dtype), counted(monkeypatch)
    waiting = within_the_call(module)
    for seed in range(3):
        batch = batch_of(seed, samples)
        packed = module.pack(batch)
        with torch.no_grad():
            want = waiting(batch)
            assert not calls
            for given in (batch, packed, packed.to(gpu.DEVICE)):
                found = module(given)
                assert found.dtype == want.dtype and torch.equal(found, want)
        assert len(calls) == 3
        calls.clear()


def test_the_call_does_not_wait() -> None:
    """For the GPU, and so for no thread either; more calls than there is memory for wait for the oldest."""
    module = frozen()
    packed = [module.pack(batch_of(seed)) for seed in range(8)]
    with torch.no_grad():
        want = [within_the_call(module)(one) for one in packed]
        module(packed[0])
        gpu.synchronize()
        for calls in (16, 100):
            busy()
            found = [module(packed[number % 8]) for number in range(calls)]
            assert calls > 32 or not torch.cuda.current_stream().query()
            gpu.synchronize()
            for number, out in enumerate(found):
                assert torch.equal(out, want[number % 8])


def test_threads_and_streams_at_once() -> None:
    modules = [frozen(dtype) for dtype in (torch.float32, torch.bfloat16)]
    batches = [batch_of(seed, 20 + 40 * seed) for seed in range(6)]
    with torch.no_grad():
        want = [[within_the_call(module)(one) for one in batches] for module in modules]
    gpu.synchronize()
    wrong: list[Any] = []

    def run(first: int) -> None:
        stream = torch.cuda.Stream(gpu.DEVICE)
        with torch.cuda.stream(stream), torch.no_grad():
            for turn in range(30):
                which, number = (first + turn) % 2, (first * 3 + turn) % 6
                found = modules[which](batches[number])
                if turn % 5 == first and not torch.equal(found, want[which][number]):
                    wrong.append((first, turn))
                found = modules[which](modules[which].pack(batches[number]))
                stream.synchronize()
                if not torch.equal(found, want[which][number]):
                    wrong.append((first, turn))

    threads = [threading.Thread(target=run, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_batches_are_not_read_after_the_call() -> None:
    """The tensors of a batch may change after the call; packed batches and modules may go."""
    module = frozen()
    with torch.no_grad():
        want = [within_the_call(module)(batch_of(seed)) for seed in range(12)]
    found = []
    busy()
    with torch.no_grad():
        for seed in range(12):
            batch = batch_of(seed)
            given: Any = module.pack(batch) if seed % 3 == 0 else batch
            if seed % 3 == 1:  # entries that are checked one by one
                lengths = torch.full((SAMPLES,), 3)
                given = {**batch, "h": {"values": batch["h"][0], "lengths": lengths}}
            found.append(module(given))
            for entry in batch.values():
                for one in entry if isinstance(entry, tuple) else (entry,):
                    one.fill_(-1)
            del batch, given
    del module
    gc.collect()
    for seed, out in enumerate(found):
        assert torch.equal(out, want[seed]), seed


def test_tables_that_the_gpu_reads_stay_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locked memory of a module that is gone has another owner at once, unless a stream reads it."""
    monkeypatch.setattr(host_module, "MOST_ROWS", 1 << 30)
    module = frozen()
    batches = [module.pack(batch_of(seed)) for seed in range(3)]
    sizes = [module.packed_weights()[number].shape for number in module._host_matrices]
    with torch.no_grad():
        want = [within_the_call(module)(batch) for batch in batches]
        torch.cuda.synchronize()
        busy()
        found = [module(batch) for batch in batches]
    del module, batches
    gc.collect()
    others = [torch.full(size, torch.nan).pin_memory() for size in sizes for _ in range(2)]
    for number, out in enumerate(found):
        torch.testing.assert_close(out, want[number])
    assert all(other.isnan().all() for other in others)


@pytest.mark.parametrize("kind", ("index", "offset"))
def test_bad_contents_are_raised_later(kind: str) -> None:
    """By a call with the same tables, or by `recfuse.check`; the stream continues, and other tables are
    not affected."""
    module, other = frozen(), frozen()
    good, bad = batch_of(1), batch_of(2)
    if kind == "index":
        bad["b"][0][700] = ROWS
    text = rf"'b'.*{ROWS}" if kind == "index" else "'b'.*offsets"
    numbered = rf"column 0.*{ROWS}" if kind == "index" else "column 0.*offsets"
    packed = module.pack(bad)
    if kind == "offset":
        packed._inputs.offsets[0][4] = -3
    raised = IndexError if kind == "index" else ValueError
    with torch.no_grad():
        want = within_the_call(module)(good)
        with pytest.raises(raised, match=text):
            within_the_call(module)(packed)
        for by_check in (False, True):
            out = module(packed)
            torch.cuda.current_stream().synchronize()
            assert torch.equal(out[:, :32], torch.zeros_like(out[:, :32]))
            other(good)
            with pytest.raises(raised, match=numbered if by_check else text):
                recfuse.check(gpu.DEVICE) if by_check else module(good)
        assert torch.equal(module(good), want)
        recfuse.check(gpu.DEVICE)


def test_a_graph_is_no_place_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured call of the operator is refused, and the module's reads the tables by the GPU."""
    module, calls = frozen(), counted(monkeypatch)
    kept: list[tuple[Any, ...]] = []
    called = host_module.embedding_columns_split
    monkeypatch.setattr(
        host_module, "embedding_columns_split", lambda *given: kept.append(given) or called(*given)
    )
    packed = module.pack(batch_of(3)).to(gpu.DEVICE)
    with torch.no_grad():
        want = module(packed)
        assert len(calls) == len(kept) == 1
        gpu.synchronize()
        with pytest.raises(NotImplementedError, match="graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            called(*kept[0])
        gpu.synchronize()
        module(packed)
        gpu.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = module(packed)
        graph.replay()
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
        assert len(calls) == 2


def test_a_gpu_that_cannot_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the call does."""
    module, calls = frozen(), counted(monkeypatch)

    def refuse(*_: Any) -> None:
        raise NotImplementedError("recfuse: streams of GPU 0 cannot wait for memory of the host")

    monkeypatch.setattr(host_module, "embedding_columns_split", refuse)
    batch = batch_of(4)
    with torch.no_grad():
        want = within_the_call(module)(batch)
        for _ in range(2):
            assert torch.equal(module(batch), want)
    assert len(calls) == 1


SCRIPT = """
    import os, sys
    import torch
    import recfuse.nn.columns.host as host
    from recfuse.nn import EmbeddingColumns
    from recfuse.nn.columns import Identity, Numeric
    host.MOST_ROWS = -1
    columns = [Numeric("n"), Identity("b", 2_000_000, 32, placement="host", pooling="sum")]
    module = EmbeddingColumns(columns, device="cuda").requires_grad_(False)
    numbers = torch.randint(0, 2_000_000, (400_000,))
    given = module.pack({"n": torch.rand(20_000), "b": (numbers, torch.arange(20_001) * 20)})
    with torch.no_grad():
        want = module(given)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        found = [module(given) for _ in range(8)]
"""
ENDS: dict[str, str] = {
    "end": "    print('fine')",
    "fork": """
        child = os.fork()
        if child == 0:
            try:
                module(given)
            except Exception as error:
                os._exit(7 if "fork" in str(error) else 8)
            os._exit(9)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7, status
        assert all(torch.equal(one, want) for one in found)
        print('fine')
    """,
    "error": "    sys.exit('fine')",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_with_lookups_under_way(end: str) -> None:
    script = textwrap.dedent(SCRIPT) + textwrap.indent(textwrap.dedent(ENDS[end]), "    ")
    if end == "error":
        with pytest.raises(AssertionError, match="fine"):
            gpu.run_alone(script, timeout=100)
    else:
        assert gpu.run_alone(script, timeout=100) == "fine\n"
