"""`recfuse.predict`: operators, memory and time of steps that are not run."""

from __future__ import annotations

import re
import resource
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import recfuse
from recfuse.perf.calibrating.probes import Dlrm, DlrmModel, Step
from recfuse.perf.choosing import choose
from recfuse.perf.predict import operators_of
from recfuse.perf.prediction import Prediction
from recfuse.perf.tracing.unallocated import unallocated

SIZES = Dlrm((13, 32, 16), (1000, 50, 7), 16, (32, 1), pooling=3)


def made(optimizer: str | None = None, sizes: Dlrm = SIZES, batch: int = 32) -> tuple[DlrmModel, Step]:
    torch.manual_seed(0)
    model = sizes.model()
    return model, Step(model, [sizes.batch(batch)], optimizer)


def predict(step: Step, training: bool = False) -> Prediction:
    return recfuse.predict(step, gpu="H100", training=training)


def dispatched(step: Callable[[], Any]) -> Counter[str]:
    """Operators with kernels that a real step dispatches, by the profiler."""
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    events = [one for one in profiler.events() if one.name.startswith("aten::")]
    names = {
        "aten::addmm",
        "aten::mm",
        "aten::bmm",
        "aten::_embedding_bag",
        "aten::relu",
        "aten::sigmoid",
        "aten::cat",
    }
    names |= {"aten::_embedding_bag_forward_only", "aten::index", "aten::_embedding_bag_backward"}
    names |= {"aten::threshold_backward", "aten::binary_cross_entropy", "aten::sigmoid_backward"}
    return Counter(one.name.removeprefix("aten::") for one in events if one.name in names)


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_operators_are_those_that_a_real_step_dispatches(optimizer):
    _, step = made(optimizer)
    listed = Counter(one.name for one in predict(step, optimizer is not None).operators)
    seen = dispatched(step)
    assert seen["addmm"] == 4 and len(seen) >= (6 if optimizer is None else 9)
    assert {name: listed[name] for name in seen} == dict(seen)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_nothing_of_the_model_changes(optimizer):
    sizes = Dlrm((13, 16), (100, 50), 16, (8, 1), sparse=optimizer != "adam")
    model, step = made(optimizer, sizes)
    step()
    assert step.optimizer is not None
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grads = {name: one.grad for name, one in model.named_parameters()}
    copies = {name: grad.to_dense().clone() for name, grad in grads.items() if grad is not None}
    saved = [
        (key, {name: torch.as_tensor(value).clone() for name, value in of.items()})
        for key, of in step.optimizer.state.items()
    ]
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in step.optimizer.param_groups
    ]
    rng = torch.get_rng_state()
    predict(step, training=True)
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for name, one in model.named_parameters():
        assert one.grad is grads[name] and type(one) is nn.Parameter
        assert torch.equal(one.grad.to_dense(), copies[name])
    assert len(saved) == len(step.optimizer.state)
    for key, of in saved:
        assert all(
            torch.equal(torch.as_tensor(step.optimizer.state[key][name]), value) for name, value in of.items()
        )
    assert groups == [
        {name: value for name, value in group.items() if name != "params"}
        for group in step.optimizer.param_groups
    ]


def test_a_first_step_leaves_no_state_and_no_gradient():
    model, step = made("adagrad")
    assert step.optimizer is not None
    sums = {key: of["sum"].clone() for key, of in step.optimizer.state.items()}
    predict(step, training=True)
    assert all(one.grad is None for one in model.parameters())
    assert all(torch.equal(of["sum"], sums[key]) for key, of in step.optimizer.state.items())


