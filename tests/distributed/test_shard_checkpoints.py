"""Checkpoints of sharded tables: saved on three ranks, loaded on two under another plan, and unsharded."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.testing import assert_close

from support.processes.ranks import check, run_cases
from support.shards.checkpoints import AFTER, BEFORE, KINDS, entries, resume, save, train
from support.shards.models import OPTIMIZERS, collection
from support.shards.ranks import MANY

CASES = [*itertools.product(KINDS, (False,)), ("Adagrad", True)]


def _save(folder: str) -> dict[str, Any]:
    cases = {str(case): functools.partial(save, folder, *case) for case in CASES}
    return cases | {"entries": entries}


def _resume(folder: str) -> dict[str, Any]:
    return {str(case): functools.partial(resume, folder, *case) for case in CASES}


def test_save_on_three_and_load_on_two(tmp_path):
    saved = run_cases(MANY, functools.partial(_save, str(tmp_path)))
    for case in (*map(str, CASES), "entries"):
        check(saved, case)
    resumed = run_cases(MANY - 1, functools.partial(_resume, str(tmp_path)))
    for case in CASES:
        name = case[0]
        whole = collection()
        optimizer = OPTIMIZERS[name][0](whole)
        expected = train(whole, optimizer, range(BEFORE + AFTER))
        losses = [
            *(sum(ranks) / MANY for ranks in zip(*check(saved, str(case)), strict=True)),
            *(sum(ranks) / (MANY - 1) for ranks in zip(*check(resumed, str(case)), strict=True)),
        ]
        assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    forms = [set(own) for own in check(saved, "entries")]
    assert "embedding_bags.e.weight Tensor (9, 3)" not in forms[0]
    assert all("embedding_bags.d.weight Tensor (50, 8)" in own for own in forms)
    assert all("embedding_bags.a.weight DTensor (40, 8)" in own for own in forms)

    unsharded = collection()
    state = {"model": unsharded.state_dict()}
    dcp.load(state, checkpoint_id=f"{tmp_path}/{CASES[0][0]}-False", no_dist=True)
    whole = collection()
    train(whole, OPTIMIZERS[CASES[0][0]][0](whole), range(BEFORE))
    for key, value in whole.state_dict().items():
        assert_close(state["model"][key], value, rtol=1e-5, atol=1e-6)
