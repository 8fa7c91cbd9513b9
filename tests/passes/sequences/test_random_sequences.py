"""Random programs of histories: a swapped graph gives the bits of the original, or the match is left."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("fbgemm_gpu", reason="fbgemm_gpu is not installed (the test extra's peers are optional)")
from support.graphs import passed
from support.graphs.histories import ROWS, complete, pad

EXAMPLES = 40
SAMPLES, LENGTH, DIM = 5, 3, 4
KINDS = (
    *("padded", "padded", "fixed", "fixed", "joined", "keyed", "other length", "shared"),
    *("masked", "other mask"),
    *("cat", "wide cat", "stack", "relu_", "add_", "slice", "sum", "view", "alias", "no_grad", "detach"),
    *("write_table", "zero_index", "half", "reused", "filled"),
)  # fmt: skip
Step = tuple[str, int, int]


class Random(nn.Module):
    """A program of steps over a list of results ``[SAMPLES, LENGTH, any]``."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = steps
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(3))
        self.tables.append(nn.Embedding(ROWS, DIM + 1, padding_idx=1))

    def forward(
        self, fixed: Tensor, flat: list[Tensor], lengths: list[Tensor], values: Tensor, matrix: Tensor
    ) -> tuple[Tensor, ...]:
        fixed, flat = fixed.clone(), [own.clone() for own in flat]
        ends = [complete(own) for own in lengths]
        found: list[Tensor] = [torch.ones(SAMPLES, LENGTH, DIM)]
        for kind, a, b in self.steps:
            table: Any = self.tables[a % 4]
            one, other, at = found[a % len(found)], found[b % len(found)], b % 3
            if kind == "padded":
                found.append(pad(table(flat[at]), ends[at], LENGTH))
            elif kind == "filled":
                found.append(pad(table(flat[at]), ends[at], LENGTH, float(b % 2)))
            elif kind == "other length":
                found.append(pad(table(flat[at]), ends[at], LENGTH + b % 2)[:, :LENGTH])
            elif kind == "half":
                found.append(pad(table(flat[at]).half(), ends[at], LENGTH).float())
            elif kind == "shared":
                rows = table(flat[at])
                found.append(pad(rows, ends[at], LENGTH))
                found.append(pad(rows, ends[at], LENGTH) if b % 2 else found[-1] + rows.sum())
            elif kind == "keyed":
                parts = table(values).split(KEYED.tolist())
                own = matrix.view(3, -1).unbind(0)
                found += [
                    pad(part, complete(counts), LENGTH) for part, counts in zip(parts, own, strict=True)
                ]
            elif kind in ("masked", "other mask"):
                counts = lengths[at if kind == "masked" else (at + 1) % 3]
                mask = (torch.arange(LENGTH) < counts.unsqueeze(1)).unsqueeze(-1)
                padded = pad(table(flat[at]), ends[at], LENGTH)
                found.append(padded * mask if b % 2 else padded.masked_fill(~mask, 0.0))
            elif kind == "fixed":
                found.append(table(fixed[:, at]))
            elif kind == "joined":
                later = self.tables[b % 4](fixed[:, (at + 1) % 3])
                found.append(torch.cat([table(fixed[:, at]), later, one], -1))
            elif kind == "cat":
                found.append(torch.cat([one, other], -1))
            elif kind == "wide cat":
                found.append(torch.cat(found[-3:], 2))
            elif kind == "stack":
                found.append(torch.stack([one, one], 2).amax(2))
            elif kind == "relu_":
                one.relu_()
            elif kind == "add_":
                one.add_(1.5)
            elif kind == "slice":
                one[:, : a % LENGTH].mul_(2)
            elif kind == "sum":
                found.append(one + table(fixed[:, at]).sum(1).sum())
            elif kind == "view":
                found.append(one.view(SAMPLES, LENGTH, -1))
            elif kind == "alias":
                found.append(one)
            elif kind == "no_grad":
                with torch.no_grad():
                    found.append(pad(table(flat[at]), ends[at], LENGTH))
            elif kind == "detach":
                found.append(one.detach() + 1)
            elif kind == "write_table":
                with torch.no_grad():
                    table.weight[b % ROWS] = float(a)
            elif kind == "zero_index":
                (fixed if b % 2 else flat[at]).zero_()
            else:
                own = (one.detach().abs() * 3).nan_to_num(0, 0, 0).clamp(0, 5).long()[..., 0]
                found.append(table(own))
        return tuple(one if number % 2 else one * 1 for number, one in enumerate(found))

    @staticmethod
    def batch() -> tuple[Any, ...]:
        lengths = [torch.randint(0, 6, (SAMPLES,)) for _ in range(3)]
        flat = [torch.randint(0, ROWS, (int(own.sum()),)) for own in lengths]
        values = torch.randint(0, ROWS, (int(KEYED.sum()),))
        return torch.randint(0, ROWS, (SAMPLES, 3, LENGTH)), flat, lengths, values, MATRIX


MATRIX = torch.tensor([1, 0, 4, 2, 0, 0, 0, 0, 0, 0, 3, 1, 1, 5, 2])
KEYED = MATRIX.view(3, -1).sum(1)
STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 30), st.integers(0, 30)), min_size=2, max_size=14
)


def run(model: nn.Module, call: Any, batch: Any, train: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and weights afterwards, and gradients."""
    for parameter in model.parameters():
        parameter.grad = None
    outputs = call(*copy.deepcopy(batch))
    results = [output.detach().clone() for output in outputs]
    results += [parameter.detach().clone() for parameter in model.parameters()]
    sums = [output.sum() for output in outputs if output.requires_grad] if train else []
    if sums:
        torch.stack(sums).sum().backward()
    return results, [one.grad.clone() for one in model.parameters() if one.grad is not None]


@pytest.mark.long
@settings(max_examples=EXAMPLES, deadline=None)
@given(STEPS, st.booleans(), st.sampled_from(("eager", "exported")))
def test_swapped_and_original_agree(steps: list[Step], train: bool, way: str) -> None:
    torch.manual_seed(0)
    model = Random(steps)
    if way == "exported" and any(kind in ("write_table", "no_grad") for kind, *_ in steps):
        way = "eager"  # torch exports these as graphs of their own
    train = train and way == "eager"
    model.requires_grad_(train)
    batch, twin, third = model.batch(), copy.deepcopy(model), copy.deepcopy(model)
    try:
        expected, gradients = run(model, model, batch, train)
    except RuntimeError:  # autograd refuses some writes; so it may refuse them after the pass
        return
    swapped, _ = passed(twin, copy.deepcopy(batch), way)
    if way == "eager":
        twin.load_state_dict(third.state_dict())
    found, own = run(twin, swapped, batch, train)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
    torch.testing.assert_close(own, gradients, rtol=1e-4, atol=1e-4, equal_nan=True)
