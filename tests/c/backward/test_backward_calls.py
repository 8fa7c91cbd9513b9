"""Whole gradients and updates of fused calls by the GPU's code, simulated on the host, against the reference.

The host's code runs with a driver whose kernels are blocks of threads on the host, in random order.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

import recfuse  # noqa: F401 (loads the operators)
from recfuse._codes import CODES as RF_CODES
from support import gpu
from support.backward.calls import (
    BAD,
    HOT,
    KINDS,
    STATES,
    Call,
    check_repeated_calls,
    features_of,
    numbers_of,
)
from support.backward.simulated import CPP_COMPILER
from support.c_program import ROOT
from support.fused import Groups
from support.gpu import INTEGERS
from support.raw_columns.problem import Buffer
from support.reference import DTYPES, Feature, Hyper
from support.simulated_gpu import build_simulator
from support.tables.quantized import Stored, Tables, stored

pytestmark = [pytest.mark.long, pytest.mark.skipif(CPP_COMPILER is None, reason="no C++ compiler")]

LOOKUPS = (
    ("features", ctypes.c_void_p),
    ("n_features", ctypes.c_int64),
    ("indices", ctypes.c_void_p),
    ("lookups", ctypes.c_int64),
    ("offsets", ctypes.c_void_p),
    ("bags", ctypes.c_int64),
    ("index_type", ctypes.c_int32),
    ("offset_type", ctypes.c_int32),
    ("sample_weights", ctypes.c_void_p),
    ("grad", ctypes.c_void_p),
    ("output_dim", ctypes.c_int64),
    ("grad_dtype", ctypes.c_int32),
    ("winners", ctypes.c_void_p),
)
ALLOCATE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_void_p),
)


class Gradient(ctypes.Structure):
    """rf_fused_backward_params."""

    _fields_ = (
        *LOOKUPS,
        *((name, ctypes.c_int64) for name in ("group", "rows", "dim")),
        ("dtype", ctypes.c_int32),
        ("scale_grad_by_freq", ctypes.c_bool),
    )


class Sparse(ctypes.Structure):
    _fields_ = (("allocate", ALLOCATE), ("context", ctypes.c_void_p))


class Matrix(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("states", ctypes.c_void_p * 2),
        ("rows", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
    )


class Rule(ctypes.Structure):
    _fields_ = (
        ("optimizer", ctypes.c_int32),
        ("numbers", ctypes.c_void_p),
        ("stochastic_rounding", ctypes.c_bool),
        ("seed", ctypes.c_uint64),
    )


class Update(ctypes.Structure):
    """rf_fused_update_params."""

    _fields_ = (*LOOKUPS, ("matrices", ctypes.c_void_p), ("n_matrices", ctypes.c_int64), ("update", Rule))


class Stream(ctypes.Structure):
    _fields_ = (("device", ctypes.c_int32), ("stream", ctypes.c_void_p))


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    """The host's code of the backward and the driver of tests/c/warps/gpu.c."""
    backward = ROOT / "csrc/families/fused_backward"
    own = [path for path in backward.rglob("*.c") if not {"cpu", "python", "torch"} & set(path.parts)]
    others = "core/validate.c", "families/fused_embedding_bag/check_fused.c", "gpu/driver/gpu.c"
    sources = [*own, *(ROOT / "csrc" / path for path in others)]
    return build_simulator("the backward's host code on the host", sources)


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DEVICE", torch.device("cpu"))


