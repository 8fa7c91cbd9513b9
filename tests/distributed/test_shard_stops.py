"""A rank that is killed, raises or stops: the others raise within the timeout of the group."""

from __future__ import annotations

import pytest

from support.processes.ranks import ON_GPUS, free_port, start_ranks
from support.shards.stops import TIMEOUT, stop

pytestmark = pytest.mark.skipif(ON_GPUS, reason="NCCL's watchdog ends the process")


LONG = [pytest.param(how, marks=pytest.mark.long) for how in ("raises", "stops")]


@pytest.mark.parametrize("how", ["killed", *LONG])
def test_the_others_raise(how, tmp_path):
    context = start_ranks(stop, (2, free_port(), how, str(tmp_path)), 2, join=False)
    assert context is not None
    context.processes[0].join(TIMEOUT + 60)
    for process in context.processes:
        process.kill()
    seconds, text = (tmp_path / "0").read_text().split("\n", 1)
    assert text != "no error"
    assert float(seconds) < TIMEOUT + 10
