"""`recfuse.explain`: reports the kernels that a call launches, on a GPU of this machine or a
described GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recfuse import _C
from recfuse.perf.launches import Launches
from recfuse.perf.reserved import reserve


def explain(
    call: nn.Module | Callable[..., Any],
    *batch: Any,
    gpu: str | None = None,
    training: bool = False,
    compile: bool = False,
) -> Launches:
    """Return the kernels that recfuse launches for a call.

    With ``gpu``, ``explain`` lowers the call for that GPU and does not run it: it takes tensors on the CPU,
    needs no GPU, and reads no table. Without ``gpu``, it runs the call on the GPU of its tensors, and records
    the launches.

    Args:
        call: a module, an operator or any function, called as ``call(*batch)``.
        batch: its arguments. With ``gpu``, on the CPU.
        gpu: a GPU by its name, ``"H100"``, ``"H200"``, ``"A100"``, ``"L4"`` or ``"B200"`` (`known_gpus`
            lists all), or the typical GPU of an architecture, ``"sm_90a"``, or a GPU of it with the given SMs
            and MiB of L2, ``"sm_90a:114:50"``. The nearest known GPU before an unknown architecture describes
            it. Default: the GPU of the tensors.
        training: explain the backward pass too, of the sum of all floating-point results. ``.grad`` of
            parameters does not change. Without ``gpu``, optimizers of `recfuse.optim` step.
        compile: compile kernels that are not in the cache, so that registers are known.

    Returns:
        Launches: the launches, in their order. ``explain`` drops the results of the call; with ``gpu`` they
        would be zeros.

    Raises:
        ValueError: an unknown ``gpu``, a batch on the CPU without ``gpu``, or another `explain` at the same
            time.

    Example:
        >>> table = recfuse.nn.EmbeddingBag(1_000_000, 64, mode="sum")
        >>> indices, offsets = torch.randint(1_000_000, (4096,)), torch.arange(0, 4096, 8)
        >>> print(recfuse.explain(table, indices, offsets, gpu="H100"))  # doctest: +SKIP

    Note:
        Collections learn the lengths of bags from their first batch, as on a GPU. A ``mapping`` that was
        created outside the call is for 132 SMs. Launches of other threads are recorded too while a call
        runs on a GPU. torch's own kernels are not listed.
    """
    if gpu is None and not _has_cuda_tensor((call, batch)):
        raise ValueError(
            "explain: gpu is None and no tensor is on a GPU; expected the name of a GPU to lower the call "
            'for, such as gpu="H100"'
        )
    if gpu is not None and _has_cuda_tensor((call, batch)):
        raise ValueError(
            f"explain: gpu is {gpu!r} and tensors are on a GPU; expected tensors on the CPU. Move them by "
            ".cpu(), or leave gpu out to explain the call on their own GPU."
        )
    launches = Launches(record(call, batch, gpu, training))
    return launches.compile() if compile else launches


def record(
    call: Callable[..., Any], batch: Sequence[Any], gpu: str | None, training: bool
) -> list[dict[str, Any]]:
    """Return the launches of a call as `_C.explain_end` returns them; see `explain`."""
    with _recording(gpu) as recorded, torch.set_grad_enabled(training):
        _run(call, batch, training, gpu)
    return recorded


def known_gpus() -> list[dict[str, Any]]:
    """Return the GPUs that calls can be lowered for.

    Returns:
        list: a dict for each GPU with ``name``, ``arch``, ``sms`` and so on. GPUs of an architecture follow
        each other, the typical GPU first.

    Example:
        >>> from recfuse.perf.explain import known_gpus
        >>> "H100" in [gpu["name"] for gpu in known_gpus()]
        True
    """
    return _C.gpus()


@contextmanager
def _recording(gpu: str | None) -> Iterator[list[dict[str, Any]]]:
    recorded: list[dict[str, Any]] = []
    _C.explain_begin(gpu)
    try:
        yield recorded
    finally:
        recorded.extend(_C.explain_end())


def _run(call: Callable[..., Any], batch: Sequence[Any], training: bool, gpu: str | None) -> None:
    if not training:
        call(*batch)
        return
    results = [result for result in _tensors(call(*batch)) if result.requires_grad]
    leaves = _leaves(results)
    before = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None  # otherwise the gradient is added to it in place
        gradients = [
            torch.ones_like(result) if gpu is None else reserve(result.shape, result.dtype)
            for result in results
        ]
        if results:
            torch.autograd.backward(results, gradients)
    finally:
        for leaf, grad in zip(leaves, before, strict=True):
            leaf.grad = grad


def _leaves(results: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that receive gradients from a backward pass of ``results``."""
    leaves = {id(result): result for result in results if result.is_leaf}
    nodes = [result.grad_fn for result in results]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of an AccumulateGrad
        if isinstance(leaf, Tensor):
            leaves[id(leaf)] = leaf
        nodes += [following for following, _ in node.next_functions]
    return list(leaves.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif callable(getattr(value, "values", None)) and callable(getattr(value, "lengths", None)):
        yield value.values()  # a KeyedTensor, KeyedJaggedTensor or JaggedTensor


def _has_cuda_tensor(value: Any) -> bool:
    return any(tensor.is_cuda for tensor in _tensors(value))
