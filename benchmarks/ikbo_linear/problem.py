"""A linear compression: its shape, least work, weights and inputs, and its outputs in float64.

out[b] = W_cand . X_cand[b] + W_user . X_user[cand_to_user[b]]      W_user [m, k_user], W_cand [m, k_cand]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

ALIGNED = 8
"""Elements to a multiple of which K is padded: 16 bytes of two-byte elements."""
MAPPINGS = ("sorted", "shuffled")
# Bytes of inputs that are rotated through at least: several times a GPU's last-level cache.
_ROTATED_BYTES = 1 << 28
_MOST_INPUTS = 8
# Number of candidates whose outputs are computed in float64.
_CHECKED = 6


@dataclass(frozen=True)
class Shape:
    """`candidates` of ceil(candidates / ratio) users; inputs [k, n] each, outputs [m, n]."""

    candidates: int = 1024
    ratio: int = 70
    m: int = 433
    n: int = 256
    k_user: int = 1178
    k_cand: int = 866

    @property
    def users(self) -> int:
        """At least one."""
        return -(-self.candidates // self.ratio)

    @property
    def flop(self) -> int:
        """A product for each candidate and each user."""
        return 2 * self.m * self.n * (self.candidates * self.k_cand + self.users * self.k_user)

    def least_bytes(self, dtype: torch.dtype) -> int:
        """Each input and the output once."""
        inputs = self.n * (self.candidates * self.k_cand + self.users * self.k_user)
        weights = self.m * (self.k_user + self.k_cand)
        return dtype.itemsize * (inputs + weights + self.candidates * self.m * self.n) + 8 * self.candidates

    def __str__(self) -> str:
        """Returns the form in titles."""
        return (
            f"{self.candidates} candidates of {self.users} users, M {self.m}, N {self.n}, "
            f"K {self.k_user} + {self.k_cand}"
        )


@dataclass
class Inputs:
    """A set of inputs, and the forms of them that other contestants produce outside of the timed region."""

    x_user: Tensor  # [users, k_user, n]
    x_cand: Tensor  # [candidates, k_cand, n]
    cand_to_user: Tensor  # int64 [candidates]

    @cached_property
    def padded(self) -> tuple[Tensor, Tensor]:
        """Both with rows of zeros up to a multiple of `ALIGNED`, as their producer can write them."""
        return padded_rows(self.x_user), padded_rows(self.x_cand)

    @cached_property
    def concatenated(self) -> Tensor:
        """[candidates, k_user + k_cand, n]: the user's rows repeated for each candidate."""
        return torch.cat((self.x_user[self.cand_to_user], self.x_cand), 1)


@dataclass
class Weights:
    """A weight, and its forms that are computed in advance."""

    user: Tensor  # [m, k_user]
    cand: Tensor  # [m, k_cand]

    @cached_property
    def whole(self) -> Tensor:
        """[m, k_user + k_cand]."""
        return torch.cat((self.user, self.cand), 1)

    @cached_property
    def padded(self) -> tuple[Tensor, Tensor]:
        """Both with columns of zeros up to a multiple of `ALIGNED`."""
        return padded_columns(self.user), padded_columns(self.cand)

    @cached_property
    def pitched(self) -> tuple[Tensor, Tensor]:
        """Views without the padded columns: rows start at multiples of 16 bytes, and inputs need no
        padding."""
        user, cand = self.padded
        return user[:, : self.user.shape[1]], cand[:, : self.cand.shape[1]]


def padded_columns(weight: Tensor) -> Tensor:
    """[m, k] to [m, k'], k' a multiple of `ALIGNED`."""
    return torch.nn.functional.pad(weight, (0, -weight.shape[1] % ALIGNED))


def padded_rows(x: Tensor) -> Tensor:
    """[count, k, n] to [count, k', n], k' a multiple of `ALIGNED`."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % ALIGNED))


class Problem:
    """Weights and inputs of a shape, seeded: random values, users with nearly equal numbers of candidates."""

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int, mapping: str = "sorted"
    ) -> None:
        """`mapping`: candidates grouped by user, or in random order."""
        self.shape, self.dtype, self.device = shape, dtype, device
        self.notes: list[str] = []  # the choices of contestants
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, dtype=dtype, device=device, generator=generator)

        scale = (shape.k_user + shape.k_cand) ** -0.5
        self.weights = Weights(
            normal(shape.m, shape.k_user).mul_(scale), normal(shape.m, shape.k_cand).mul_(scale)
        )
        sets = 1
        if device.type == "cuda":
            sets = min(max(1, -(-_ROTATED_BYTES // shape.least_bytes(dtype))), _MOST_INPUTS)
        self.inputs = []
        for _ in range(sets):
            users = torch.arange(shape.candidates, device=device) * shape.users // shape.candidates
            if mapping == "shuffled":
                users = users[torch.randperm(shape.candidates, device=device, generator=generator)]
            x_user = normal(shape.users, shape.k_user, shape.n)
            self.inputs.append(Inputs(x_user, normal(shape.candidates, shape.k_cand, shape.n), users))

    def whole(self, output: Tensor) -> Tensor:
        """Returns all values of an output in one row; ValueError for another shape."""
        shape = self.shape
        if output.shape != (shape.candidates, shape.m, shape.n):
            raise ValueError(
                f"the output has shape {tuple(output.shape)}; expected {shape.candidates, shape.m, shape.n}"
            )
        return output.flatten()

    def sampled(self, output: Tensor) -> Tensor:
        """Outputs of the candidates that are compared with float64."""
        return output[self.checked]

    @cached_property
    def checked(self) -> Tensor:
        """Returns the candidates whose outputs are compared with float64: the first, the last, and some
        between."""
        count = min(_CHECKED, self.shape.candidates)
        return torch.linspace(0, self.shape.candidates - 1, count).round().long().to(self.device)

    @cached_property
    def right(self) -> Tensor:
        """Their outputs for the first inputs, in float64."""
        inputs = self.inputs[0]
        x_user = inputs.x_user[inputs.cand_to_user[self.checked]].double()
        user, cand = self.weights.user.double(), self.weights.cand.double()
        return user @ x_user + cand @ inputs.x_cand[self.checked].double()
