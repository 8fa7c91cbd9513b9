"""What all operators share: the handle of their Python side, what a call may do now, their errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from recfuse import _library  # noqa: F401  (registers the operators)
from recfuse._codes import DTYPES
from recfuse.errors import ArgumentTypeError, ArgumentValueError, NotATensorError, a_type, translate

HAS_CUDA_KERNELS = torch.version.hip is None  # on ROCm too, torch calls the device "cuda"

# Kept alive for the life of the process: dropping it would take the operators away.
library = torch.library.Library("recfuse", "FRAGMENT")
below_autograd = torch._C._AutoDispatchBelowAutograd


def check_tensor(function: str, name: str, value: Any) -> None:
    """Raises where an argument is no tensor."""
    if not isinstance(value, Tensor):
        raise NotATensorError(
            f"recfuse.{function}: {name} is {a_type(value)}, must be a torch.Tensor"
        ) from None


def autocast(tensors: Sequence[Tensor | None]) -> list[Any]:
    """As autocast has torch's matmuls: float64 stays."""
    return [
        tensor.to(torch.get_autocast_dtype(tensor.device.type))
        if tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
        else tensor
        for tensor in tensors
    ]


def is_autocast(tensor: Tensor, transformed: bool) -> bool:
    """Whether autocast is on where a tensor is. ``transformed``: see below; the compiler cannot ask for all
    devices at once, which is quicker. Torch knows no autocast of meta tensors, and raises.
    """
    if not transformed and not torch._C._is_any_autocast_enabled():
        return False
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def is_transformed() -> bool:
    """Whether the call must be that of the operator itself: for the compiler, torch.jit.trace, torch.func."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
    )


def is_compiled() -> bool:
    """Whether torch.compile follows the call: not torch.export, whose programs have no optimizer."""
    return torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()


def is_traced() -> bool:
    """Whether a program is being recorded, but not by torch.func's transforms."""
    return bool(torch._C._len_torch_dispatch_stack()) and not torch._C._are_functorch_transforms_active()


def is_readable(tensor: Tensor) -> bool:
    """Whether the contents of a tensor are there to be looked at: not while a program is traced."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
        or tensor.is_meta
        or type(tensor) not in (Tensor, torch.nn.Parameter)
    )


def needs_derivatives(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a call must go through a Function: something may need a derivative, or refuse to have one."""
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def call_below_autograd(operator: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls an operator from a Function's forward."""
    if not torch._C._are_functorch_transforms_active():
        with below_autograd():
            return operator(*arguments, **options)
    # Forward runs without gradients, but an outer transform may want its own.
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), below_autograd():
        return operator(*arguments, **options)


def raise_translated(error: RuntimeError) -> NoReturn:
    """Raises what :func:`recfuse.errors.translate` makes of ``error``."""
    translated = translate(error)
    if translated is error:
        raise error
    raise translated from None


def dtype_code(tensor: Tensor, operator: str, argument: str) -> int:
    """The code of a dtype; the compiler asks for it before the operator has looked at its arguments."""
    if tensor.dtype not in DTYPES:
        name = str(tensor.dtype).removeprefix("torch.")
        raise ArgumentTypeError(
            f"recfuse.{operator}: {argument} is {name}, must be float32, float16 or bfloat16"
        )
    return DTYPES.index(tensor.dtype)


def check_devices(operator: str, tensors: Iterable[tuple[str, Tensor | None]]) -> None:
    """Raises where tensors of a fake call are on several devices. A meta tensor beside others brings a call
    there, whose result would be memory that nobody has written.
    """
    first = None
    for name, tensor in tensors:
        if tensor is None:
            continue
        if first is None:
            first = name, tensor.device
        elif tensor.device != first[1]:
            raise ArgumentValueError(
                f"recfuse.{operator}: {name} is on {tensor.device}, {first[0]} on {first[1]}; move all "
                "tensors to one device"
            )


def numbered(name: str, tensors: Iterable[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a list, each with its name in messages."""
    return ((f"{name}[{at}]", tensor) for at, tensor in enumerate(tensors))


def check_1d(operator: str, indices: Tensor, offsets: Tensor) -> None:
    """Raises where a fake indices or offsets has another number of dimensions."""
    torch._check(
        offsets.dim() == 1 and indices.dim() == 1,
        lambda: (
            f"recfuse.{operator}: indices and offsets have {indices.dim()} and {offsets.dim()} dimensions, "
            "must have 1"
        ),
    )


def check(device: torch.device | str | int | None = None) -> None:
    """Waits for a CUDA device, and raises what recfuse's kernels have found wrong there.

    On the GPU a bad index or offset does no harm: its row counts as zero, so its bag's output is wrong. It
    is found after the call that brought it has returned, since no call waits for the GPU. The next call with
    the same table, or the same collection, raises it instead of running, on whatever stream it comes; calls
    of other models run. Of one table the first error is kept until it is raised. Errors that no call has
    raised are raised here, one a call; the text says how many other tables have an error too: call it again
    until it returns. Errors in a replay of a CUDA graph are raised in the same way. Do not call it while a
    stream is captured. On the CPU the call itself raises, and there is nothing to do.

    Args:
        device: a CUDA device; by default the current one.

    Raises:
        IndexError, ValueError: as :func:`embedding_bag`.
    """
    if isinstance(device, int):
        device = torch.device("cuda", device)
    where = torch.device("cuda" if device is None else device)
    if where.type != "cuda" or not torch.cuda.is_initialized():  # nothing has run there
        return
    try:
        torch.ops.recfuse.check(torch.cuda.current_device() if where.index is None else where.index)
    except RuntimeError as error:
        raise_translated(error)
