"""`explain`, `recfuse compile` and `predict` of lookups without pooling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recfuse
from recfuse import _C, cli
from recfuse.nn import FusedEmbeddingCollection
from recfuse.perf.explain import known_gpus
from recfuse.perf.tracing.recorded_calls import CallRecorder, RecordedCall

ARCH = "sm_90a"
LAYOUTS = ("jagged", "joined", "padded")
FIGURES = {"registers": 1, "spill_bytes": 0, "cubin_bytes": 1, "cached": False, "seconds": 0.0}


class Model(nn.Module):
    """Histories of tables of one dim in a layout, as one tensor."""

    def __init__(self, layout: str, features: int = 2, sparse: bool = False) -> None:
        super().__init__()
        self.tables = FusedEmbeddingCollection(
            [(1000 + number, 16) for number in range(features)], sparse=sparse
        )
        self.form = layout

    def forward(self, indices: Tensor, offsets: Tensor) -> Any:
        length = 12 if self.form == "padded" else 0
        return self.tables(indices, offsets, layout=self.form, length=length)


def batch(features: int = 2, bags: int = 64, length: int = 10, integer: torch.dtype = torch.int64) -> Any:
    lookups = features * bags * length
    return torch.zeros(lookups, dtype=integer), torch.arange(0, lookups + 1, length, dtype=integer)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_explain_names_the_kernels(layout: str) -> None:
    found = recfuse.explain(Model(layout), *batch(), gpu="H100", training=True)
    first, *others = found
    assert (first.operator, first.kernel) == ("fused_embedding", "rf_fused_embedding")
    assert {one.operator for one in others} == {"fused_embedding_bag_backward"}
    written = 2 * 64 * (12 if layout == "padded" else 10) * 16 * 4
    assert first.written_bytes >= written


def compiled(monkeypatch: pytest.MonkeyPatch, *options: str) -> set[tuple[str, ...]]:
    """The kernels of a command line, which are not compiled."""
    found: set[tuple[str, ...]] = set()

    def compile(arch: str, file: str, kernel: str, defines: str, cached_only: bool = False) -> Any:
        found.add((arch, file, kernel, defines))
        return FIGURES

    with monkeypatch.context() as patch:
        patch.setattr(_C, "kernel_compile", compile)
        assert cli.main(["compile", "--arch", ARCH, *options]) == 0
    return found


@pytest.mark.parametrize(("features", "index"), ((3, "int64"), (40, "int32")))
def test_kernels_of_histories_are_compiled_ahead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, features: int, index: str
) -> None:
    models = [Model(layout, features) for layout in LAYOUTS]
    torch.save(models[0].tables, tmp_path / "tables.pt")
    given = ["--collection", str(tmp_path / "tables.pt"), "--index", index, "--training"]
    found = compiled(monkeypatch, *given)
    gpus = [gpu["name"] for gpu in known_gpus() if gpu["arch"] == ARCH]
    for model in models:
        for bags, length in ((1, 1), (64, 10), (700, 40)):
            own = batch(features, bags, length, getattr(torch, index))
            for gpu in gpus:
                needed = recfuse.explain(model, *own, gpu=gpu, training=True)
                assert set(needed.kernels()) <= found
    assert not any(kernel == "rf_fused_embedding_bag" for _, _, kernel, _ in found)


def test_options_of_histories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    torch.save({"a": torch.zeros(100, 8), "b": torch.zeros(50, 8)}, tmp_path / "tables.pt")
    path = str(tmp_path / "tables.pt")
    kernels = [compiled(monkeypatch, "--collection", path, *more) for more in ([], ["--histories", "padded"])]
    added = kernels[1] - kernels[0]
    assert {kernel for _, _, kernel, _ in added} == {"rf_fused_embedding"} and len(added) == 1
    assert cli.main(["explain", "--collection", path, "--histories", "joined", "--gpu", "H100"]) == 0
    assert "rf_fused_embedding " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["explain", "--dim", "8", "--histories", "joined", "--gpu", "H100"])
    assert "--histories needs --collection" in capsys.readouterr().err


@pytest.mark.parametrize("layout", LAYOUTS)
def test_predict_reads_the_launches(layout: str) -> None:
    found = [recfuse.predict(Model(layout), batch(bags=bags), gpu="H100") for bags in (64, 64_000)]
    (small, large) = (one.by_kind()["recfuse_fused_embedding"] for one in found)
    assert small[0] == large[0] == 1 and large[1] > 2 * small[1] > 0


def test_recorded_calls_run_with_unknown_lookups() -> None:
    """The measurement of a recorded call draws valid rows, and histories of equal lengths."""
    model, (indices, offsets) = Model("padded"), batch()
    own = model.tables
    arguments = (own.packed_weights(), own.layout.features, indices, offsets, 32, [], None, "padded", 12)
    recorder = CallRecorder()
    kind = "recfuse_fused_embedding", (1.0, 1.0, 1.0)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(one) for one in (indices, offsets)]
    operator = torch.ops.recfuse.fused_embedding.default
    arguments = (*arguments[:2], *fakes, *arguments[4:])
    recorder.note(kind, operator, arguments, {}, None, lambda tensor: tensor)  # type: ignore[arg-type]
    (call,) = recorder.calls.values()
    assert isinstance(call, RecordedCall)
    run, _ = call.on(torch.device("cpu"))
    assert run().shape == (64, 12, 32)
