"""Operators whose schema hides a write: the list is complete, and no pass moves a read across such a
write."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import recfuse
from recfuse.passes.graph.exported import ExportedGraph
from recfuse.passes.graph.nodes import HIDDEN_WRITES

STATE = {"running_mean", "running_var", "running_min", "running_max", "weight_arr", "exp_avg", "state_steps"}
READS = {
    "_batch_norm_no_update": "copies the statistics of inference",
    "_batch_norm_with_update_functional": "returns new statistics",
    "_native_batch_norm_legit_functional": "returns new statistics",
    "_native_batch_norm_legit_no_training": "reads the statistics",
    "_fused_moving_avg_obs_fq_helper_functional": "returns new bounds",
    "_fused_adam": "returns new states",
    "_fused_adamw": "returns new states",
    "_fused_adagrad": "returns new states",
    "_fused_adam_": "counts its steps outside, by foreach_add_",
    "_fused_adamw_": "counts its steps outside, by foreach_add_",
    "_fused_adagrad_": "counts its steps outside, by foreach_add_",
    "batch_norm_elemt": "reads the statistics",
    "quantized_batch_norm": "reads the statistics",
}


def _hidden(schema):
    """Yields the tensors of a schema that have names of states, and are not marked as written."""
    for argument in schema.arguments:
        if argument.name in STATE and not (argument.alias_info and argument.alias_info.is_write):
            yield argument.name


def test_every_operator_with_a_state_is_known():
    unknown = set()
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        is_backward = name.removesuffix("_out").endswith("backward") or "backward" in name
        if namespace.startswith("prim") or is_backward or name.endswith("_copy"):
            continue
        if list(_hidden(schema)) and schema.name not in HIDDEN_WRITES and name not in READS:
            unknown.add(schema.name)
    assert not unknown, "does it write to its state? Then HIDDEN_WRITES must have it, else READS"


def test_the_list_has_operators_and_arguments_that_exist():
    schemas = {}
    for schema in torch._C._jit_get_all_schemas():
        schemas.setdefault(schema.name, []).append(schema)
    for name, hides in HIDDEN_WRITES.items():
        for schema in schemas[name]:
            names = {argument.name for argument in schema.arguments}
            assert set(hides.arguments) <= names and hides.only_if in {None, *names}, schema
            assert hides.reason


class Watched(TorchDispatchMode):
    """Compares the arguments of an operator before and after, and the random state, with its schema."""

    def __init__(self):
        super().__init__()
        self.found, self.untagged, self.declared = set(), set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self.declared |= {item.untyped_storage()._cdata for item in _tensors((args, kwargs))}
            return func(*args, **kwargs)
        before = [(item, item.detach().clone()) for item in _tensors((args, kwargs))]
        state = torch.get_rng_state()
        result = func(*args, **kwargs)
        if not all(_same(*pair) for pair in before):
            self.found.add(func._schema.name)
        if torch.Tag.nondeterministic_seeded not in func.tags and not torch.equal(
            state, torch.get_rng_state()
        ):
            self.untagged.add(func._schema.name)
        return result


def _tensors(given):
    found = [item for item in tree_leaves(given) if type(item) in (torch.Tensor, nn.Parameter)]
    return [item for item in found if item.layout is torch.strided and item.device.type == "cpu"]


def _same(before, after):
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    return torch.equal(before, after) or bool(
        ((before == after) | ((before != before) & (after != after))).all()
    )


def _written_by(op, sample, mode):
    """Returns true if a function of torch, possibly composed of operators, changes its arguments contrary
    to its schema."""
    mode.declared.clear()
    before = [(item, item.detach().clone()) for item in _tensors((sample.input, sample.args, sample.kwargs))]
    with torch.no_grad(), mode:
        op(sample.input, *sample.args, **sample.kwargs)
    return any(not _same(*pair) and pair[0].untyped_storage()._cdata not in mode.declared for pair in before)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_no_other_operator_writes_or_draws(monkeypatch):
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

    # torch looks for the unittest that uses a sample in the sources of all frames: there is none here.
    for module in (core, common_utils):
        monkeypatch.setattr(module, "extract_test_fn", lambda: None)
    mode, composed, ran = Watched(), set(), 0
    for op in op_db:
        if not op.supports_dtype(torch.float32, "cpu") or op.name.startswith(
            ("linalg.", "jiterator", "fft.")
        ):
            continue
        try:
            samples = op.sample_inputs("cpu", torch.float32)
            samples = list(itertools.islice(samples, None if "_norm" in op.name else 2))
        except Exception:  # requires something that this machine lacks
            continue
        for sample in samples:
            try:
                if _written_by(op, sample, mode):
                    composed.add("aten::" + op.name.rpartition(".")[2])
                ran += 1
            except Exception:  # some are expected to raise
                continue
    assert ran > 800
    assert not (composed | mode.found) - set(HIDDEN_WRITES)
    assert not mode.untagged
    assert {"aten::batch_norm", "aten::native_batch_norm"} <= composed | mode.found


class Normed(nn.Module):
    """Users' rows are read from statistics, which a batch_norm moves before they are used."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(12, 5)

    def forward(self, x, cand_to_user):
        users = self.norm.running_mean.view(2, 4)
        copied = users[cand_to_user]
        moved = self.norm(x)
        return self.linear(torch.cat([copied, moved], 1))


class Single(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.randn(8))
        self.register_buffer("running_var", torch.rand(8) + 0.5)

    def forward(self, x):
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, training=True)


class Instance(Single):
    def forward(self, x):
        wide = x.unsqueeze(-1) * torch.arange(3.0)
        return nn.functional.instance_norm(wide, self.running_mean, self.running_var).amax(-1)


@pytest.mark.parametrize("kind", (Single, Instance))
@pytest.mark.parametrize("is_exported", (True, False))
def test_a_read_stays_before_a_write_that_a_schema_hides(kind, is_exported):
    torch.manual_seed(0)
    model = Normed(kind())
    x, cand_to_user = torch.randn(6, 8) + 3, torch.tensor([0, 0, 0, 1, 1, 1])
    state = {name: value.clone() for name, value in model.state_dict().items()}
    want = model(x, cand_to_user)
    after = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    if is_exported:
        program = torch.export.export(model, (x, cand_to_user))
        print(recfuse.swap(program))
        got = program.module()(x, cand_to_user)
    else:
        got = torch.compile(model, backend=recfuse.backend("eager"))(x, cand_to_user)
        torch.testing.assert_close(dict(model.state_dict()), after)
    torch.testing.assert_close(got, want)


def test_an_unread_call_with_a_hidden_write_stays():
    model = Normed(Single())
    program = torch.export.export(model, (torch.randn(6, 8), torch.zeros(6, dtype=torch.int64)))
    (node,) = [node for node in program.graph.nodes if "batch_norm" in str(node.target)]
    read = ExportedGraph(program)
    assert read._must_stay(node)
    statistics = [node for node in program.graph.nodes if "running" in node.name and node.op == "placeholder"]
    assert len(statistics) == 2 and all(map(read.effects.is_written, statistics))
