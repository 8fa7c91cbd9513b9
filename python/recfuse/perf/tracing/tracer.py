"""Records the operators of a call without running it: floating-point tensors are fake, integers stay real."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from recfuse.errors import ArgumentValueError
from recfuse.perf.models.kinds import classify, is_fusable
from recfuse.perf.tracing.kept_state import KeptState
from recfuse.perf.tracing.memory import MemoryCount
from recfuse.perf.tracing.native_calls import NativeCalls
from recfuse.perf.tracing.operators import Lookups, Operator, TensorFacts
from recfuse.perf.tracing.recorded_calls import CallRecorder
from recfuse.perf.tracing.sparse_rows import SparseRows

# Operators that a dispatch mode adds itself, or that are too small to count.
_UNCOUNTED = frozenset(("device", "_record_function_enter_new", "_record_function_exit", "detach", "_indices",
                        "_values", "_nnz", "lift_fresh"))  # fmt: skip
_OF_SPARSE = frozenset(("_values", "_indices", "values", "indices"))  # parts of a sparse tensor
_DEVICE = torch.ops.prim.device.default
_CREATE = frozenset(("empty", "zeros", "ones", "full", "rand", "randn", "empty_strided", "scalar_tensor",
                     "arange", "normal", "randperm", "linspace"))  # fmt: skip


class DataReadError(ArgumentValueError):
    """A step reads a value that tracing does not compute."""


class Tracer(TorchDispatchMode):
    """Records the operators that a call dispatches.

    Floating-point tensors are fake: they have no memory, so that a model of any size can be traced. Integers
    are real, because offsets and indices determine the time of the lookups. Tensors without dimensions are
    real too, such as the step counts of optimizers.

    Attributes:
        operators: the operators, in their order.
        memory: bytes of the tensors.
        rows: the lookups, and the rows of sparse tensors.
    """

    def __init__(self, gpu: str | None, training: bool, state: KeptState) -> None:
        """Trace for a GPU by its name; None: for the CPU."""
        super().__init__()
        self.recorder: CallRecorder | None = None
        self.fake = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.training, self.state = training, state
        self.native = NativeCalls(gpu)
        self.memory = MemoryCount()
        self.names: dict[int, str] = {}  # names of modules by id
        self.tf32 = bool(torch.backends.cuda.matmul.allow_tf32)
        self._foreigners: dict[int, Tensor] = {}
        self.rows = SparseRows()
        self._created: set[int] = set()
        self._keep: list[Any] = []  # objects whose ids are used below
        self._modules: list[Any] = []
        self._storages: dict[int, int] = {}
        self._numbers = itertools.count()
        self.restart()

    def restart(self) -> None:
        """Discard the operators, and reset the peak of memory."""
        self.operators: list[Operator] = []
        self.rows.unknown = False
        if self.recorder is not None:
            self.recorder.calls.clear()
        self._optimizing = False
        self.memory.restart()

    @contextmanager
    def named(self, model: Any) -> Iterator[None]:
        """Register the paths of a model's modules within the context."""
        if isinstance(model, torch.nn.Module):
            self.names.update((id(module), name) for name, module in model.named_modules())
        enter = register_module_forward_pre_hook(lambda module, _: self._modules.append(module))
        leave = register_module_forward_hook(lambda *_: self._leave())
        try:
            yield
        finally:
            enter.remove()
            leave.remove()
            self._modules.clear()

    def _leave(self) -> None:
        if self._modules:
            self._modules.pop()

    @property
    def _module(self) -> str:
        if not self._modules:
            return ""
        last = self._modules[-1]
        return self.names.get(id(last)) or type(last).__name__

    @property
    def _phase(self) -> str:
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        if self._optimizing:
            return "optimizer"
        return "forward" if self.training else "inference"

    def to_fake(self, tensor: Tensor) -> Tensor:
        """Return the fake of a tensor; remembers the gradient of a leaf."""
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self.fake:
            return tensor
        if tensor.requires_grad and tensor.is_leaf:
            self.state.keep_grad(tensor)
        fake = self._foreign(tensor) if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor)
        if not self.memory.used(tensor):
            self.memory.meet(tensor)
            self._keep += (tensor, fake)
        return fake

    def _foreign(self, tensor: FakeTensor) -> Tensor:
        """Return the fake of a fake that another mode created."""
        if id(tensor) not in self._foreigners:
            with self.fake:
                self._foreigners[id(tensor)] = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
                )
        return self._foreigners[id(tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record an operator and compute the shapes of its results."""
        if func is _DEVICE:
            return func(*args)
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        if name == "_record_function_enter_new":
            self._optimizing = "Optimizer.step" in str(args[0])
        elif name == "_record_function_exit":
            self._optimizing = False
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        lookups = self.rows.lookups(name, args)
        native = self.native.explain(func, args, kwargs) if self._is_native(func) else None
        original = args, kwargs
        args, kwargs, is_fake = self._converted(func, name, args, kwargs, inputs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        facts = [TensorFacts(tensor) for tensor in tensors]
        for tensor in tensors:
            if tensor.dim() or is_fake:
                self.memory.note(tensor)
        out = self._run(func, name, args, kwargs, is_fake)
        results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        self.rows.note(name, lookups, tensors, results)
        self._note_created(tensors if name != "lift_fresh" else (), results)
        self._count_memory(name, lookups, tensors, [result for result in results if result.dim() or is_fake])
        if name not in _UNCOUNTED and not (name == "clone" and facts and facts[0].sparse):
            name = _canonical(name, self._phase)
            outs = [TensorFacts(result) for result in results]
            kind = native or self._kind(name, is_fake, facts, outs, lookups)
            self._record(name, kind, native is not None, tensors, results)
            if kind is not None and self.recorder is not None:
                self.recorder.note(kind, func, *original, self.rows, self.to_fake)
        return out

    @staticmethod
    def _is_native(func: Any) -> bool:
        return getattr(func, "namespace", "") == "recfuse"

    def _converted(
        self, func: Any, name: str, args: Any, kwargs: Any, inputs: Sequence[Tensor]
    ) -> tuple[Any, Any, bool]:
        """Return the arguments, with fakes for tensors if an operator computes on floating-point numbers."""
        is_fake = any(
            isinstance(tensor, FakeTensor)
            or (tensor.is_floating_point() and (tensor.dim() > 0 or tensor.requires_grad))
            for tensor in inputs
        )
        if name in ("index", "index_put", "index_put_", "_index_put_impl_") and is_fake:
            args = (args[0], _without_masks(args[1]), *args[2:])
        if is_fake:
            args, kwargs = pytree.tree_map_only(Tensor, self.to_fake, (args, kwargs))
        elif name in _CREATE and self._creates_floats(func, args, kwargs):
            is_fake = True
        return args, kwargs, is_fake

    @staticmethod
    def _creates_floats(func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether a factory creates floating-point numbers with a dimension or more."""
        dtype = kwargs.get("dtype")
        if dtype is None and func.overloadpacket.__name__ in ("arange", "full", "scalar_tensor", "randperm"):
            values = args[1:2] if func.overloadpacket.__name__ == "full" else args[:3]
            if not any(isinstance(value, float) for value in values):
                return False
        size = args[0] if args and isinstance(args[0], (list, tuple)) else (1,)
        return (dtype is None or dtype.is_floating_point) and len(size) > 0

    def _run(self, func: Any, name: str, args: Any, kwargs: Any, is_fake: bool) -> Any:
        """Return the results of an operator: fakes, or real results that change no tensor from
        before the trace.
        """
        if not is_fake:
            if any(getattr(argument.alias_info, "is_write", False) for argument in _written(func)):
                return self._on_copies(func, args, kwargs)
            return func(*args, **kwargs)
        try:
            with self.fake:
                return self.rows.run(func, name, args, kwargs)
        except UnsupportedOperatorException as error:
            raise ArgumentValueError(
                f"recfuse.predict: torch knows no shapes of the results of {name}{self._where}. Leave it "
                "out of the step."
            ) from error
        except DataDependentOutputException as error:
            raise self._data_read(name) from error
        except DynamicOutputShapeException as error:
            raise self._data_read(name) from error

    @property
    def _where(self) -> str:
        return f" in module {self._module!r}" if self._modules else ""

    def _data_read(self, name: str) -> DataReadError:
        return DataReadError(
            f"recfuse.predict: {name}{self._where} reads the value of a floating-point tensor, which is not "
            "computed (.item(), bool() of a tensor, a boolean mask). Compute it from integers, or leave it "
            "out of the step."
        )

    def _on_copies(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that writes to its first argument; a first argument from before the
        trace is copied.
        """
        is_foreign = (
            args and isinstance(args[0], Tensor) and args[0].untyped_storage()._cdata not in self._created
        )
        # `KeptState` restores counts of steps.
        is_foreign = is_foreign and not (self._optimizing and not args[0].dim())
        if not is_foreign:
            return func(*args, **kwargs)
        first, *others = args
        func(first.clone(), *others, **kwargs)
        return first

    def _note_created(self, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Record the storages that the trace itself has created: only these may be written."""
        before = {tensor.untyped_storage()._cdata for tensor in tensors if not tensor.is_sparse}
        for result in results:
            if not result.is_sparse and (key := result.untyped_storage()._cdata) not in before:
                self._created.add(key)
                weakref.finalize(result.untyped_storage(), self._created.discard, key)

    def _count_memory(
        self, name: str, lookups: Lookups | None, tensors: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        if name in _OF_SPARSE or name.startswith("_sparse_coo_tensor"):
            for result in results:
                self.memory.share(result, tensors)
            return
        for result in results:
            if name == "clone" and result.is_sparse:  # a real step takes the gradient over
                self.memory.share(result, tensors)
            self.memory.add(result, self._sparse_bytes(name, lookups) if result.is_sparse else 0)
        if lookups is not None:
            self.memory.use(self._temporary(name, lookups))

    def _temporary(self, name: str, lookups: Lookups) -> int:
        """Return the bytes that live during an operator on lookups."""
        row = lookups.dim * lookups.itemsize
        if name == "sparse_mask":  # rows before they are multiplied by the mask
            return int(lookups.unique * row)
        if name == "_coalesce":  # sorted indices and their positions
            return 3 * lookups.count * 8
        if (
            lookups.dense and "backward" in name and self.native.gpu is not None
        ):  # sums of at most ten lookups
            return int((lookups.unique + lookups.count / 10) * lookups.dim * 4 + 8 * lookups.count * 8)
        return 0

    def _sparse_bytes(self, name: str, lookups: Lookups | None) -> int:
        """Return the bytes of a new sparse tensor: its values and indices."""
        if lookups is None:
            return 0
        distinct = name == "sparse_mask" or (name == "_coalesce" and self.native.gpu is not None)
        rows = lookups.unique if distinct else lookups.count
        return int(rows * (lookups.dim * lookups.itemsize + 8))

    def _number(self, tensor: Tensor) -> int:
        """Return a number of the tensor's storage, for the dependencies of operators."""
        holder = tensor if tensor.is_sparse else tensor.untyped_storage()
        key = id(tensor) if tensor.is_sparse else holder._cdata  # type: ignore[union-attr]
        if key not in self._storages:
            self._storages[key] = next(self._numbers)
            weakref.finalize(holder, self._storages.pop, key, None)
        return self._storages[key]

    def _record(
        self, name: str, kind: tuple[str, tuple[float, ...]] | None, is_native: bool,
        tensors: Sequence[Tensor], results: Sequence[Tensor],
    ) -> None:  # fmt: skip
        label, sizes = kind or (None, ())
        operator = Operator(name, self._phase, label, sizes, self._module)
        operator.reads = tuple(map(self._number, tensors))
        operator.writes = tuple(map(self._number, results))
        operator.fusable = not is_native and is_fusable(operator.kind)
        self.operators.append(operator)

    def _kind(
        self, name: str, is_fake: bool, ins: Sequence[TensorFacts], outs: Sequence[TensorFacts],
        lookups: Lookups | None,
    ) -> tuple[str, tuple[float, ...]] | None:  # fmt: skip
        """Return the kind and sizes of the kernels of an operator of torch; None if it launches nothing."""
        if not is_fake and not any(facts.shape for facts in (*ins, *outs)):
            return None  # scalars that stay on the host, such as step counts of optimizers
        if not ins:
            created = name in _CREATE and outs and name not in ("empty", "empty_strided")
            return classify("fill_", ins, outs, None) if created else None
        in_place = name.endswith("_") or name.startswith("_foreach")
        return classify(name, ins, outs, lookups, self.tf32) if outs or in_place else None


def _canonical(name: str, phase: str) -> str:
    """Return the same name for an operation that traced and real runs perform with different operators."""
    if name == "_index_put_impl_":
        return "index_put"
    return "add" if phase == "backward" and name == "add_" else name


@functools.cache
def _written(func: Any) -> Sequence[Any]:
    return (
        [argument for argument in func._schema.arguments if argument.alias_info is not None]
        if hasattr(func, "_schema")
        else []
    )


def _without_masks(indices: Any) -> Any:
    """Replace real boolean masks among the indices with their positions."""
    positions: list[Any] = []
    for index in indices:
        if isinstance(index, Tensor) and index.dtype is torch.bool and not isinstance(index, FakeTensor):
            positions += index.nonzero().unbind(1)
        else:
            positions.append(index)
    return positions


def run_traced(
    tracer: Tracer, call: Callable[[], Any], model: Any = None
) -> tuple[list[Operator], MemoryCount]:
    """Trace a call, and trace it again if the first call does more than later calls.

    The first call creates states of optimizers, and recfuse's modules learn mean bag lengths from it.

    Raises:
        DataReadError: the call reads a value of a floating-point tensor.
    """
    with tracer.state.kept(), tracer.named(model), tracer.native.lowered():
        with tracer:
            call()
        if tracer.state.has_new_states() or tracer.native.count:
            tracer.restart()
            with tracer:
                call()
    return tracer.operators, tracer.memory
