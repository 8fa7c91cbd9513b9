"""The classes of sharded modules: those of the modules before, with calls that exchange lookups."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from recfuse.distributed.sharding import Sharding
from recfuse.distributed.tables import ShardedHolder
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.nn.packed.by_table.raw_states import PART
from recfuse.nn.packed.layout import Layout

_OF_CLASSES = ("__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__qualname__")


class ShardedPooling(torch.nn.Module):
    """Mixin that pools by exchanges between ranks; see :func:`recfuse.distributed.shard`."""

    _sharding: Sharding
    _packed: Any

    @property
    def layout(self) -> Layout:
        """The whole tables, their features and columns."""
        return self._sharding.layout

    @property
    def is_sharded(self) -> bool:
        """True: ranks hold parts of the tables."""
        return True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Pool every feature of this rank's samples, as the class of the module does; a collective call.

        An error of a rank's arguments is raised on every rank.
        """
        return self._announced("forward", args, kwargs)

    @torch._disable_dynamo
    def _announced(self, method: str, args: Any, kwargs: Any) -> Any:
        """Call a method of the class before; if it raises before its exchange, the other ranks raise too."""
        sharding = self._sharding
        function = getattr(sharding.original, method)
        calls = sharding.calls
        try:
            return function(self, *args, **kwargs)
        except Exception as error:
            if sharding.calls == calls and not _is_traced(args):
                sharding.exchange.announce(error)
            raise

    def _pool(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        mapping: Any = None,
        is_apart: bool = False,
    ) -> Tensor:
        sharding = self._sharding
        if _is_traced((indices, offsets)):
            raise ArgumentTypeError(
                f"recfuse.distributed: module {sharding.name!r} is sharded and cannot be exported or traced. "
                "Call recfuse.distributed.unshard(model) first."
            )
        if mapping is not None:
            self._refuse("mapping is given")
        check_holders(sharding)
        sharding.calls += 1
        columns = sharding.exchange.pool(indices, offsets, per_sample_weights)
        found = torch.cat(columns, dim=1) if len(columns) != 1 else columns[0]
        return found.to(sharding.dtype)

    def _pool_apart(self, *lookups: Any) -> list[Tensor]:
        return list(self._pool(*lookups).split(list(self.layout.dims), dim=1))

    def _layout_changed(self) -> None:
        """Keep the calls, which read the store."""

    def _weights_changed(self) -> None:
        """Keep the calls, which read the store."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._sharding.check_move(fn)
        return torch.nn.Module._apply(self, fn, recurse)

    @property
    def has_kernel(self) -> bool:
        """True: fused calls pool the parts of each rank."""
        return True

    @property
    def on_cuda(self) -> bool:
        """True if the parts are on a CUDA device."""
        return self._sharding.matrices()[0].is_cuda

    def packed_weights(self) -> NoReturn:
        """Raise ValueError: tools for whole tables read them."""
        self._refuse("whole tables are read")

    def extra_repr(self) -> str:
        """Return the numbers of tables and columns, and this rank's bytes."""
        size = sum(matrix.numel() * matrix.dtype.itemsize for matrix in self._sharding.matrices())
        layout, rank = self.layout, self._sharding.rank
        return f"tables={len(layout.tables)}, output_dim={layout.output_dim}, bytes on rank {rank}={size}"

    def reset_parameters(self) -> NoReturn:
        """Raise ValueError: tables are drawn before they are sharded."""
        self._refuse("reset_parameters is called")

    def set_plan(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ValueError: plans are of whole tables."""
        self._refuse("set_plan is called")

    def calibrate(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ValueError: each rank reads the pooling factors of its tables from its first batch."""
        self._refuse("calibrate is called")

    def map(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ValueError: a rank knows the partition only after the exchange of lookups."""
        self._refuse("map is called")

    def _refuse(self, fact: str) -> NoReturn:
        raise ArgumentValueError(
            f"recfuse.distributed: {fact}, and module {self._sharding.name!r} is sharded; expected an "
            "unsharded module. Call recfuse.distributed.unshard(model) first."
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Raise ValueError: a copy would share the exchange."""
        self._refuse("copy.deepcopy is called")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise ValueError: the ranks hold parts, which torch.distributed.checkpoint saves."""
        raise ArgumentValueError(
            f"recfuse.distributed: module {self._sharding.name!r} is sharded and cannot be pickled. Save "
            "model.state_dict() with torch.distributed.checkpoint, or call "
            "recfuse.distributed.unshard(model) first."
        )


class ShardedList(ShardedHolder, ShardedPooling):
    """Mixin of a list of tables, which has tables and Parameters itself."""

    def pool(self, *args: Any, **kwargs: Any) -> Any:
        """Pool each table with this rank's lookups, as the class of the list does; a collective call."""
        return self._announced("pool", args, kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return ShardedPooling._apply(self, fn, recurse)


@functools.cache
def sharded_class(kind: type, is_holder: bool) -> type:
    """Return the class of sharded modules of a class.

    Python allows the change of a module's class only if its class comes first among the bases, so the class
    itself has the attributes of the mixin.
    """
    mixin = ShardedList if is_holder else ShardedPooling
    own: dict[str, Any] = {}
    for base in (ShardedPooling, ShardedHolder, ShardedList) if is_holder else (ShardedPooling,):
        own |= {key: value for key, value in vars(base).items() if key not in _OF_CLASSES}
    own |= {"__module__": __name__, "__doc__": kind.__doc__}
    return type(f"Sharded{kind.__name__}", (kind, mixin), own)


def check_holders(sharding: Sharding) -> None:
    """Raise ValueError if a wrapper has replaced this rank's Parameters, which differ by rank."""
    matrices = sharding.matrices()
    if any(not getattr(matrix, PART, False) for matrix in matrices):
        raise ArgumentValueError(
            f"recfuse.distributed: a packed Parameter of module {sharding.name!r} was replaced, for example "
            "by fully_shard; expected that of this rank. Pass it to fully_shard as "
            "ignored_params."
        )


def _is_traced(values: Any) -> bool:
    if torch.compiler.is_exporting() or torch.compiler.is_compiling():
        return True
    return any(isinstance(value, (FakeTensor, torch.fx.Proxy)) for value in values)
