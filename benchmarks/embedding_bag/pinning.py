"""Passes that pin the hot rows of each table in L2 before they look it up; pinning is part of the pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import recfuse
from embedding_bag.setting import BagSetting, Pass, Request, Workload


def hot_rows(setting: BagSetting, workload: Workload) -> list[Tensor]:
    """Returns for each table as many of the hottest rows as fit into --pin-mb."""
    return workload.hot_rows(int(setting.arguments.pin_mb * 1e6) // setting.row_bytes)


def pinned_before(run: Pass, weights: Sequence[Tensor], hot: Sequence[Tensor]) -> Pass:
    """Pins each table's rows, then pools the table: one kernel after the other, as in the paper."""

    def run_pinned(requests: Sequence[Request]) -> list[Tensor]:
        outputs = []
        for request in requests:
            recfuse.pin_rows(weights[request[0]], hot[request[0]])
            outputs += run([request])
        return outputs

    return run_pinned


def pinned_concurrently(run: Pass, weights: Sequence[Tensor], hot: Sequence[Tensor]) -> Pass:
    """Pins the next table's rows on a stream of their own while a table is looked up."""
    side = torch.cuda.Stream(weights[0].device)

    def pin(table: int) -> None:
        side.wait_stream(torch.cuda.current_stream())  # not before the table before is done with L2
        with torch.cuda.stream(side):
            recfuse.pin_rows(weights[table], hot[table])

    def run_pinned(requests: Sequence[Request]) -> list[Tensor]:
        outputs = []
        pin(requests[0][0])
        for request, after in zip(requests, [*requests[1:], None], strict=True):
            torch.cuda.current_stream().wait_stream(side)
            if after is not None:
                pin(after[0])
            outputs += run([request])
        return outputs

    return run_pinned
