"""The proof that one call for all tables may take the place of a model's ``apply_emb``.

Such a method may do anything, so it is run on probe batches, with tables that note how they are called and
return random numbers: it must call each table once, with its own lookups and row weights, return just what
the tables returned, pass gradients as they are, and leave the model and the random state alone.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recfuse.passes.apply_emb import defaults_of, method_of

_MOST_ROW_WEIGHTS = 1 << 16  # rows of a table whose row weights a probe makes up
_MISSING = object()
_CALL = inspect.signature(torch.nn.EmbeddingBag.forward)


class _Refused(Exception):
    """Why a method is not proven, in words."""


class _Batch(NamedTuple):
    offsets: Any
    indices: Any
    row_weights: Any  # a list with a tensor or None a table
    learned: bool  # gradients of the row weights are compared too


class _Call(NamedTuple):
    table: int
    input: Any
    offsets: Any
    per_sample_weights: Any
    output: Tensor


def why_not_proven(model: torch.nn.Module, tables: Sequence[torch.nn.EmbeddingBag]) -> str | None:
    """Runs a model's ``apply_emb`` on probe batches, and says why it may not be replaced; None if it may.

    Leaves the model, random states and gradients as they were; the tables' weights are not read.
    """
    if "apply_emb" in vars(model):
        return "its apply_emb was replaced on the object"
    if tables[0].weight.device.type == "meta":
        return (
            "its tables are on the meta device, where apply_emb cannot be tried; swap when they have weights"
        )
    generator = torch.Generator().manual_seed(20)
    tried, error = 0, None
    try:
        with _unchanged_random_state(), _unchanged_model(model), torch.inference_mode(False):
            for training in (True, False):
                for module in model.modules():
                    module.training = training
                for batch in _batches(model, tables, generator):
                    try:
                        _try(model, tables, batch, generator)
                        tried += 1
                    except _Refused:
                        raise
                    except Exception as raised:  # a form of input that the method does not take
                        error = raised
    except _Refused as refused:
        return f"its apply_emb {refused}"
    if tried == 0:
        return f"its apply_emb raised {type(error).__name__} on a probe batch: {error}"
    return None


def _try(
    model: torch.nn.Module,
    tables: Sequence[torch.nn.EmbeddingBag],
    batch: _Batch,
    generator: torch.Generator,
) -> None:
    """One call; raises _Refused where it is not what one call for all tables would do."""
    arguments: list[Any] = [batch.offsets, batch.indices, model.emb_l]
    if batch.row_weights is not None:
        arguments.append(batch.row_weights)
    elif defaults_of(model).get("emb_l", model) is None:
        arguments.pop()
    before = torch.get_rng_state()
    with _recorded(tables, generator) as calls, torch.enable_grad():
        pooled = method_of(model)(*arguments)
        if not torch.equal(torch.get_rng_state(), before):
            raise _Refused("draws random numbers")
    if type(pooled) is not list or len(pooled) != len(tables):
        raise _Refused("does not return a list with one tensor a table")
    if [call.table for call in calls] != list(range(len(tables))):
        raise _Refused("does not call each table once, in their order")
    for number, (call, result) in enumerate(zip(calls, pooled, strict=True)):
        _check_call(number, call, batch)
        if not _same(result, call.output):
            raise _Refused(f"changes what table {number} returns, or returns it at another place")
        if not _passes_gradient(result, call.output, generator):
            raise _Refused(f"does not pass the gradient to table {number} as it is")


def _check_call(number: int, call: _Call, batch: _Batch) -> None:
    if not _same(call.input, batch.indices[number]) or not _same(call.offsets, batch.offsets[number]):
        raise _Refused(f"calls table {number} with other lookups than lS_i[{number}] and lS_o[{number}]")
    weights = None if batch.row_weights is None else batch.row_weights[number]
    given = call.per_sample_weights
    if weights is None or given is None:
        if weights is not given:
            raise _Refused(f"calls table {number} with other row weights than v_W_l[{number}]")
        return
    rows = batch.indices[number]
    if not _same(given.detach(), weights.detach().gather(0, rows)):
        raise _Refused(f"calls table {number} with other row weights than v_W_l[{number}]")
    if given.requires_grad != weights.requires_grad:
        raise _Refused(f"does not pass the gradient to v_W_l[{number}] as it is")
    if batch.learned and given.requires_grad:
        (gradient,) = torch.autograd.grad(given, weights, torch.ones_like(given))
        counts = torch.zeros_like(weights).index_add(0, rows, torch.ones_like(given))
        if not _same(gradient, counts):
            raise _Refused(f"does not pass the gradient to v_W_l[{number}] as it is")


def _same(found: Any, expected: Tensor) -> bool:
    return (
        isinstance(found, Tensor)
        and found.dtype == expected.dtype
        and found.shape == expected.shape
        and found.device == expected.device
        and torch.equal(found, expected)
    )


def _passes_gradient(result: Tensor, output: Tensor, generator: torch.Generator) -> bool:
    if result is output:
        return True
    if not result.requires_grad:
        return False
    gradient = _random(tuple(output.shape), output, generator)
    (found,) = torch.autograd.grad(result, output, gradient, allow_unused=True)
    return found is not None and torch.equal(found, gradient)


def _random(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)


def _batches(
    model: torch.nn.Module, tables: Sequence[torch.nn.EmbeddingBag], generator: torch.Generator
) -> Iterator[_Batch]:
    """Probe batches: offsets stacked or listed, lookups listed or stacked, empty bags, all row weights."""
    device = tables[0].weight.device
    none = [None] * len(tables)
    own = _own_row_weights(model, tables)
    weighted = [_row_weights(table, generator) for table in tables]
    if not any(weights is not None for weights in weighted):
        smallest = min(range(len(tables)), key=lambda number: tables[number].num_embeddings)
        weighted[smallest] = _row_weights(tables[smallest], generator, limit=None)
    for row_weights, learned in ((none, False), (weighted, True), (own, False)):
        if row_weights is None:
            continue
        yield _Batch(*_lookups(tables, (5, 3), generator, device), row_weights, learned)
        offsets, indices = _lookups(tables, (4, 0), generator, device)
        yield _Batch(list(offsets), indices, row_weights, learned)
        if all(table.num_embeddings for table in tables):
            stacked = torch.stack([_draw(table, 6, generator, device) for table in tables])
            offsets = torch.tensor([0, 2], device=device).repeat(len(tables), 1)
            yield _Batch(offsets, stacked, row_weights, learned)
    if "v_W_l" in defaults_of(model):
        yield _Batch(*_lookups(tables, (5, 3), generator, device), None, False)


def _lookups(
    tables: Sequence[torch.nn.EmbeddingBag],
    size: tuple[int, int],
    generator: torch.Generator,
    device: torch.device,
) -> tuple[Tensor, list[Tensor]]:
    bags, longest = size
    offsets, indices = [], []
    for table in tables:
        lengths = torch.randint(0, longest + 1, (bags,), generator=generator)
        lengths = lengths if table.num_embeddings else torch.zeros_like(lengths)
        offsets.append(torch.cat((lengths.new_zeros(1), lengths.cumsum(0)[:-1])))
        indices.append(_draw(table, int(lengths.sum()), generator, device))
    return torch.stack(offsets).to(device), indices


def _draw(
    table: torch.nn.EmbeddingBag, count: int, generator: torch.Generator, device: torch.device
) -> Tensor:
    return torch.randint(0, max(table.num_embeddings, 1), (count,), generator=generator).to(device)


def _row_weights(
    table: torch.nn.EmbeddingBag, generator: torch.Generator, limit: int | None = _MOST_ROW_WEIGHTS
) -> Tensor | None:
    if table.mode != "sum" or (limit is not None and table.num_embeddings > limit):
        return None
    weights = torch.rand(table.num_embeddings, generator=generator)
    return weights.to(table.weight.device, table.weight.dtype).requires_grad_()


def _own_row_weights(model: torch.nn.Module, tables: Sequence[Any]) -> Any:
    """The model's ``v_W_l``, if it is what it seems."""
    own = getattr(model, "v_W_l", None)
    if not isinstance(own, (list, tuple, torch.nn.ParameterList)) or len(own) != len(tables):
        return None
    return own if any(weights is not None for weights in own) else None


