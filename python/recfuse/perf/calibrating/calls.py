"""Creates calls of torch's operators of given sizes, whose kernels are measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from recfuse.perf.calibrating.sizes import Extent, between, choice, spread_points
from recfuse.perf.models.kinds import classify
from recfuse.perf.tracing.operators import Lookups, TensorFacts, lookups_of

Call = Callable[[], Any]
_ALIGNMENT = 256  # elements; the alignment of a separate allocation
aten = torch.ops.aten


@dataclass
class Measured:
    """A call to measure, with the kind and sizes of the operator that it dispatches."""

    kind: str
    sizes: tuple[float, ...]
    call: Call
    touch: Call | None


class _Reader(TorchDispatchMode):
    """Reads the kind and sizes of the operators that a call dispatches."""

    def __init__(self, lookups: Lookups | None) -> None:
        super().__init__()
        self.lookups, self.found = lookups, list[tuple[str, str, tuple[float, ...]]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [tensor for tensor in pytree.tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        ins = [TensorFacts(tensor) for tensor in tensors]
        out = func(*args, **(kwargs or {}))
        outs = [TensorFacts(tensor) for tensor in pytree.tree_leaves(out) if isinstance(tensor, Tensor)]
        name = func.overloadpacket.__name__
        name = "index_put" if name == "_index_put_impl_" else name
        tf32 = bool(torch.backends.cuda.matmul.allow_tf32)
        if kind := classify(name, ins, outs, self.lookups, tf32):
            self.found.append((name, *kind))
        return out


def _touching(operand: Tensor) -> Call:
    """Return a call that brings an operand into the cache, as the previous operator of a model would."""
    return lambda: torch.add(operand, 0, out=operand)


class Calls:
    """Creates calls on tensors that share a buffer."""

    def __init__(self, device: str, extent: Extent, dtype: torch.dtype = torch.float32) -> None:
        """Allocate the buffer."""
        self.device, self.extent, self.dtype = device, extent, dtype
        generator = torch.Generator(device).manual_seed(0)
        self.floats = torch.randn(extent.buffer, generator=generator, device=device).to(dtype)
        self.generator = torch.Generator(device).manual_seed(1)
        self._next = 0

    def tensor(self, *shape: int) -> Tensor:
        """Return the next part of the buffer; raises IndexError if it does not fit."""
        count = math.prod(shape)
        if self._next + count > self.floats.numel():
            raise IndexError("recfuse.predict: the buffer is too small")
        part = self.floats[self._next : self._next + count].view(shape)
        self._next += -(-count // _ALIGNMENT) * _ALIGNMENT
        return part

    def rewind(self) -> None:
        """Use the buffer from its start again."""
        self._next = 0

    def read(
        self, call: Call, touch: Tensor | None = None, name: str = "", lookups: Lookups | None = None
    ) -> Measured:
        """Return a call with the kind and sizes of its last operator whose name begins with ``name``."""
        reader = _Reader(lookups)
        with torch.no_grad(), reader:
            call()
        matches = [entry for entry in reader.found if entry[0].startswith(name)]
        if not matches:
            raise IndexError(f"{name!r} is not among {[entry[0] for entry in reader.found]}")
        return Measured(matches[-1][1], matches[-1][2], call, None if touch is None else _touching(touch))

    def linear(self, m: int, n: int, k: int) -> Iterator[Measured]:
        """Yield the products of a linear layer and of its gradients."""
        if 2.0 * m * n * k > self.extent.flops:
            return
        self.rewind()
        x, w, b, g = self.tensor(m, k), self.tensor(n, k), self.tensor(n), self.tensor(m, n)
        yield self.read(lambda: torch.addmm(b, x, w.t()), x, "addmm")
        yield self.read(lambda: torch.mm(g, w), g, "mm")
        yield self.read(lambda: torch.mm(g.t(), x), g, "mm")
        yield self.read(lambda: torch.sum(g, [0], keepdim=True), g, "sum")

    def interaction(self, batch: int, vectors: int, dim: int) -> Iterator[Measured]:
        """Yield the operators of a dot interaction, forward and backward."""
        pairs = vectors * (vectors - 1) // 2
        if batch * vectors * max(vectors, dim) * 3 + batch * pairs > self.extent.buffer // 2:
            return
        self.rewind()
        t, g, u = (self.tensor(batch, vectors, dim), self.tensor(batch, vectors, vectors),
                   self.tensor(batch, dim, vectors))  # fmt: skip
        yield self.read(lambda: torch.bmm(t, t.transpose(1, 2)), t, "bmm")
        yield self.read(lambda: torch.bmm(g, t), t, "bmm")
        yield self.read(lambda: torch.bmm(t.transpose(1, 2), g), t, "bmm")
        yield self.read(lambda: torch.add(t, u.transpose(1, 2)), t, "add")
        parts = list(t.view(-1)[: batch * vectors * dim].view(vectors, batch, dim).unbind(0))
        yield self.read(lambda: torch.cat(parts, dim=1), parts[0], "cat")
        if not pairs:
            return
        li = torch.tensor([i for i in range(vectors) for _ in range(i)], device=self.device)
        lj = torch.tensor([j for i in range(vectors) for j in range(i)], device=self.device)
        v, zero = self.tensor(batch, pairs), torch.zeros_like(g)
        yield self.read(lambda: aten.index(g, [None, li, lj]), g, "index")
        yield self.read(lambda: aten._index_put_impl_(zero, [None, li, lj], v, True, True), v, "index_put")
        yield self.read(lambda: torch.cat([parts[0], v], dim=1), v, "cat")

    def pointwise(self, words: int) -> Iterator[Measured]:
        """Yield operators that read one, two or three tensors; losses, fills and sums."""
        self.rewind()
        x, y, z = self.tensor(words), self.tensor(words), self.tensor(words)
        ones = torch.ones((), device=self.device, dtype=self.dtype)
        yield self.read(lambda: torch.relu(x), x)
        yield self.read(lambda: torch.sigmoid(x), x)
        yield self.read(lambda: aten.threshold_backward(x, y, 0), x)
        yield self.read(lambda: torch.add(x, y), x)
        yield self.read(lambda: torch.addcmul(x, y, z), x)
        yield self.read(lambda: y.add_(x, alpha=0.0), x, "add_")
        yield self.read(lambda: torch.ones_like(x))
        yield self.read(lambda: x.clone(), x)
        yield self.read(lambda: torch.sum(x), x, "sum")
        if words <= 1 << 18:
            p = torch.sigmoid(x)
            yield self.read(lambda: aten.binary_cross_entropy(p, p), p)
            yield self.read(lambda: aten.binary_cross_entropy_backward(ones, p, p), p)

    def rows(self, rows: int, columns: int) -> Iterator[Measured]:
        """Yield a softmax over the last dimension, and its gradient."""
        if rows * columns > self.extent.buffer // 4:
            return
        self.rewind()
        x = self.tensor(rows, columns)
        yield self.read(lambda: aten._softmax(x, -1, False), x)
        yield self.read(lambda: aten._softmax_backward_data(x, x, -1, x.dtype), x)

    def foreach(self, tensors: int, words: int) -> Iterator[Measured]:
        """Yield the updates of optimizers that process many tensors in a launch."""
        if tensors * words * 3 > self.extent.buffer // 2:
            return
        self.rewind()
        a, b, c = ([self.tensor(words) for _ in range(tensors)] for _ in range(3))
        yield self.read(lambda: torch._foreach_add_(a, b, alpha=0.0), None, "_foreach")
        yield self.read(lambda: torch._foreach_mul_(a, 1.0), None, "_foreach")
        yield self.read(lambda: torch._foreach_addcmul_(a, b, c, 0.0), None, "_foreach")

    def bags(
        self, rows: int, dim: int, bags: int, pooling: int, skew: float, dense: bool
    ) -> Iterator[Measured]:
        """Yield a bag of a table, its gradient, and the update of SGD; ``dense``: the dense gradient."""
        count = bags * pooling
        if (
            count * dim > self.extent.gathered
            or rows * dim + count * dim + bags * dim > self.extent.buffer * 0.9
        ):
            return
        self.rewind()
        table, grad = self.tensor(rows, dim), self.tensor(bags, dim)
        uniform = torch.rand(count, generator=self.generator, device=self.device, dtype=torch.float64)
        indices = (uniform**skew * rows).long().clamp_(max=rows - 1) * 2654435761 % rows
        of = lookups_of(indices, count, bags, table, rows, dim, dense)
        offsets = torch.arange(0, count, pooling, device=self.device)
        args = (table, indices, offsets, False, 0, not dense, None, False, -1)
        out = aten._embedding_bag(*args)
        back = (grad, indices, offsets, out[1], out[2], out[3], rows, False, 0, not dense, None, -1)
        yield self.read(lambda: aten._embedding_bag(*args), None, "_embedding_bag", of)
        yield self.read(lambda: aten._embedding_bag_backward(*back), grad, "_embedding_bag", of)
        if dense:
            return
        gradient = torch.sparse_coo_tensor(
            indices[None], self.tensor(count, dim), (rows, dim), check_invariants=False
        )
        yield self.read(lambda: table.add_(gradient, alpha=-1e-30), None, "add_", of)

    def sparse(self, rows: int, dim: int, count: int, skew: float = 1.0) -> Iterator[Measured]:
        """Yield the operators of Adagrad on a sparse gradient: coalesce, and read the same
        rows of the state.
        """
        if count * dim + rows * dim > self.extent.buffer * 0.9:
            return
        self.rewind()
        table, values = self.tensor(rows, dim), self.tensor(count, dim)
        uniform = torch.rand(count, generator=self.generator, device=self.device, dtype=torch.float64)
        indices = (uniform**skew * rows).long().clamp_(max=rows - 1)
        of = lookups_of(indices, count, count, table, rows, dim)
        gradient = torch.sparse_coo_tensor(indices[None], values, (rows, dim), check_invariants=False)
        mask = gradient.coalesce()
        yield self.read(lambda: aten._coalesce(gradient), values, "_coalesce", of)
        yield self.read(lambda: table.sparse_mask(mask), None, "sparse_mask", of)

    def attention(self, heads: int, queries: int, keys: int, dim: int) -> Iterator[Measured]:
        """Yield attention of a batch of 1."""
        if (
            heads * (queries + 2 * keys) * dim > self.extent.buffer // 2
            or heads * queries * keys * dim > 2e10
        ):
            return
        self.rewind()
        q, k, v = (self.tensor(1, heads, length, dim) for length in (queries, keys, keys))
        yield self.read(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v), q, "_scaled_dot")


def groups(calls: Calls, skip: int = 20, share: float = 1.0) -> dict[str, Iterator[Iterator[Measured]]]:
    """Return generators of calls for each group; another ``skip`` gives other points."""
    extent = calls.extent

    def points(count: int, dimensions: int) -> Iterator[tuple[float, ...]]:
        return spread_points(max(2, round(count * share)), dimensions, skip)

    def linears() -> Iterator[Iterator[Measured]]:
        for number, (a, b, c) in enumerate(points(extent.products, 3)):
            multiple = (16, 64, 8, 1)[number % 4]
            n, k = (between(width, *extent.width, multiple) for width in (b, c))
            n = 1 if number % 12 == 11 else n
            yield calls.linear(between(a, *extent.batch, 1 if number % 3 == 2 else 64), n, k)

    def interactions() -> Iterator[Iterator[Measured]]:
        for a, b, c in points(extent.interactions, 3):
            batch = between(a, *extent.batch, 1 if c < 0.3 else 32)
            yield calls.interaction(batch, between(b, *extent.vectors), choice(c, extent.dims))

    def bags() -> Iterator[Iterator[Measured]]:
        for number, (a, b, c, d, e) in enumerate(points(extent.bags, 5)):
            rows, pooling = between(a, *extent.rows), between(c**2, *extent.pooling)
            skew = (1.0, 1.0, 3.0, 6.0)[int(4 * e)]
            yield calls.bags(
                rows, choice(d, extent.dims), between(b, *extent.batch), pooling, skew, number % 4 == 3
            )

    def others() -> Iterator[Iterator[Measured]]:
        for a, b, c in points(extent.others, 3):
            yield calls.pointwise(between(a, *extent.words))
            yield calls.rows(between(a, *extent.batch), between(b, *extent.width))
            yield calls.foreach(between(b, 1, 60), between(a, extent.words[0], extent.words[1] // 8))
            yield calls.attention(
                between(a, 2, 512), between(b, 16, 512), between(c, 16, 1024), choice(c, (32, 64, 128))
            )

    def sparse() -> Iterator[Iterator[Measured]]:
        for number, (a, b, c) in enumerate(points(extent.others * 2, 3)):
            rows, count = between(a, *extent.rows), between(b, extent.batch[0], extent.gathered // 256)
            yield calls.sparse(rows, choice(c, extent.dims), count, (1.0, 1.0, 3.0, 6.0)[number % 4])

    return {
        "products": linears(), "interactions": interactions(), "bags": bags(), "others": others(),
        "sparse": sparse(),
    }  # fmt: skip


def usual(calls: Calls) -> Iterator[Iterator[Measured]]:
    """Yield the products of sizes that are common in models."""
    sizes: Sequence[int] = [size for size in (64, 128, 256, 512, 1024) if size <= calls.extent.width[1]]
    for m in (512, 2048, 4096):
        if m <= calls.extent.batch[1]:
            for n in sizes:
                for k in sizes:
                    yield calls.linear(m, n, k)
