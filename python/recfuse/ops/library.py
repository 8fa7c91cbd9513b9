"""Common code of all operators: the handle of their Python side, checks of the current context, errors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from recfuse import _library  # noqa: F401  (registers the operators)
from recfuse._codes import DTYPES
from recfuse._storage import check_storages
from recfuse.errors import ArgumentTypeError, ArgumentValueError, NotATensorError, a_type, translate

HAS_CUDA_KERNELS = torch.version.hip is None  # torch names ROCm's devices "cuda", too

# Must live as long as the process: its destructor would remove the operators.
library = torch.library.Library("recfuse", "FRAGMENT")
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
below_autograd = torch._C._AutoDispatchBelowAutograd
Fake = TypeVar("Fake", bound=Callable[..., Any])
_PUBLIC = (
    "embedding_bag", "fused_embedding_bag", "embedding_columns", "ikbo_linear_chain", "ikbo_linear",
    "ikbo_attention", "fused_embedding",
)  # fmt: skip
_OF_HOST = frozenset(("features", "schedules", "mapping", "program"))
"""Arguments that are always on the CPU, together with all whose names begin with "host_"."""


def is_of_host(name: str) -> bool:
    """Return whether an operator's argument of that name is always on the CPU."""
    return name in _OF_HOST or name.startswith("host_")


