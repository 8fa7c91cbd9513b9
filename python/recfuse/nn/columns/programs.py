"""Programs of columns: a program for each form of batches, compiled at the first batch of that form."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from recfuse import _C
from recfuse.nn.columns.addresses import Addresses
from recfuse.nn.columns.inputs import Inputs
from recfuse.nn.columns.lowering import InputRef, Lowered
from recfuse.nn.columns.specs import FeatureRef
from recfuse.ops.embedding_columns import (
    embedding_columns,
    embedding_columns_at,
    embedding_columns_lookups,
)

MOST_BYTES = 1 << 26
"""The largest size of all cached programs of some columns on one device.

Padded lists of values may have any width, so the number of forms has no bound. Programs beyond the limit are
compiled in each call.
"""


def static(tensor: Tensor) -> Tensor:
    """Mark the sizes of a tensor as constants for the compiler, and return the tensor.

    Does the work of ``torch._dynamo.mark_static`` without an import of the compiler. The mark must precede
    the first use in a compiled function, because the compiler treats equal sizes of two tensors as one size.
    """
    tensor._dynamo_static_indices = set(range(tensor.dim()))  # type: ignore[attr-defined]
    tensor._has_dynamo_dim_marking = True  # type: ignore[attr-defined]
    return tensor


def is_captured() -> bool:
    """Return whether a CUDA graph is captured in the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Programs:
    """The programs of some columns, in the order of the output.

    Attributes:
        output_dim: columns of the output.
    """

    def __init__(self, names: Sequence[str], lowered: Lowered) -> None:
        """Create empty programs from the names of the columns, and the columns as arrays."""
        self._names, self._lowered = list(names), lowered
        self.output_dim = lowered.output_dim
        self._made: dict[Any, Tensor] = {}  # never removed: other streams and CUDA graphs may read them
        self._bytes = 0  # of the programs on the host
        self._name_of = _namer(self)
        self._last: tuple[Any, Any, Any] = (None, None, None)

    def chosen(self, numbers: Sequence[int]) -> Programs:
        """Return the programs of a subset of the columns, with the same uses."""
        return Programs([self._names[number] for number in numbers], self._lowered.chosen(numbers))

    @property
    def uses(self) -> list[FeatureRef]:
        """The features that the columns read."""
        return self._lowered.uses

    def compute(
        self,
        weights: Sequence[Tensor],
        batch_inputs: Inputs,
        bounds_check: str,
        device: torch.device | None = None,
    ) -> Tensor:
        """Call the operator on a batch and return ``[batch, output_dim]``; errors have the columns' names.

        ``device`` is the device that computes. Default: the device of the first input.
        """
        program, on_device = self.of(batch_inputs.places, batch_inputs.device if device is None else device)
        inputs = *batch_inputs[2:], batch_inputs.batch
        try:
            return embedding_columns(weights, program, *inputs, self.output_dim, on_device, bounds_check)
        except (ValueError, TypeError, IndexError) as error:
            self.raise_named(error, batch_inputs)

    def compute_at(
        self, weights: Sequence[Tensor], addresses: Addresses, device: torch.device, bounds_check: str
    ) -> Tensor:
        """Return ``[batch, output_dim]`` from the addresses of inputs, on the device of the weights."""
        program, on_device = self.of(addresses.places, device)
        inputs = addresses.number, addresses.batch, self.output_dim
        try:
            return embedding_columns_at(weights, program, *inputs, on_device, bounds_check)
        except (ValueError, TypeError, IndexError) as error:
            raise type(error)(self._named(str(error))) from None

    def look_up(self, batch_inputs: Inputs, bounds_check: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return indices, offsets and factors of a batch's lookups, computed by the operator."""
        program, on_device = self.of(batch_inputs.places, batch_inputs.device)
        inputs = *batch_inputs[2:], batch_inputs.batch
        try:
            return embedding_columns_lookups(program, *inputs, on_device, bounds_check)
        except (ValueError, TypeError, IndexError) as error:
            self.raise_named(error, batch_inputs)

    def of(self, places: tuple[InputRef, ...], device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return the program on the host, and its copy on ``device``.

        Returns None instead of the copy if the device is no GPU, or if each call must create its own copy.
        """
        if torch.compiler.is_dynamo_compiling():
            flat = tuple(number for place in places for number in place)
            name = self._name_of(flat, str(device) if device.type == "cuda" else "")
            program = getattr(self, name)
            return program, getattr(self, f"{name}_on_device") if device.type == "cuda" else None
        last_places, last_device, programs = self._last
        if last_places is not places or last_device != device:
            program, on_device = self.tensor(places, None), None
            if device.type == "cuda" and (places, None) in self._made:
                if (places, device) not in self._made and is_captured():
                    return program, None  # the operator creates a copy that the graph keeps
                on_device = self.tensor(places, device)
            programs = program, on_device
            self._last = places, device, programs
        return programs

    def tensor(self, places: tuple[InputRef, ...], device: torch.device | None) -> Tensor:
        """Return the program on a device, or on the host."""
        key = places, device
        program = self._made.get(key)
        if program is not None:
            return program
        with _disable_current_modes(), torch.inference_mode(False):
            if device is not None:
                program = self._made[key] = static(self.tensor(places, None).to(device))
                return program
            # In torch's memory: a thread may release the last reference after Python has ended.
            program = static(torch.from_numpy(self._words(places)).clone())
        if self._bytes + program.nbytes <= MOST_BYTES:
            self._bytes += program.nbytes
            self._made[key] = program
        return program

    def _words(self, places: tuple[InputRef, ...]) -> np.ndarray[Any, np.dtype[np.int64]]:
        try:
            return _C.embedding_columns_program(*self._lowered.arrays(places))
        except (ValueError, TypeError) as error:
            text = str(error).removeprefix("embedding_columns_program: ")
            raise type(error)(self._named(text)) from None

    def raise_named(self, error: Exception, inputs: Inputs) -> NoReturn:
        """Raise an operator's error again with names, or unchanged in a compiled program."""
        if torch.compiler.is_compiling():
            raise error
        raise type(error)(self._named(str(error), inputs)) from None

    def _named(self, text: str, inputs: Inputs | None = None) -> str:
        """Return the text of an error, with the names of columns and features instead of numbers.

        ``inputs`` maps the numbers of tensors to features.
        """

        def feature(match: re.Match[str]) -> str:
            number = int(match[2]) + (0 if match[1] == "dense" else len(inputs.dense))  # type: ignore[union-attr]
            prefix = match[0][: match.start(2) - match.start() - len("(tensor ")]
            for use, place in enumerate(inputs.places):  # type: ignore[union-attr]
                if place.input == number:
                    column = self._lowered.reader_of(use)
                    of = "" if column is None else f" of column {self._names[column]!r}"
                    return f"{prefix}(feature {self.uses[use].feature!r}{of})"
            return match[0]

        if inputs is not None:
            text = re.sub(
                r"\b(dense|values|offsets|value_weights)\b.*\(tensor (\d+) of its list\)", feature, text
            )

        def name(match: re.Match[str]) -> str:
            number = int(match[1])
            return f"column {self._names[number]!r}" if number < len(self._names) else match[0]

        return re.sub(r"\bcolumn (\d+)\b", name, text)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without programs."""
        kept = {name: value for name, value in vars(self).items() if not name.startswith("program_")}
        del kept["_name_of"]
        return {**kept, "_made": {}, "_bytes": 0, "_last": (None, None, None)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state."""
        self.__dict__.update(state)
        self._name_of = _namer(self)

    def __deepcopy__(self, memo: Any) -> Programs:
        """Return the same object: its columns never change."""
        return self


def _namer(programs: Programs) -> Callable[[tuple[int, ...], str], str]:
    """Return a function that stores a program as an attribute, for the compiler, and returns its name.

    The function takes all numbers of places and the name of a device. A copy on a device is the attribute
    ``<name>_on_device``.

    The name encodes the form: code that was compiled for an object may be called with another object of its
    class, which has no such attribute unless its form is the same. Older compilers take no object as a
    constant, so the function holds it.
    """

    def name_of(flat: tuple[int, ...], device: str) -> str:
        text = f"{device} {' '.join(map(str, flat))}"
        name = f"program_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
        places = tuple(InputRef(*flat[at : at + 3]) for at in range(0, len(flat), 3))
        setattr(programs, name, programs.tensor(places, None))
        if device:
            setattr(programs, f"{name}_on_device", programs.tensor(places, torch.device(device)))
        return name

    # The effect of torch.compiler.assume_constant_result, which would import the compiler here.
    name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return name_of