@contextmanager
def _recorded(tables: Sequence[torch.nn.EmbeddingBag], generator: torch.Generator) -> Iterator[list[_Call]]:
    """Tables note their calls, and return random numbers."""
    calls: list[_Call] = []

    def recorder(number: int, table: torch.nn.EmbeddingBag) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            call = _CALL.bind(table, *args, **kwargs)
            call.apply_defaults()
            lookups, offsets, weights = list(call.arguments.values())[1:]
            if not isinstance(lookups, Tensor) or not isinstance(offsets, Tensor):
                raise _Refused(f"calls table {number} without offsets")
            if not torch.is_grad_enabled() or torch.is_autocast_enabled(table.weight.device.type):
                raise _Refused(f"calls table {number} without gradients, or under autocast")
            shape = (offsets.shape[0], table.embedding_dim)
            output = _random(shape, table.weight, generator).requires_grad_()
            calls.append(_Call(number, lookups, offsets, weights, output))
            return output

        return forward

    try:
        for number, table in enumerate(tables):
            table.__dict__["forward"] = recorder(number, table)
        with torch.autocast(tables[0].weight.device.type, enabled=False):
            yield calls
    finally:
        for table in tables:
            table.__dict__.pop("forward", None)


@contextmanager
def _unchanged_random_state() -> Iterator[None]:
    states = [torch.get_rng_state(), random.getstate()]
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if numpy is not None:
            numpy.random.set_state(drawn)


@contextmanager
def _unchanged_model(model: torch.nn.Module) -> Iterator[None]:
    """Puts attributes and buffers back; raises _Refused where any but ``training`` was changed."""
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    contents = [
        (value, value.copy())
        for values in attributes
        for value in values.values()
        if isinstance(value, (list, dict, set))
    ]
    buffers = [(buffer, buffer._version, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
        changed = None
        for module, values in zip(modules, attributes, strict=True):
            now = vars(module)
            for name in {*values, *now} - {"training"}:
                if now.get(name, _MISSING) is not values.get(name, _MISSING):
                    changed = name
        if changed is None and any(_differs(value.copy(), before) for value, before in contents):
            changed = "a list or dictionary of it"
        if changed is None and any(buffer._version != version for buffer, version, _ in buffers):
            changed = "a buffer of it"
        if changed is not None:
            raise _Refused(f"changes the model ({changed})")
    finally:
        for module, values in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(values)
        for value, before in contents:
            if _differs(value.copy(), before):
                value.clear()
                if isinstance(value, list):
                    value.extend(before)
                else:
                    value.update(before)
        with torch.no_grad():
            for buffer, version, before in buffers:
                if buffer._version != version:
                    buffer.copy_(before)


def _differs(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return True
    if isinstance(now, dict):
        return list(now) != list(before) or any(now[key] is not before[key] for key in now)
    if isinstance(now, set):
        return now != before
    return any(one is not other for one, other in zip(now, before, strict=True))
