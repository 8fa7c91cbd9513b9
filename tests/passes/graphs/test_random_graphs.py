"""Random graphs around the patterns: a swapped graph agrees with the original, or the match is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from support.graphs import assert_same, passed

EXAMPLES = 30
ROWS, USERS, SAMPLES, DIM = 12, 3, 9, 4
KINDS = (
    *("bag", "fixed", "summed", "single", "guarded", "copied", "tower", "linear", "attention"),
    *(
        "cat",
        "stack",
        "relu_",
        "add_",
        "slice",
        "view",
        "dropout",
        "zero_index",
        "alias",
        "no_grad",
        "detach",
    ),
    *("product", "reused", "write_table", "sum_all"),
)


class Random(nn.Module):
    """A program of steps over a list of results ``[SAMPLES, DIM]``."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(4))
        self.linear, self.wide = nn.Linear(DIM, DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, indices, flat, offsets, users, index, dense):
        indices, index = indices.clone(), index.clone()
        found, copies = [dense * 1.0], [users[index]]
        for kind, a, b in self.steps:
            table = self.tables[a % 4]
            one, other = found[a % len(found)], found[b % len(found)]
            copied = copies[b % len(copies)]
            if kind == "bag":
                found.append(
                    nn.functional.embedding_bag(flat, table.weight, offsets, mode=("sum", "mean")[b % 2])
                )
            elif kind == "fixed":
                found.append(nn.functional.embedding_bag(indices, table.weight, mode="sum"))
            elif kind == "summed":
                found.append(table(indices).mean(1) if b % 2 else table(indices).sum(1))
            elif kind == "single":
                found.append(table(indices[:, b % 2]))
            elif kind == "guarded":
                found.append(table((indices[:, 0] * a % ROWS).clamp(0, ROWS - b % 2)))
            elif kind == "copied":
                copies.append(users[index] if a % 2 else users.repeat_interleave(SAMPLES // USERS, 0))
            elif kind == "tower":
                copies.append(self.linear(copied).relu())
            elif kind == "linear":
                found.append(self.wide(torch.cat([copied, one] if a % 2 else [one, copied], 1)))
            elif kind == "attention":
                keys = copied.view(SAMPLES, 1, 2, DIM // 2)
                query = one.view(SAMPLES, 1, 2, DIM // 2)
                found.append(nn.functional.scaled_dot_product_attention(query, keys, keys).flatten(1))
            elif kind == "cat":
                found.append(torch.cat([one, other, copied], 1)[:, b % (2 * DIM) :][:, :DIM].contiguous())
            elif kind == "stack":
                found.append(torch.stack([one, other], 1).sum(1))
            elif kind == "relu_":
                one.relu_()
            elif kind == "add_":
                (one if b % 2 else copied).add_(1.5)
            elif kind == "slice":
                one[:, : a % DIM].mul_(2)
            elif kind == "view":
                found.append(one.view(-1, DIM))
            elif kind == "dropout":
                found.append(nn.functional.dropout(one, 0.5, training=bool(b % 2)))
            elif kind == "zero_index":
                (indices if b % 2 else index).zero_()
            elif kind == "alias":
                found.append(one)
            elif kind == "no_grad":
                with torch.no_grad():
                    found.append(nn.functional.embedding_bag(indices, table.weight, mode="sum") + one)
            elif kind == "detach":
                found.append(one.detach() + 1)
            elif kind == "product":
                found.append(one * copied)
            elif kind == "reused":
                found.append(
                    table((one.detach().abs() * 3).nan_to_num(0, 0, 0).clamp(0, 5).long()[:, b % DIM])
                )
            elif kind == "write_table":
                with torch.no_grad():
                    table.weight[b % ROWS] = float(a)
            else:
                found.append(one - one.sum())
        return *found, *copies

    def batch(self):
        lengths = torch.randint(0, 3, (SAMPLES,))
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]))
        return (
            torch.randint(0, ROWS, (SAMPLES, 2)),
            torch.randint(0, ROWS, (int(lengths.sum()),)),
            offsets,
            torch.randn(USERS, DIM),
            torch.randint(0, USERS, (SAMPLES,)),
            torch.randn(SAMPLES, DIM),
        )


STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 30), st.integers(0, 30)), min_size=2, max_size=14
)


def run(model, call, batch, train):
    """Outputs, gradients and weights afterwards."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = None
    outputs = call(*copy.deepcopy(batch))
    results = [output.detach().clone() for output in outputs]
    if train:
        sums = [output.sum() for output in outputs if output.requires_grad]
        if sums:
            torch.stack(sums).sum().backward()
        results += [one.grad.clone() for one in model.parameters() if one.grad is not None]
    return results, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.long
@settings(max_examples=EXAMPLES, deadline=None)
@given(STEPS, st.booleans())
def test_swapped_and_original_agree(steps, train):
    torch.manual_seed(0)
    model = Random(steps)
    if not train:
        model.requires_grad_(False)
    batch, twin, third = model.batch(), copy.deepcopy(model), copy.deepcopy(model)
    try:
        expected, weights = run(model, model, batch, train)
    except RuntimeError:  # autograd refuses some writes; so it may refuse them after the pass
        return
    swapped, _ = passed(twin, copy.deepcopy(batch), "eager")
    twin.load_state_dict(third.state_dict())
    found, changed = run(twin, swapped, batch, train)
    assert_same(found, expected, rtol=1e-4, atol=1e-4)
    assert_same(changed, weights)
