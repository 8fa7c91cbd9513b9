"""The pattern "quantized": lookups of FBGEMM's inference modules in exported programs."""

from __future__ import annotations

import pytest
import torch

import recfuse

pytest.importorskip("torchrec.quant.embedding_modules")
from support.torchrec.quantised import MIXED, Spec, Values, batch, expected, quantised

LOOKUP = "int_nbit_split_embedding_codegen_lookup_function"


def exported(module, features):
    return torch.export.export(Values(module), (features,), strict=False)


def count(program, name: str) -> int:
    return sum(name in str(node.target) for node in program.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("alignment", (1, 4, 16))
@pytest.mark.parametrize("integer", (torch.int32, torch.int64))
def test_each_lookup_becomes_a_call(weighted, alignment, integer):
    module = quantised(weighted=weighted, alignment=alignment)
    features = batch(module, 4, integer, weighted)
    program = exported(module, features)
    lookups = count(program, LOOKUP)
    assert lookups == (1 if weighted else 2)
    before = program.module()(features)
    report = recfuse.swap(program, check=[(features,)])
    assert [entry.pattern for entry in report.swapped] == ["quantized"] * lookups
    assert count(program, LOOKUP) == count(program, "bounds_check_indices") == 0
    assert count(program, "fused_embedding_bag_quantized") == lookups
    after = program.module()(features)
    values, magnitudes = expected(module, features)
    assert bool(((after.double() - values).abs() <= 1e-6 * magnitudes).all())
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_output_dtypes(dtype):
    module = quantised(output=dtype)
    features = batch(module)
    program = exported(module, features)
    before = program.module()(features)
    assert len(recfuse.swap(program).swapped) == 2
    after = program.module()(features)
    assert after.dtype == dtype
    torch.testing.assert_close(after, before, atol=0.02, rtol=2**-7)


def test_the_memory_stays_the_program_s():
    module = quantised()
    features = batch(module)
    program = exported(module, features)
    recfuse.swap(program)
    before = program.module()(features)
    for tbe in module._emb_modules:
        tbe.weights_host.zero_()
    assert float(before.abs().sum()) > 0 and float(program.module()(features).abs().sum()) == 0


def test_a_bad_index_raises():
    module = quantised([Spec("a", 30, 8)])
    features = batch(module)
    program = exported(module, features)
    recfuse.swap(program)
    features.values()[2] = 30
    with pytest.raises(IndexError, match=r"indices\[2\] is 30, for feature 0"):
        program.module()(features)


def change(program, position, value=None, name=LOOKUP, key=None):
    """Changes an argument of the first call."""
    node = next(node for node in program.graph.nodes if name in str(node.target))
    if key is not None:
        node.kwargs = {**node.kwargs, key: value}
    else:
        node.args = (*node.args[:position], value, *node.args[position + 1 :])
    return node


def reasons(edit, specs=MIXED[:1], weighted=False):
    """Exports, edits the program, swaps it; returns the reason why the lookup is left."""
    module = quantised(specs, weighted=weighted)
    features = batch(module, weighted=weighted)
    program = exported(module, features)
    edit(program)
    report = recfuse.swap(program)
    assert not report.swapped and count(program, LOOKUP) == 1
    return next(entry.detail for entry in report.left if entry.pattern == "quantized")


def constant(position, values):
    """Changes the values of a constant of the first lookup."""

    def edit(program):
        node = next(node for node in program.graph.nodes if LOOKUP in str(node.target))
        spec = next(
            spec
            for spec in program.graph_signature.input_specs
            if getattr(spec.arg, "name", "") == node.args[position].name
        )
        program.constants[spec.target].copy_(torch.tensor(values))

    return edit


def without_check(program):
    node = next(node for node in program.graph.nodes if "bounds_check_indices" in str(node.target))
    program.graph.erase_node(node)


def computed(position):
    """Makes an argument of the first lookup a result of the program."""

    def edit(program):
        node = next(node for node in program.graph.nodes if LOOKUP in str(node.target))
        with program.graph.inserting_before(node):
            clone = program.graph.call_function(torch.ops.aten.clone.default, (node.args[position],))
        clone.meta["val"] = node.args[position].meta["val"].clone()
        node.args = (*node.args[:position], clone, *node.args[position + 1 :])

    return edit


def written(program):
    """Writes to the indices between the check and the lookup."""
    node = next(node for node in program.graph.nodes if LOOKUP in str(node.target))
    with program.graph.inserting_before(node):
        added = program.graph.call_function(torch.ops.aten.add_.Scalar, (node.args[12], 0))
    added.meta["val"] = node.args[12].meta["val"]


def test_lookups_that_are_left():
    assert "no bounds_check_indices has these indices" in reasons(without_check)
    assert "a table has a UVM placement; expected DEVICE or HOST" in reasons(constant(2, [1, 1]))
    assert "a table has SparseType 4; expected int8 (2)" in reasons(constant(4, [4, 4]))
    assert "D_offsets is no constant of the program" in reasons(computed(5))
    assert "table 1 ends beyond dev_weights" in reasons(constant(3, [0, 10**9]))
    assert "dev_weights are an input or a result" in reasons(computed(0))
    assert "is written to in place by add_" in reasons(written)
    assert "output_dtype is SparseType 2" in reasons(lambda program: change(program, 16, 2))
    assert "pooling_mode is 2; expected sum (0) or mean (1)" in reasons(lambda p: change(p, 14, 2))
    assert "row_alignment is None; expected a number" in reasons(lambda p: change(p, 19, None))
    weighted = (Spec("a", 30, 8),)
    reason = reasons(lambda program: change(program, 14, 1), weighted, weighted=True)
    assert reason == "indice_weights are given with mean pooling; expected sum"


def test_patterns_can_be_chosen():
    module = quantised()
    features = batch(module)
    program = exported(module, features)
    assert not recfuse.swap(program, patterns=["bags"]).swapped
    assert len(recfuse.swap(program, patterns=["quantized"]).swapped) == 2
