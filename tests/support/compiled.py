"""Calls of embedding_bag for the compiler, and comparisons of the results."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

from recfuse.ops.training import compilers
from support.inputs import ragged

QUICK = {
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
    "cpp.vec_isa_ok": True,
}
"""Settings of AOTInductor that compile a package quickly: precompiled headers do not pay for a few files."""

sees_optimizers = pytest.mark.skipif(
    compilers.IS_OLD,
    reason=f"torch.compile of torch {torch.__version__} does not see optimizers; {compilers.FIRST} does",
)


def embedding_bag_samples():
    indices, offsets = ragged(12, 7, 5)
    options = ((False, -1, True), (False, 3, False), (True, 3, True))  # sparse, padding_idx, last
    for number, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16)):
        for other, mode in enumerate(("sum", "mean", "max")):
            sparse, padding_idx, last = options[(number + other) % 3]
            own, sparse = offsets if last else offsets[:-1], sparse and mode != "max"
            yield torch.randn(12, 5).to(dtype), indices, own, mode, None, last, padding_idx, False, sparse
    yield (
        torch.randn(12, 5),
        indices.int(),
        offsets,
        "sum",
        torch.rand(indices.numel()),
        True,
        -1,
        False,
        False,
    )
    yield torch.randn(12, 5), indices, offsets.int(), "sum", torch.rand(indices.numel()), True, 2, False, True
    yield torch.randn(12, 5), indices, offsets[:-1], "mean", None, False, -1, True
    yield torch.randn(12, 5), indices, offsets[:-1]
    yield torch.randn(5, 12).t(), indices[:0], torch.zeros(3, dtype=torch.int64), "sum"
    yield torch.randn(12, 0), indices, offsets[:-1], "sum"


def with_gradients(sample, wanted):
    return tuple(
        [one.clone().requires_grad_(wanted) for one in value]
        if isinstance(value, list)
        else value.clone().requires_grad_(wanted)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for value in sample
    )


def compare(compiled, plain, module, inputs):
    """Compares the outputs, and the gradients of the module's parameters."""
    for given in inputs:
        module.zero_grad()
        compiled(*given).square().sum().backward()
        ours = [p.grad for p in module.parameters()]
        module.zero_grad()
        want = plain(*given)
        want.square().sum().backward()
        torch.testing.assert_close(compiled(*given), want)
        for one, other in zip(ours, (p.grad for p in module.parameters()), strict=True):
            assert one.layout == other.layout
            torch.testing.assert_close(one.to_dense(), other.to_dense())