def place(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Simulated(Call):
    """A call by the GPU's functions of the C library."""

    library: ctypes.CDLL

    def lookups(self) -> dict[str, Any]:
        self.rows = self.problem.rows.contiguous()
        return {
            "features": place(self.rows),
            "n_features": len(self.rows),
            "indices": place(self.indices),
            "lookups": self.indices.numel(),
            "offsets": place(self.offsets),
            "bags": self.grad.shape[0],
            "index_type": INTEGERS.index(self.indices.dtype),
            "offset_type": INTEGERS.index(self.offsets.dtype),
            "sample_weights": place(self.factors),
            "grad": place(self.grad),
            "output_dim": self.problem.output_dim,
            "grad_dtype": DTYPES.index(self.grad.dtype),
            "winners": place(self.winners),
        }

    def run(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, f"rf_fused_embedding_bag_{name}_cuda")(
            *arguments, None, ctypes.byref(Stream())
        )
        assert status == 0, self.library.rf_last_error().decode()

    def gradients(self, sparse: bool, by_freq: bool = False) -> list[Any]:
        """Sparse gradients of all weights at once."""
        count = len(self.weights)
        params = (Gradient * count)()
        for at, weight in enumerate(self.weights):
            params[at] = Gradient(
                **self.lookups(), group=at, rows=weight.shape[0], dim=weight.shape[1],
                dtype=DTYPES.index(weight.dtype), scale_grad_by_freq=by_freq,
            )  # fmt: skip
        if not sparse:
            dense = [torch.full_like(weight, torch.nan) for weight in self.weights]
            for at, gradient in enumerate(dense):
                self.run("backward", ctypes.byref(params[at]), ctypes.c_void_p(gradient.data_ptr()))
            return dense
        made: dict[int, tuple[Tensor, Tensor]] = {}

        def allocate(at: int | None, rows: int, to_rows: Any, to_values: Any) -> int:
            weight = self.weights[at or 0]
            values = torch.full((rows, weight.shape[1]), torch.nan, dtype=weight.dtype)
            made[at or 0] = torch.full((rows,), -9), values
            to_rows[0], to_values[0] = (tensor.data_ptr() for tensor in made[at or 0])
            return 0

        callback = ALLOCATE(allocate)
        outputs = (Sparse * count)(*(Sparse(callback, at) for at in range(count)))
        self.run("sparse_gradients", params, outputs, ctypes.c_int64(count))
        return [made[at] for at in range(count)]

    def update(self, kind: int, states: list[Tensor], numbers: Tensor, *rounding: Any) -> None:
        matrices = (Matrix * max(len(self.weights), 1))()
        for at, weight in enumerate(self.weights):
            own = [place(state) for state in states[at * STATES[kind] : (at + 1) * STATES[kind]]]
            pointers = (ctypes.c_void_p * 2)(*own, *[None] * (2 - len(own)))
            matrices[at] = Matrix(place(weight), pointers, *weight.shape, DTYPES.index(weight.dtype))
        rule = Rule(kind, place(numbers), *(rounding or (False, 0)))
        params = Update(
            **self.lookups(), matrices=ctypes.addressof(matrices), n_matrices=len(self.weights), update=rule
        )
        self.run("update", ctypes.byref(params))


class Pooling(ctypes.Structure):
    """rf_fused_embedding_bag_params."""

    _fields_ = (
        ("buffers", ctypes.c_void_p),
        ("n_buffers", ctypes.c_int64),
        *LOOKUPS[:8],
        ("check_bounds", ctypes.c_bool),
        ("sample_weights", ctypes.c_void_p),
        ("prefetch_distance", ctypes.c_int32),
        ("output_dtype", ctypes.c_int32),
        ("output", ctypes.c_void_p),
        ("output_dim", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
    )


def buffer_of(one: Stored, dim: int) -> Buffer:
    weight, parameters = one.weight, one.parameters
    names = RF_CODES["dtype"]
    if weight.dtype != torch.uint8:
        return Buffer(place(weight), weight.numel(), names.index(str(weight.dtype).removeprefix("torch.")))
    return Buffer(
        place(weight), one.values.numel(), names.index("int8" if weight.shape[1] == dim else "int4"),
        names.index("float16"), place(parameters), weight.stride(0), 2 * parameters.stride(0),
    )  # fmt: skip


@pytest.mark.parametrize("kinds", (("float32", "float16"), ("int8", "int4", "float16")), ids=str)
def test_gradients_of_sample_weights(kinds: tuple[str, ...], library: ctypes.CDLL) -> None:
    torch.manual_seed(8)
    tables = [
        stored(torch.randn(9 + dim, dim), kind, "before", 4, align=4)
        for dim in (6, 16, 132)
        for kind in kinds
    ]
    problem = Tables(tables, [Feature(table, "sum", (None, 2)[table % 2]) for table in range(len(tables))])
    buffers = (Buffer * len(tables))(*map(buffer_of, tables, problem.dims))
    for bags in (1, 30):
        indices, offsets = problem.lookups(bags, 40)
        indices[torch.rand(indices.shape) < 0.1] = -1
        grad, got = torch.randn(bags, problem.output_dim), torch.full((indices.numel(),), torch.nan)
        params = Pooling(
            buffers=ctypes.addressof(buffers), n_buffers=len(tables), features=place(problem.rows),
            n_features=len(tables), indices=place(indices), lookups=indices.numel(), offsets=place(offsets),
            bags=bags, index_type=1, offset_type=1, output_dim=problem.output_dim,
            output_stride=problem.output_dim,
        )  # fmt: skip
        status = library.rf_fused_embedding_bag_sample_weights_backward_cuda(
            ctypes.byref(params), ctypes.c_void_p(place(grad)), 0, ctypes.c_void_p(place(got)), None,
            ctypes.byref(Stream()),
        )  # fmt: skip
        assert status == 0, library.rf_last_error().decode()
        want = torch.ops.recfuse.fused_embedding_bag_quantized_sample_weights_backward(
            grad, *problem.lists(), problem.rows, indices, offsets
        )
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_parameters_that_a_gpu_cannot_read(library: ctypes.CDLL) -> None:
    one = stored(torch.randn(20, 6), "int8", "before", 0, align=2)  # rows of 10 bytes
    problem, buffer, got = Tables([one]), buffer_of(one, 6), torch.zeros(1)
    indices, offsets, grad = torch.tensor([0]), torch.tensor([0, 1]), torch.ones(1, 6)
    params = Pooling(
        buffers=ctypes.addressof(buffer), n_buffers=1, features=place(problem.rows), n_features=1,
        indices=place(indices), lookups=1, offsets=place(offsets), bags=1, index_type=1, offset_type=1,
        output_dim=6, output_stride=6,
    )  # fmt: skip
    status = library.rf_fused_embedding_bag_sample_weights_backward_cuda(
        ctypes.byref(params), ctypes.c_void_p(place(grad)), 0, ctypes.c_void_p(place(got)), None,
        ctypes.byref(Stream()),
    )  # fmt: skip
    assert status != 0
    assert "10 bytes apart; expected float16 (1), aligned to 4 bytes" in library.rf_last_error().decode()


@pytest.fixture
def call_of(library: ctypes.CDLL) -> Any:
    Simulated.library = library
    return Simulated


FLOAT32 = torch.float32
SPECS = {
    "small tables": [(FLOAT32, 8, (5, 40)), (FLOAT32, 36, (30,))],
    "a large table": [(FLOAT32, 8, (9, 40, 17_000))],
    "both paths": [(FLOAT32, 8, (*[3, 8] * 33, 17_000))],
    "segments of the sort": [(FLOAT32, 8, (2000, 40, 1900, 30, 2048, 9))],
    "unaligned": [(FLOAT32, 5, (6, 30))],
    "several matrices": [
        (FLOAT32, 8, (9, 40)),
        (FLOAT32, 260, (30,)),
        (torch.float16, 8, (20,)),
        (FLOAT32, 36, (17_000, 12)),
    ],
}


@pytest.mark.parametrize("kind", ("sum", "modes", "weighted"))
@pytest.mark.parametrize(
    "name", ("small tables", "a large table", "segments of the sort", "unaligned", "several matrices")
)
def test_gradients(name: str, kind: str, call_of: Any) -> None:
    torch.manual_seed(1)
    tables = sum(len(sizes) for _, _, sizes in SPECS[name])
    problem = Groups(SPECS[name], features_of(tables, kind != "modes"))
    for bags, longest in ((7, 6), (40, 12)):
        indices, offsets = problem.lookups(bags, longest)
        factors = torch.randn(indices.numel()) if kind == "weighted" else None
        call = call_of(problem, torch.randn(bags, problem.output_dim), indices, offsets, factors)
        call.check_gradients(by_freq=bags == 40)


@pytest.mark.parametrize("kind", range(4), ids=KINDS)
def test_updates(kind: int, call_of: Any) -> None:
    torch.manual_seed(2)
    for name in ("small tables", "a large table", "both paths"):
        tables = sum(len(sizes) for _, _, sizes in SPECS[name])
        problem = Groups(SPECS[name], features_of(tables, False))
        call = call_of(problem, torch.randn(30, problem.output_dim), *problem.lookups(30, 9))
        call.check_update(kind)


def test_a_row_that_all_lookups_want(call_of: Any) -> None:
    torch.manual_seed(3)
    for rows in (40, 17_000):
        problem = Groups([(FLOAT32, 8, (rows, 30))], [Feature(0, "sum", None), Feature(1, "mean", None)])
        indices, offsets = problem.lookups(60, 150)
        indices[torch.rand(indices.shape) < 0.9] = 2
        call = call_of(problem, torch.randn(60, 16), indices, offsets)
        call.check_gradients()
        call.check_update(0)


def test_segments_of_several_chunks(call_of: Any) -> None:
    """Each table of 2,000 rows is sorted in a separate pass, tables of 1,000 in pairs; some lookups do not
    count, and whole bags are empty."""
    torch.manual_seed(7)
    for rows in ((2000, 2040, 1, 2000), (1000, 1000, 1000, 1000)):
        padded = [Feature(table, "sum", (None, 3)[table % 2]) for table in range(4)]
        problem = Groups([(FLOAT32, 4, rows)], padded)
        indices, offsets = problem.lookups(500, 40)
        indices[torch.rand(indices.shape) < 0.2] = -1
        indices[torch.rand(indices.shape) < 0.1] = 0
        factors = torch.randn(indices.numel())
        call = call_of(problem, torch.randn(500, problem.output_dim), indices, offsets, factors)
        call.check_gradients()


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("rows", ((9, 40, 17_000), (9, 2047, 2000)))
def test_bad_contents_do_no_harm(rows: tuple[int, ...], name: str, call_of: Any) -> None:
    problem = Groups([(FLOAT32, 8, rows)], features_of(3, True))
    indices, offsets = problem.lookups(9)
    BAD[name](indices, offsets)
    if name == "below":
        offsets[9] = -1  # begin of a table's lookups
    call = call_of(problem, torch.randn(9, 24), indices, offsets)
    if name in ("negative", "beyond", "largest"):
        call.check_gradients()
    (dense,), ((rows, values),) = call.gradients(False), call.gradients(True)
    assert dense.isfinite().all() and values.isfinite().all() and (rows.diff() > 0).all()
    call.update(0, [], numbers_of())


@pytest.mark.parametrize("name", ("small tables", "a large table"))
def test_a_call_begins_with_its_first_lookup(name: str, call_of: Any) -> None:
    """The first bag has no lookups if its offset is not 0, as in the forward pass."""
    torch.manual_seed(5)
    tables = sum(len(sizes) for _, _, sizes in SPECS[name])
    problem = Groups(
        SPECS[name], [Feature(table, ("mean", "sum")[table % 2], None) for table in range(tables)]
    )
    indices, offsets = problem.lookups(9)
    offsets[1:3] = offsets[1:3].clamp(min=3)
    grad = torch.randn(9, problem.output_dim)
    without, late = indices.clone(), offsets.clone()
    without[: offsets[1]] = -1
    late[0] = 2
    want = call_of(problem, grad, without, offsets).gradients(False)
    for found in (call_of(problem, grad, indices, late).gradients(sparse) for sparse in (False, True)):
        for gradient, right in zip(found, want, strict=True):
            if not isinstance(gradient, Tensor):
                gradient = torch.zeros_like(right).index_add_(0, *gradient)
            torch.testing.assert_close(gradient, right)


def test_without_decay_non_finite_weights_do_not_change(call_of: Any) -> None:
    for rows in (6, 17_000):
        problem = Groups([(FLOAT32, 8, (rows,))], [Feature(0, "sum", None)])
        problem.weights[0][:, 0] = torch.inf
        call = call_of(problem, torch.ones(5, 8), torch.tensor([1, 2, 3, 3, 1]), torch.arange(6))
        call.update(0, [], numbers_of(Hyper()))
        assert (call.weights[0][:, 0] == torch.inf).all() and call.problem.tables[0].isfinite()[:, 1:].all()


@pytest.mark.parametrize("each", (1, 3, 100))
def test_bags_of_equal_length(each: int, call_of: Any) -> None:
    """And nearly equal: no search is made if all lookups of a table are where equal bags would have them."""
    torch.manual_seed(9)
    bags = 7000 // each
    problem = Groups(
        [(FLOAT32, 4, (17_000, 40, 5000))],
        [Feature(table, "sum", (None, 3)[table % 2]) for table in range(3)],
    )
    indices = torch.cat([torch.randint(rows, (bags * each,)) for rows in (17_000, 40, 5000)])
    offsets = torch.arange(3 * bags + 1) * each
    ends = [{last // each + 1: last - (last // each + 1) * each} for last in (2047, 4095)]  # per chunk
    for moved in ({}, *ends, {bags // 2: 1}, {bags - 1: 1, bags: 1, 3 * bags - 1: 1}, {bags + 5: -1}):
        other = offsets.clone()
        for at, by in moved.items():
            other[at] += by
        call = call_of(problem, torch.randn(bags, problem.output_dim), indices, other)
        call.check_gradients()
        call.check_update(0)


@pytest.mark.parametrize("name", HOT)
def test_rows_are_sorted_alike_each_time(name: str, call_of: Any) -> None:
    """Several tiles of a table; the threads of each run come in another order."""
    check_repeated_calls(call_of, name, bags=100, longest=160)