def _named_errors(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return native(*arguments, **options)
        except RuntimeError as error:
            translated = translate(error)
            if translated is error:
                raise
            raise translated from None

    return call


def _raise_named_errors(name: str) -> None:
    """Make an operator raise the exceptions of recfuse.errors.

    All Python calls go through these two objects: eager calls, backward passes, compiled and exported
    programs.
    """
    packet = getattr(torch.ops.recfuse, name)
    overload = packet.default
    overload._op, packet._op = _named_errors(overload._op), _named_errors(packet._op)
    torch.jit._builtins._register_builtin(packet._op, f"recfuse::{name}")  # torch.jit.script looks it up


for _name in torch._C._dispatch_get_all_op_names():
    if _name.startswith("recfuse::"):
        _raise_named_errors(_name.removeprefix("recfuse::"))


def check_tensor(function: str, name: str, value: Any) -> None:
    """Raise TypeError if an argument is no tensor."""
    if not isinstance(value, Tensor):
        raise NotATensorError(
            f"recfuse.{function}: {name} is {a_type(value)}; expected a torch.Tensor"
        ) from None


def check_call(
    function: str, weights: Any, features: Any, indices: Any, offsets: Any, **optional: Any
) -> None:
    """Raise TypeError if an argument of a failed call is no tensor; ``optional`` arguments may be None."""
    if not isinstance(weights, (list, tuple)):
        raise NotATensorError(f"recfuse.{function}: weights is {a_type(weights)}; expected a list of tensors")
    tensors = {f"weights[{number}]": weight for number, weight in enumerate(weights)}
    tensors |= {"features": features, "indices": indices, "offsets": offsets}
    tensors |= {name: value for name, value in optional.items() if value is not None}
    for name, value in tensors.items():
        check_tensor(function, name, value)


def autocast(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Convert tensors as autocast does for torch's matmuls: float64 stays."""
    return [
        tensor.to(torch.get_autocast_dtype(tensor.device.type))
        if tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
        else tensor
        for tensor in tensors
    ]


def is_autocast(tensor: Tensor, transformed: bool) -> bool:
    """Return whether autocast is on for the device of a tensor.

    ``transformed`` is the result of :func:`is_transformed`: the compiler does not support the faster check of
    all devices. Torch has no autocast for meta tensors, and would raise.
    """
    if not transformed and not torch._C._is_any_autocast_enabled():
        return False
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def is_transformed() -> bool:
    """Return whether the operator itself must be called: for the compiler, torch.jit.trace or torch.func."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
    )


def is_compiled() -> bool:
    """Return whether torch.compile traces the call; False for torch.export, which has no optimizer."""
    return torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()


def is_traced() -> bool:
    """Return whether a program is being recorded, except by torch.func's transforms."""
    return bool(torch._C._len_torch_dispatch_stack()) and not torch._C._are_functorch_transforms_active()


def needs_derivatives(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether a call must go through a Function, because a derivative may be required or refused."""
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def call_below_autograd(operator: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call an operator from a Function's forward."""
    if not torch._C._are_functorch_transforms_active():
        with below_autograd():
            return operator(*arguments, **options)
    # Forward runs without gradients, but an outer transform may need them.
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), below_autograd():
        return operator(*arguments, **options)


def dtype_code(tensor: Tensor, operator: str, argument: str) -> int:
    """Return the code of a tensor's dtype; raise TypeError for others.

    The compiler calls this before the operator checks its arguments.
    """
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        name = str(tensor.dtype).removeprefix("torch.")
        raise ArgumentTypeError(
            f"recfuse.{operator}: {argument} is {name}; expected float32, float16 or bfloat16"
        )
    return code


def public_name(operator: str) -> str:
    """Return the name of the public operator of a private operator, for messages."""
    if not operator.startswith("_"):
        return operator
    return next((name for name in _PUBLIC if operator.startswith(f"_{name}")), "fused_embedding_bag")


def implement(operator: str, function: Callable[..., Any], *keys: str) -> None:
    """Register a Python function as an operator's kernel.

    The storages of tensors are checked first, because torch trusts them.
    """
    names = [argument.name for argument in getattr(torch.ops.recfuse, operator).default._schema.arguments]

    def checked(*arguments: Any) -> Any:
        for name, tensor in zip(names, arguments, strict=False):
            if isinstance(tensor, Tensor):
                check_storages(f"recfuse.{public_name(operator)}", name, (tensor,))
        return function(*arguments)

    for key in keys:
        library.impl(operator, checked, key)


def register_fake(operator: str, follows: str = "", may_be_on_host: str = "") -> Callable[[Fake], Fake]:
    """Register the fake of an operator, which computes the shapes of its outputs.

    Torch calls it for meta tensors, too, even if other tensors of the call have memory. An output with memory
    would then be uninitialized, so devices are checked first; see :func:`check_devices`.
    """
    overload = getattr(torch.ops.recfuse, operator).default
    names = [argument.name for argument in overload._schema.arguments]
    if not hasattr(overload._op, "__wrapped__"):  # an operator that Python defines
        _raise_named_errors(operator)

    def decorate(fake: Fake) -> Fake:
        def checked(*arguments: Any, **options: Any) -> Any:
            named = *zip(names, arguments, strict=False), *options.items()
            check_devices(public_name(operator), named, follows, may_be_on_host)
            return fake(*arguments, **options)

        torch.library.register_fake(f"recfuse::{operator}", checked, lib=library)
        return fake

    return decorate


def check_devices(
    operator: str, arguments: Iterable[tuple[str, Any]], follows: str = "", may_be_on_host: str = ""
) -> None:
    """Raise ValueError if the tensors of a call are on several devices.

    Args:
        operator: the name of the operator.
        arguments: names and values of all arguments; only tensors and lists of tensors are checked.
        follows: the argument that determines the device of the outputs. If it has meta tensors, outputs are
            meta tensors, and the other tensors may be on any device, as in torch's lookups.
        may_be_on_host: an argument that a GPU also reads on the CPU.
    """
    tensors: list[tuple[str, Tensor]] = []
    on_host: list[tuple[str, Tensor]] = []  # arguments that are always on the CPU
    on_both: list[tuple[str, Tensor]] = []
    for name, value in arguments:
        value_tensors = _tensors_of(name, value)
        if name == follows and value_tensors and all(tensor.is_meta for _, tensor in value_tensors):
            return
        if is_of_host(name):
            on_host += value_tensors
        elif name == may_be_on_host:
            on_both += value_tensors
        else:
            tensors += value_tensors
    named = *tensors, *on_both, *on_host
    if not named:
        return
    first, device = named[0][0], named[0][1].device
    allowed = {device}
    for at, (name, tensor) in enumerate(named):
        if at == len(tensors) + (0 if device.type == "cuda" else len(on_both)):
            allowed.add(torch.device("cpu"))
        if tensor.device not in allowed:
            raise ArgumentValueError(
                f"recfuse.{operator}: {name} is on {tensor.device}, {first} on {device}. Move all tensors "
                "to one device."
            )


def _tensors_of(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of an argument, each with its name in messages."""
    if isinstance(value, Tensor):
        return [(name, value)]
    if not isinstance(value, (list, tuple)):
        return []
    return [(f"{name}[{at}]", tensor) for at, tensor in enumerate(value) if isinstance(tensor, Tensor)]


def check_1d(operator: str, indices: Tensor, offsets: Tensor) -> None:
    """Raise an error unless fake indices and offsets have 1 dimension."""
    torch._check(
        offsets.dim() == 1 and indices.dim() == 1,
        lambda: (
            f"recfuse.{operator}: indices and offsets have {indices.dim()} and {offsets.dim()} dimensions; "
            "expected 1"
        ),
    )


def check(device: torch.device | str | int | None = None) -> None:
    """Wait for a CUDA device, and raise an error that recfuse's kernels recorded there.

    On a GPU a kernel leaves out a bad index or offset, so the output of its bag is wrong, and records it. No
    call waits for the GPU, so the error is known only after the call has returned. The next call with the
    same table or collection, on any stream, raises it instead of running; calls of other models run. A table
    keeps its first error until it is raised.

    This function raises the errors that no call has raised, one per call. The text has the number of other
    tables with an error: repeat the call until it returns. Replays of CUDA graphs record errors too. Do not
    call it during the capture of a stream. On the CPU the call itself raises.

    Args:
        device: a CUDA device. Default: the current device.

    Raises:
        IndexError: as :func:`embedding_bag`.
        ValueError: as :func:`embedding_bag`.

    Example:
        >>> recfuse.check()
    """
    if isinstance(device, int):
        device = torch.device("cuda", device)
    where = torch.device("cuda" if device is None else device)
    if where.type != "cuda" or not torch.cuda.is_initialized():  # nothing has run there
        return
    torch.ops.recfuse.check(torch.cuda.current_device() if where.index is None else where.index)
