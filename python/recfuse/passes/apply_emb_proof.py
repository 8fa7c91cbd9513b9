"""The proof that one call for all tables may take the place of a model's ``apply_emb``.

Such a method may do anything, so it is run on probe batches, with tables that note how they are called and
return random numbers: it must call each table once, with its own lookups and row weights, return just what
the tables returned, pass gradients as they are, and leave the model and the random state alone.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

ARGUMENTS = ("lS_o", "lS_i", "emb_l", "v_W_l")
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


def method_of(model: torch.nn.Module) -> Any:
    """The ``apply_emb`` of the model's class, bound to it."""
    static = inspect.getattr_static(type(model), "apply_emb")
    return static.__get__(model, type(model)) if hasattr(static, "__get__") else static


def defaults_of(model: torch.nn.Module) -> dict[str, Any]:
    """What the model's own method gives its arguments that are not given."""
    parameters = inspect.signature(method_of(model)).parameters
    defaults = {name: parameters[name].default for name in ARGUMENTS}
    return {name: value for name, value in defaults.items() if value is not inspect.Parameter.empty}


def why_not_proven(model: torch.nn.Module, tables: Sequence[torch.nn.EmbeddingBag]) -> str | None:
    """Why a model's ``apply_emb``, run on probe batches, may not be replaced; None if it may. Leaves the
    model, random states and gradients as they were.
    """
    if "apply_emb" in vars(model):
        return "its apply_emb was replaced on the object"
    if tables[0].weight.is_meta:
        return (
            "its tables are on the meta device, where apply_emb cannot be tried; swap when they have weights"
        )
    try:
        with _unchanged_random_state(), _unchanged_model(model), torch.inference_mode(False):
            return _Proof(model, tables).why_not()
    except _Refused as refused:
        return f"its apply_emb {refused}"


