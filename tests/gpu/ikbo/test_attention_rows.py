"""ikbo_attention on a GPU with tiles of few rows, of one user and of many, in addition to full tiles."""

from __future__ import annotations

import pytest
import torch

from support import gpu
from support.ikbo_attention import Case
from support.ikbo_attention.gpu import HALF_DTYPES, check_every_path, on_gpu

pytestmark = gpu.MARKS

DIMS = (32, 64, 96, 128, 192, 256)
ROWS = ((1, 1), (1, 64), (16, 4), (16, 9), (64, 3), (1, 130), (63, 2), (13, 5))  # queries, candidates
KEYS = (1, 63, 64, 65, 128, 129, 192, 193, 700)
FORMS = ({}, {"lengths": True}, {"jagged": True})


@HALF_DTYPES
@pytest.mark.parametrize("dim", DIMS)
def test_few_rows_of_one_user(dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    for number, (sq, candidates) in enumerate(ROWS):
        for positions in KEYS:
            form = FORMS[(number + positions) % len(FORMS)]
            case = Case(sq=sq, heads=2, dim=dim, dtype=dtype, users=1, candidates=candidates)
            check_every_path(on_gpu(case.but(positions=positions, **form)))


@HALF_DTYPES
@pytest.mark.parametrize("queries", (1, 16, 48))
def test_many_users_with_rests(queries: int, dtype: torch.dtype) -> None:
    """More tiles than blocks, so that some of the last are cut."""
    torch.manual_seed(queries)
    calls = (70, 600, {}), (150, 300, {"lengths": True}), (40, 1500, {"jagged": True})
    for users, positions, form in calls:
        case = Case(sq=queries, heads=2, dim=64, dtype=dtype, users=users, candidates=users * 12 + 5)
        check_every_path(on_gpu(case.but(positions=positions, self_queries=3, **form)))
