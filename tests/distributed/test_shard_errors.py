"""Bad input of recfuse.distributed: every rank raises, and none waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import recfuse
import recfuse.distributed
from support.processes.ranks import check, run_cases
from support.shards import errors
from support.shards.ranks import MANY

NAMES = ("ranks_disagree", "bad_batches", "bad_arguments", "bad_uses", "too_large")


def _cases() -> dict[str, Any]:
    return {name: getattr(errors, name) for name in NAMES}


def test_every_rank_raises():
    results = run_cases(MANY, _cases)
    for name in NAMES:
        check(results, name)


def test_without_a_process_group():
    tables = recfuse.nn.FusedEmbeddingBagCollection([(4, 4)])
    with pytest.raises(ValueError, match=r"Call torch\.distributed\.init_process_group"):
        recfuse.distributed.shard(tables)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        recfuse.distributed.unshard(torch.zeros(1))
