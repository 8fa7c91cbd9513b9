"""`recfuse.predict(..., measure=True)` on a GPU: the measured kernels against those of real steps."""

from __future__ import annotations

import pytest

import recfuse
from recfuse.perf.calibrating.clock import DeviceClock
from recfuse.perf.calibrating.probes import Dlrm, Step
from support import gpu

pytestmark = gpu.MARKS

SIZES = Dlrm((64, 256, 64), (100_000,) * 8, 64, (256, 128, 1), pooling=10)


@pytest.mark.parametrize("optimizer", [None, "sgd", "adagrad"])
def test_measured_kernels_are_those_of_a_step(optimizer: str | None) -> None:
    batch, training = 1024, optimizer is not None
    described = Step(SIZES.model(), [SIZES.batch(batch)], optimizer)
    found = recfuse.predict(described, training=training, measure=True)
    assert found.measured is not None and found.measured.count > 10
    missing = {one.operator.kind for one in found.times if one.operator.kind and not one.kernel.measured}
    assert not missing, found.notes
    step = Step(SIZES.model("cuda"), [SIZES.batch(batch, seed, "cuda") for seed in range(2)], optimizer)
    us, kernels = DeviceClock("cuda").active(step)
    assert found.active.seconds * 1e6 == pytest.approx(us, rel=0.2)
    assert found.kernels == pytest.approx(kernels, rel=0.1)


def test_swapped_models_are_measured() -> None:
    model = SIZES.model()
    recfuse.swap(model)
    found = recfuse.predict(model, SIZES.batch(1024)[:3], measure=True)
    assert any(kind.startswith("recfuse") for kind in found.measured.points), found.notes
