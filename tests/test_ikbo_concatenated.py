"""ikbo_linear by the path "concatenated", for users of one candidate each."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from support.ikbo import DTYPES, NOTHING, Case, Problem, random_case


def one_weight(problem):
    """Returns the problem with its weights as views of a single weight."""
    whole = torch.cat(problem.weights, 1)
    problem.weights = list(whole.split(problem.case.features, 1))
    return problem


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_concatenated(dtype):
    draw = random.Random(str(dtype))
    for _ in range(150):
        case = random_case(draw, dtype=dtype, n=None, chain=False)
        case = replace(case, features=case.features[:2], items=case.items[:2])
        problem = Problem(case)
        problem.check(problem.run(path="concatenated"))
        problem.check(one_weight(problem).run(path="concatenated"))


def test_concatenated_of_nothing_and_of_bad_maps():
    for changes in NOTHING:
        if changes.get("chain"):
            continue
        for bias in (False, True):
            problem = Problem(Case(**{"n": None, "bias": bias, **changes}))
            problem.check(problem.run(path="concatenated"))
    for features in ((5, 3), (0, 3)):
        problem = Problem(Case(n=None, features=features))
        problem.maps[0][3] = 4
        with pytest.raises(IndexError, match=r"cand_to_user\[3\] is 4; expected 0 to 3"):
            problem.run(path="concatenated")


def test_concatenated_is_refused():
    for case, words in ((Case(), "inputs have three dimensions"), (Case(n=None, chain=True), "a chain's")):
        for call in (Problem(case).run, Problem(case).path):
            with pytest.raises(NotImplementedError, match=f'"concatenated", which is for .*: .*{words}'):
                call(path="concatenated")


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_auto_concatenates_if_users_have_one_candidate(dtype):
    for items, want in (((9, 9), "concatenated"), ((12, 9), "concatenated"), ((8, 9), "broadcast")):
        problem = Problem(Case(n=None, dtype=dtype, items=items, features=(8, 8), bias=True))
        assert problem.path() == "broadcast"  # it copies no weights
        assert one_weight(problem).path() == want
        problem.check(problem.run())
        assert torch.equal(problem.run(), problem.run(path=want))
    assert one_weight(Problem(Case(n=None, items=(9, 9)))).path() == "broadcast"  # float32
    assert one_weight(Problem(Case(dtype=dtype, items=(9, 9)))).path() == "broadcast"


def test_adjacent_weights_are_not_one_weight():
    memory = np.arange(8, dtype=np.float16)
    problem = Problem(Case(m=1, n=None, features=(4, 4), items=(3, 3), dtype=torch.float16))
    problem.weights = [torch.from_numpy(part)[None] for part in (memory[:4], memory[4:])]
    assert problem.path() == "broadcast"
    problem.check(problem.run(path="concatenated"))


def test_gradients_of_the_concatenated_form():
    problem = one_weight(Problem(Case(n=None, dtype=torch.bfloat16, items=(9, 9), bias=True)))
    for tensor in problem.tensors():
        tensor.requires_grad_()
    want = [torch.autograd.grad(problem.run(path=path).float().sum(), problem.tensors())
            for path in ("broadcast", "concatenated")]  # fmt: skip
    torch.testing.assert_close(want[0], want[1])
