"""The model of recfuse's calls of many tables: rates fit measured points, bytes are those of the launches."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from recfuse import nn as recfuse_nn
from recfuse import optim
from recfuse.perf.choosing import choose
from recfuse.perf.explain import record
from recfuse.perf.models.bags import (
    BACKWARD,
    FORWARD,
    BagModel,
    Bags,
    Rates,
    States,
    backward_traffic,
    forward_traffic,
)
from recfuse.perf.reserved import Reserving, reserve

STATES = {"SGD": States(), "Adagrad": States(1), "RowWiseAdagrad": States(0, 1), "Adam": States(2)}


def test_the_rates_fit_the_measurements():
    calibration = choose("H100").calibration
    model = calibration.bags
    for kind, rates, most in ((FORWARD, model.forward_rates, 0.2), (BACKWARD, model.backward_rates, 0.15)):
        points = np.array(calibration.points[kind])
        predicted = rates.launches + points[:, 0] * rates.byte + points[:, 1] * rates.operation
        assert np.abs(predicted / points[:, -2] - 1).mean() < most
        assert min(rates.launches, rates.byte, rates.operation) >= 0
    assert 1e6 < 1 / model.forward_rates.byte < 6e6  # bytes a microsecond
    assert model.backward_rates.byte > model.forward_rates.byte
    assert model.backward_rates.launches > model.forward_rates.launches


def test_the_fit_finds_the_rates_that_made_the_points():
    rng = random.Random(0)
    points = []
    for _ in range(30):
        moved, operations = 10 ** rng.uniform(5, 9), 10 ** rng.uniform(5, 9)
        points.append([moved, operations, 1, 5 + moved / 3e6 + operations / 1e6, 1])
    rates = Rates.fit(FORWARD, points)
    found = [rates.launches, 1 / rates.byte, 1 / rates.operation]
    assert found == pytest.approx([5, 3e6, 1e6])
    for row in points:
        row[-2] = 5 + row[0] / 3e6 - row[1] / 1e12
    assert min(vars(Rates.fit(FORWARD, points)).values()) >= 0


def test_too_few_points():
    with pytest.raises(ValueError, match=r"1 points of recfuse_fused_embedding_bag; expected 4.*--calibrate"):
        _ = BagModel({FORWARD: [[1, 1, 1, 1, 1]]}).forward_rates


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("count", [1, 8])
def test_bytes_are_those_of_the_launches(name, count):
    rng = random.Random(count)
    bags, dim = 2048, rng.choice((32, 64, 128))
    tables = [(round(10 ** rng.uniform(4, 7)), rng.choice((5, 20))) for _ in range(count)]
    with Reserving():
        module = recfuse_nn.FusedEmbeddingBagList(
            [torch.nn.EmbeddingBag(rows, dim, mode="sum", device="cpu") for rows, _ in tables]
        )
        optimizer = getattr(optim, name)(module, lr=0.1)

    def step(offsets, indices):
        with torch.enable_grad():
            pooled = module.pool(offsets, indices)
            torch.autograd.backward(list(pooled), [reserve(one.shape, one.dtype) for one in pooled])
        optimizer.step()

    offsets = [torch.arange(bags) * pooling for _, pooling in tables]
    indices = [torch.zeros(bags * pooling, dtype=torch.int64) for _, pooling in tables]
    launches = record(step, (offsets, indices), "H100", False)
    moved = {True: 0.0, False: 0.0}
    for launch in launches:
        backward = launch["operator"] != "fused_embedding_bag"
        moved[backward] += launch["read_bytes"] + launch["written_bytes"]
    own = [Bags(bags, bags * pooling, rows, dim) for rows, pooling in tables]
    assert sum(forward_traffic(each)[0] for each in own) == pytest.approx(moved[False], rel=0.05)
    expected = sum(backward_traffic(each, STATES[name])[0] for each in own)
    assert expected == pytest.approx(moved[True], rel=0.15)
