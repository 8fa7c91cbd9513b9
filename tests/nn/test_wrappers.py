"""Wrappers of torch.distributed around packed tables, over two processes on the CPU."""

from __future__ import annotations

import copy
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import recfuse
from support.dlrm import DLRM_Net, batch_of
from support.processes.ranks import start_ranks

WORLD = 2
SIZES = (40, 7, 300)
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo"),
]


def model_of(swapped, sparse=False, seed=4):
    torch.manual_seed(seed)
    model = DLRM_Net(SIZES, sparse=sparse)
    if swapped:
        recfuse.swap(model)
    return model


def batch():
    torch.manual_seed(6)
    return batch_of(DLRM_Net(SIZES))


def stepped(model, optimizer, times=2):
    for _ in range(times):
        optimizer.zero_grad()
        model(*batch()).square().mean().backward()
        optimizer.step()


def whole(model):
    """The state_dict, of which each process may have a part."""
    state = model.state_dict()
    return {name: getattr(value, "full_tensor", value.clone)().detach() for name, value in state.items()}


def sharded(swapped, seed=4):
    model = model_of(swapped, seed=seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1)


def of_fully_shard(swapped, folder):
    model, optimizer = sharded(swapped)
    stepped(model, optimizer)
    before = whole(model)
    state = dict(zip(("model", "optimizer"), dcp_state.get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=folder)
    stepped(model, optimizer)
    other, of_other = sharded(swapped, seed=9)
    state = dict(zip(("model", "optimizer"), dcp_state.get_state_dict(other, of_other), strict=True))
    dcp.load(state, checkpoint_id=folder)
    dcp_state.set_state_dict(
        other, of_other, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    loaded = whole(other)
    stepped(other, of_other)
    return before, loaded, whole(model), whole(other)


def of_the_other(swapped, folder):
    """Returns the model of a checkpoint that the other kind has written."""
    model, _ = sharded(swapped, seed=11)
    state = {"model": dcp_state.get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=folder)
    dcp_state.set_model_state_dict(model, state["model"])
    return whole(model)


def of_optimizer(saved, whole_state):
    """A sharded model with the optimizer's state of a model that was not sharded, saved by table."""
    options = dcp_state.StateDictOptions(full_state_dict=whole_state)
    source = model_of(saved)
    optimizer = torch.optim.Adam(source.parameters(), lr=0.1)
    stepped(source, optimizer)
    state = dcp_state.get_optimizer_state_dict(source, optimizer)
    assert "emb_l.1.weight" in state["state"]
    model = model_of(True, seed=9)
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    of_model = torch.optim.Adam(model.parameters(), lr=0.7)
    full = dcp_state.StateDictOptions(full_state_dict=True)
    dcp_state.set_model_state_dict(model, source.state_dict(), options=full)
    dcp_state.set_optimizer_state_dict(model, of_model, copy.deepcopy(state), options=options)
    back = dcp_state.get_optimizer_state_dict(model, of_model, options=full)
    same = all(
        torch.equal(back["state"][name][key], value)
        for name, entries in state["state"].items()
        for key, value in entries.items()
    )
    stepped(source, optimizer)
    stepped(model, of_model)
    return same, whole(model), whole(source)


def in_place(write):
    def of(model):
        with torch.no_grad():
            write(model.emb_l[1].weight)

    return of


WRITES = {
    "fill_": in_place(lambda weight: weight.fill_(2)),
    "copy_": in_place(lambda weight: weight.copy_(torch.full((7, 8), 2.0))),
    "data.fill_": in_place(lambda weight: weight.data.fill_(2)),
    "init": in_place(lambda weight: torch.nn.init.constant_(weight, 2)),
    "get_parameter": lambda model: model.get_parameter("emb_l.1.weight").detach().fill_(2),
    "parameters": lambda model: next(model.emb_l[1].parameters()).detach().fill_(2),
    "reset_parameters": lambda model: model.emb_l[1].reset_parameters(),
    "freeze": lambda model: model.emb_l[1].requires_grad_(False),
    "unswap": recfuse.unswap,
    "weight = tensor": lambda model: setattr(model.emb_l[1], "weight", torch.full((7, 8), 2.0)),
    "load_state_dict": lambda model: model.emb_l[1].load_state_dict({"weight": torch.full((7, 8), 2.0)}),
}


def of_a_write(name):
    """Returns true if a write to one table of a sharded model took effect, or the error; and the other
    tables."""
    model, _ = sharded(True)
    before = whole(model)
    error = refused(lambda: WRITES[name](model))
    after = whole(model)
    others = all(torch.equal(after[key], before[key]) for key in before if key != "emb_l.1.weight")
    return "written" if bool(after["emb_l.1.weight"].eq(2).all()) else error, others


def refused(function):
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def of_parallel(ignored=False):
    model = model_of(True, sparse=True)
    if ignored:
        names = [name for name, _ in model.named_parameters() if name.startswith("emb_l.")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    parallel = DistributedDataParallel(model)
    parallel(*batch()).sum().backward()
    return "trained"


def of_fully_sharded(use_orig_params, ignored=False):
    model = model_of(True)
    before = dict(model.named_parameters())
    options = {"ignored_modules": [model.emb_l]} if ignored else {}
    try:
        wrapped = FullyShardedDataParallel(
            model, use_orig_params=use_orig_params, device_id=torch.device("cpu"), **options
        )
        return list(wrapped.state_dict())
    finally:
        if not ignored:
            assert all(value is before[name] for name, value in model.named_parameters())


def process(rank, folder):
    limit = timedelta(minutes=4)  # a rank that waits forever fails
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD, timeout=limit
    )
    found = {}
    for swapped in (False, True):
        found["shard", swapped] = refused(lambda: of_fully_shard(swapped, f"{folder}/{swapped}"))  # noqa: B023
    for swapped in (False, True):
        found["other", swapped] = refused(lambda: of_the_other(swapped, f"{folder}/{not swapped}"))  # noqa: B023
    for saved in (False, True):
        for whole_state in (False, True):
            found["optimizer", saved, whole_state] = refused(lambda: of_optimizer(saved, whole_state))  # noqa: B023
    for name in WRITES:
        found["write", name] = refused(lambda: of_a_write(name))  # noqa: B023
    found["parallel"] = refused(of_parallel)
    found["parallel, ignored"] = refused(lambda: of_parallel(True))
    for orig in (False, True):
        found["sharded", orig] = refused(lambda: of_fully_sharded(orig))  # noqa: B023
    found["sharded, ignored"] = refused(lambda: of_fully_sharded(True, ignored=True))
    torch.save(found, os.path.join(folder, f"{rank}.pt"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    start_ranks(process, (str(folder),), WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("saved", (False, True))
def test_a_whole_state_by_table_loads_into_tables_that_fully_shard_has_cut(saved, results):
    for found in results:
        result = found["optimizer", saved, True]
        assert not isinstance(result, str), result
        same, ours, theirs = result
        assert same
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        text = found["optimizer", saved, False]
        assert isinstance(text, str) and "recfuse: torch.distributed.checkpoint" in text, text
        assert "emb_l.0.weight" in text and "StateDictOptions(full_state_dict=True)" in text


@pytest.mark.parametrize("name", WRITES)
def test_writes_to_a_table_that_fully_shard_has_cut_are_made_or_refused(name, results):
    for found in results:
        result, others = found["write", name]
        assert others
        if name in ("weight = tensor", "load_state_dict"):
            assert result == "written"
        else:
            assert "ArgumentValueError: recfuse" in result and "fully_shard" in result, result


def test_fully_shard_trains_and_its_checkpoints_load(results):
    for found in results:
        theirs, ours = found["shard", False], found["shard", True]
        assert not isinstance(theirs, str), theirs
        assert not isinstance(ours, str), ours
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        before, loaded, after, resumed = ours
        torch.testing.assert_close(loaded, before, rtol=0, atol=0)
        torch.testing.assert_close(resumed, after, rtol=1e-5, atol=1e-7)


def test_a_sharded_checkpoint_loads_before_and_after_the_swap(results):
    for found in results:
        for swapped in (False, True):
            want = found["shard", not swapped][0]
            torch.testing.assert_close(found["other", swapped], want, rtol=0, atol=0)


def test_sparse_gradients_of_packed_tables_are_refused_in_parallel(results):
    for found in results:
        assert "ArgumentValueError: recfuse: a DistributedDataParallel has packed tables" in found["parallel"]
        assert found["parallel, ignored"] == "trained"


def test_fully_sharded_data_parallel_is_refused_before_it_changes_the_model(results):
    for found in results:
        for orig in (False, True):
            error = found["sharded", orig]
            assert error.startswith("ArgumentTypeError: recfuse: FullyShardedDataParallel cannot wrap"), error
        assert "emb_l.1.weight" in found["sharded, ignored"]