class _Proof:
    """The probe batches of a model, and what is asked of its method."""

    def __init__(self, model: torch.nn.Module, tables: Sequence[torch.nn.EmbeddingBag]) -> None:
        self.model, self.tables = model, tables
        self.device = tables[0].weight.device
        self.generator = torch.Generator().manual_seed(20)

    def why_not(self) -> str | None:
        """Why no batch could be tried; None: some were. Raises _Refused where one shows a difference."""
        tried, error = 0, None
        for training in (True, False):
            for module in self.model.modules():
                module.training = training
            for batch in self.batches():
                try:
                    self.check(batch)
                    tried += 1
                except _Refused:
                    raise
                except Exception as raised:  # a form of input that the method does not take
                    error = raised
        return None if tried else f"its apply_emb raised {type(error).__name__} on a probe batch: {error}"

    def check(self, batch: _Batch) -> None:
        """One call; raises _Refused where it is not what one call for all tables would do."""
        arguments: list[Any] = [batch.offsets, batch.indices, self.model.emb_l]
        if batch.row_weights is not None:
            arguments.append(batch.row_weights)
        elif defaults_of(self.model).get("emb_l", self) is None:
            arguments.pop()
        before = torch.get_rng_state()
        with self.recorded() as calls, torch.enable_grad():
            pooled = method_of(self.model)(*arguments)
            if not torch.equal(torch.get_rng_state(), before):
                raise _Refused("draws random numbers")
        if type(pooled) is not list or len(pooled) != len(self.tables):
            raise _Refused("does not return a list with one tensor a table")
        if [call.table for call in calls] != list(range(len(self.tables))):
            raise _Refused("does not call each table once, in their order")
        for number, (call, result) in enumerate(zip(calls, pooled, strict=True)):
            _check_call(number, call, batch)
            if not _same(result, call.output):
                raise _Refused(f"changes what table {number} returns, or returns it at another place")
            if not self.passes_gradient(result, call.output):
                raise _Refused(f"does not pass the gradient to table {number} as it is")

    @contextmanager
    def recorded(self) -> Iterator[list[_Call]]:
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
                output = self.random(shape, table.weight).requires_grad_()
                calls.append(_Call(number, lookups, offsets, weights, output))
                return output

            return forward

        try:
            for number, table in enumerate(self.tables):
                vars(table)["forward"] = recorder(number, table)
            with torch.autocast(self.device.type, enabled=False):
                yield calls
        finally:
            for table in self.tables:
                vars(table).pop("forward", None)

    def passes_gradient(self, result: Tensor, output: Tensor) -> bool:
        """Whether the gradient of what the method returned is that of what the table returned."""
        if result is output:
            return True
        if not result.requires_grad:
            return False
        gradient = self.random(tuple(output.shape), output)
        (found,) = torch.autograd.grad(result, output, gradient, allow_unused=True)
        return found is not None and torch.equal(found, gradient)

    def random(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(like.device, like.dtype)

    def batches(self) -> Iterator[_Batch]:
        """Offsets stacked or listed, lookups listed or stacked, empty bags, all row weights."""
        tables = self.tables
        weighted = [
            self.row_weights(table) if table.num_embeddings <= _MOST_ROW_WEIGHTS else None for table in tables
        ]
        if all(weights is None for weights in weighted):
            smallest = min(range(len(tables)), key=lambda number: tables[number].num_embeddings)
            weighted[smallest] = self.row_weights(tables[smallest])
        none = [None] * len(tables)
        for row_weights, learned in ((none, False), (weighted, True), (self.own_row_weights(), False)):
            if row_weights is None:
                continue
            yield _Batch(*self.lookups(5, 3), row_weights, learned)
            offsets, indices = self.lookups(4, 0)
            yield _Batch(list(offsets), indices, row_weights, learned)
            if all(table.num_embeddings for table in tables):
                stacked = torch.stack([self.draw(table, 6) for table in tables])
                offsets = torch.tensor([0, 2], device=self.device).repeat(len(tables), 1)
                yield _Batch(offsets, stacked, row_weights, learned)
        if "v_W_l" in defaults_of(self.model):
            yield _Batch(*self.lookups(5, 3), None, False)

    def lookups(self, bags: int, longest: int) -> tuple[Tensor, list[Tensor]]:
        offsets, indices = [], []
        for table in self.tables:
            lengths = torch.randint(0, longest + 1, (bags,), generator=self.generator)
            lengths = lengths if table.num_embeddings else torch.zeros_like(lengths)
            offsets.append(torch.cat((lengths.new_zeros(1), lengths.cumsum(0)[:-1])))
            indices.append(self.draw(table, int(lengths.sum())))
        return torch.stack(offsets).to(self.device), indices

    def draw(self, table: torch.nn.EmbeddingBag, count: int) -> Tensor:
        rows = max(table.num_embeddings, 1)
        return torch.randint(0, rows, (count,), generator=self.generator).to(self.device)

    def row_weights(self, table: torch.nn.EmbeddingBag) -> Tensor | None:
        if table.mode != "sum":
            return None
        weights = torch.rand(table.num_embeddings, generator=self.generator)
        return weights.to(table.weight.device, table.weight.dtype).requires_grad_()

    def own_row_weights(self) -> Any:
        """The model's ``v_W_l``, if it is what it seems."""
        own = getattr(self.model, "v_W_l", None)
        if not isinstance(own, (list, tuple, torch.nn.ParameterList)) or len(own) != len(self.tables):
            return None
        return own if any(weights is not None for weights in own) else None


def _check_call(number: int, call: _Call, batch: _Batch) -> None:
    rows = batch.indices[number]
    if not _same(call.input, rows) or not _same(call.offsets, batch.offsets[number]):
        raise _Refused(f"calls table {number} with other lookups than lS_i[{number}] and lS_o[{number}]")
    weights = None if batch.row_weights is None else batch.row_weights[number]
    passed = call.per_sample_weights
    if weights is None or passed is None:
        if weights is passed:
            return
    elif _same(passed.detach(), weights.detach().gather(0, rows)):
        good = passed.requires_grad == weights.requires_grad
        if good and batch.learned and passed.requires_grad:
            (gradient,) = torch.autograd.grad(passed, weights, torch.ones_like(passed))
            counts = torch.zeros_like(weights).index_add(0, rows, torch.ones_like(passed))
            good = _same(gradient, counts)
        if not good:
            raise _Refused(f"does not pass the gradient to v_W_l[{number}] as it is")
        return
    raise _Refused(f"calls table {number} with other row weights than v_W_l[{number}]")


def _same(found: Any, expected: Tensor) -> bool:
    return (
        isinstance(found, Tensor)
        and found.dtype == expected.dtype
        and found.shape == expected.shape
        and found.device == expected.device
        and torch.equal(found, expected)
    )


@contextmanager
def _unchanged_random_state() -> Iterator[None]:
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _unchanged_model(model: torch.nn.Module) -> Iterator[None]:
    """Puts attributes and buffers back; raises _Refused where any but ``training`` was changed."""
    modules = [vars(module) for module in model.modules()]
    values = (value for now in modules for value in now.values() if isinstance(value, (list, dict, set)))
    contents: list[tuple[Any, Any, Any]] = [
        (now, now.copy(), _identities(now)) for now in (*modules, *values)
    ]
    buffers = [(buffer, buffer._version, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
        changed = None
        for now, before, _ in contents[: len(modules)]:
            for name in {*before, *now} - {"training"}:
                if now.get(name, _MISSING) is not before.get(name, _MISSING):
                    changed = name
        if changed is None and any(_identities(now) != old for now, _, old in contents[len(modules) :]):
            changed = "a list or dictionary of it"
        if changed is None and any(buffer._version != version for buffer, version, _ in buffers):
            changed = "a buffer of it"
        if changed is not None:
            raise _Refused(f"changes the model ({changed})")
    finally:
        for now, before, identities in contents:
            if _identities(now) != identities:
                now.clear()
                (now.extend if isinstance(now, list) else now.update)(before)
        with torch.no_grad():
            for buffer, version, copied in buffers:
                if buffer._version != version:
                    buffer.copy_(copied)


def _identities(container: Any) -> Any:
    """What is in a list, dictionary or set, by identity."""
    if isinstance(container, dict):
        return [(id(key), id(value)) for key, value in container.items()]
    return (set if isinstance(container, set) else list)(map(id, container))