def test_buffers_that_a_step_counts_in_stay():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    recfuse.predict(model, (torch.randn(8, 4),), gpu="H100", training=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(one.grad is None for one in model.parameters())


def test_a_terabyte_is_predicted_without_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with unallocated():
        table = nn.EmbeddingBag(4_000_000_000, 64, mode="sum", sparse=True)
    indices, offsets = torch.randint(4_000_000_000, (4096,)), torch.arange(0, 4096, 4)
    found = recfuse.predict(table, (indices, offsets), gpu="H100", training=True)
    assert found.resident_bytes > 1e12 and found.peak_bytes > found.resident_bytes and not found.fits
    assert "does not fit" in str(found)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kilobytes


def test_memory_of_dense_training():
    """Weights, gradients, two states of Adam, and foreach's copy of one of these."""
    rows, dim = 10_000, 32
    table = nn.EmbeddingBag(rows, dim, mode="sum")
    optimizer = torch.optim.Adam(table.parameters())
    indices, offsets = torch.randint(rows, (64,)), torch.arange(0, 64, 4)

    def step() -> None:
        optimizer.zero_grad()
        table(indices, offsets).sum().backward()
        optimizer.step()

    found = recfuse.predict(step, gpu="H100", training=True)
    size = rows * dim * 4
    assert 4.9 * size < found.peak_bytes < 5.2 * size


def test_unique_rows_of_a_batch_are_known():
    table = nn.EmbeddingBag(1000, 8, mode="sum")
    offsets = torch.arange(0, 512, 8)
    for indices, unique in ((torch.zeros(512, dtype=torch.long), 1), (torch.arange(512), 512)):
        found = recfuse.predict(table, (indices, offsets), gpu="H100")
        assert [one.sizes for one in found.operators if one.kind == "bag"] == [(64, 8.0, 8.0, unique)]


def test_swapped_models_are_predicted_by_their_launches():
    sizes = Dlrm((13, 16), (10_000, 2000, 300), 16, (8, 1), pooling=4)
    batch = sizes.batch(256)[:3]
    with unallocated():
        model = sizes.model()
    before = recfuse.predict(model, batch, gpu="H100")
    assert len(recfuse.swap(model).fused) == 1
    after = recfuse.predict(model, batch, gpu="H100")
    (own,) = [one for one in after.operators if one.kind and one.kind.startswith("recfuse")]
    launches = recfuse.explain(model, *batch, gpu="H100")
    moved = sum(one.read_bytes + one.written_bytes for one in launches)
    assert own.sizes[0] == moved
    bags = [one for one in before.operators if one.kind == "bag"]
    assert len(bags) == 3 and not [one for one in after.operators if one.kind == "bag"]


def test_a_float_that_is_read_stops_with_its_module():
    class Reader(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Reader()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    with pytest.raises(ValueError, match=re.escape("_local_scalar_dense in module 'inner' reads the value")):
        recfuse.predict(Outer(), torch.randn(4), gpu="H100")
    with pytest.raises(ValueError, match="boolean mask"):
        recfuse.predict(lambda x: x[x > 0], torch.randn(4), gpu="H100")


def test_integers_may_be_read():
    def lookups(x: Tensor, indices: Tensor) -> Tensor:
        kept = indices[indices > 2]
        return x[kept] * int(kept.sum())

    found = recfuse.predict(lookups, (torch.randn(10, 4), torch.arange(8)), gpu="H100")
    assert [one.sizes[0] for one in found.operators if one.name == "index" and one.kind == "index"][-1] == 5


def test_integers_that_a_step_makes_may_be_written():
    def lookups(x: Tensor, given: Tensor) -> Tensor:
        own = torch.zeros(4, dtype=torch.long)
        own[1:] = given[:3]
        given.add_(1)
        return x[own[own > 0]]

    given = torch.tensor([1, 0, 2])
    found = recfuse.predict(lookups, (torch.randn(10, 4), given), gpu="H100")
    assert found.operators[-1].sizes == (2, 4.0) and given.tolist() == [1, 0, 2]


def test_sparse_gradients_are_coalesced_where_a_real_step_does():
    _, step = made("adagrad")
    names = Counter(one.name for one in predict(step, True).operators)
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    seen = Counter(one.name for one in profiler.events())
    assert names["_coalesce"] == seen["aten::_coalesce"] == 3
    assert names["sparse_mask"] == seen["aten::sparse_mask"] == 3


@pytest.mark.parametrize(
    ("model", "inputs", "error", "message"),
    [
        (3, None, TypeError, "model is an int; expected a module, an exported program or a callable"),
        (nn.EmbeddingBag(3, 4), (torch.arange(0), torch.arange(0)), ValueError, "launches no kernel"),
        (lambda: None, None, ValueError, "launches no kernel"),
    ],
)  # fmt: skip
def test_bad_arguments(model, inputs, error, message):
    with pytest.raises(error, match=message):
        recfuse.predict(model, inputs, gpu="H100")


def test_unknown_gpu():
    with pytest.raises(ValueError, match="gpu is 'H101'; expected A100"):
        recfuse.predict(nn.Linear(4, 4), torch.randn(2, 4), gpu="H101")


def test_exported_programs():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    x = torch.randn(4, 8)
    program = torch.export.export(model, (x,))
    one, other = (recfuse.predict(form, (x,), gpu="H100") for form in (model, program))
    assert one.active.seconds == pytest.approx(other.active.seconds)


def test_time_grows_with_the_batch():
    with unallocated():
        model = Dlrm((64, 256, 64), (100_000,) * 8, 64, (512, 256, 1), pooling=20).model()
    sizes = Dlrm((64, 256, 64), (100_000,) * 8, 64, (512, 256, 1), pooling=20)
    times = [
        recfuse.predict(model, sizes.batch(batch)[:3], gpu="H100").active.seconds
        for batch in (256, 1024, 4096)
    ]
    assert times == sorted(times) and times[2] > 2 * times[0]


def test_the_table_has_at_most_100_columns():
    found = predict(made("sgd")[1], training=True)
    lines = str(found).split("\n")
    assert max(map(len, lines)) <= 100 and sum("80 %" in line for line in lines) == 3
    assert found.to_json()["seconds"].keys() == {"eager", "compiled", "graph"}


def test_indices_that_are_unknown_are_uniform():
    chosen = choose("H100")
    table = nn.EmbeddingBag(100, 8, mode="sum")
    offsets = torch.arange(0, 200, 4)

    def unknown(x: Tensor) -> Tensor:
        return table(x.long(), offsets)

    operators, *_, guessed = operators_of(unknown, (torch.rand(200),), chosen.calibration, False)
    (unique,) = [one.sizes[3] for one in operators if one.kind == "bag"]
    assert guessed and unique == pytest.approx(100 * (1 - (1 - 1 / 100) ** 200))


def test_the_old_name_of_the_recorded_trace_warns(tmp_path):
    recorded, out = tmp_path / "recorded.json", tmp_path / "out.json"
    recorded.write_text('{"traceEvents": [{"ph": "X", "name": "measured", "ts": 5.0, "dur": 1.0}]}')
    with pytest.warns(DeprecationWarning, match='"beside" is a deprecated name. Use recorded'):
        predict(made()[1]).save_trace(out, beside=recorded)
    assert '"measured"' in out.read_text()
