"""ikbo_linear and ikbo_linear_chain: values, bad calls, gradients, transforms; modules are in tests/nn."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.library import opcheck

import recfuse
from support.ikbo import ACTIVATIONS, DTYPES, LAYOUTS, NOTHING, Case, Problem, random_case, reference
from support.reference import assert_close_to_reference

OPS = torch.ops.recfuse
PATHS = ("decomposed", "aligned", "broadcast", "auto")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_layers(dtype, path):
    draw = random.Random(f"{dtype} {path}")
    for _ in range(150):
        problem = Problem(random_case(draw, dtype=dtype))
        problem.check(problem.run(path=path))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("n", (None, 1, 5, 300))
def test_bias_and_activation(activation, n):
    for dtype, bias, chain in itertools.product(DTYPES, (False, True), (False, True)):
        problem = Problem(Case(m=31, n=n, dtype=dtype, bias=bias, activation=activation, chain=chain))
        problem.check(problem.run())


@pytest.mark.parametrize("weight_layout", LAYOUTS)
@pytest.mark.parametrize("input_layout", LAYOUTS)
def test_layouts(weight_layout, input_layout):
    for n, dtype in itertools.product((None, 4), (torch.float32, torch.bfloat16)):
        case = Case(n=n, dtype=dtype, weight_layout=weight_layout, input_layout=input_layout, bias=True)
        problem = Problem(case)
        problem.bias = LAYOUTS["spread"](problem.bias)
        spread = torch.stack((problem.maps[0], problem.maps[0] + 10**6), 1)[:, 0]
        problem.maps = [spread]
        problem.check(problem.run())


def test_every_map():
    for items in ((1, 6), (6, 1), (6, 6), (3, 50)):
        problem = Problem(Case(items=items))
        users, candidates = items
        for found in (
            torch.zeros(candidates, dtype=torch.int64),
            torch.full((candidates,), users - 1),
            torch.arange(candidates) % users,
            (torch.arange(candidates) % users).flip(0),
            torch.randint(0, users, (candidates,)).sort().values,
            torch.tensor([users - 1]).expand(candidates),
        ):
            for dtype in (torch.int32, torch.int64):
                problem.maps = [found.to(dtype)]
                problem.check(problem.run())
                problem.check(problem.run(bounds_check="off"))


@pytest.mark.parametrize("n", (None, 3))
@pytest.mark.parametrize("path", PATHS)
def test_nothing_of_something(path, n):
    for changes in NOTHING:
        for bias in (False, True):
            problem = Problem(Case(**{"n": n, "bias": bias, **changes}))
            problem.check(problem.run(path=path))
    problem = Problem(Case(n=0, bias=True))
    assert problem.run(path=path).shape == (9, 7, 0)


@pytest.mark.parametrize("wrong", (torch.nan, torch.inf, -torch.inf))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize("path", PATHS)
def test_non_finite_inputs_stay_in_their_rows(path, dtype, wrong):
    for n in (None, 5):
        problem = Problem(Case(n=n, dtype=dtype, items=(3, 40)))
        clean = problem.run(path=path)
        problem.inputs[1][7] = wrong
        problem.inputs[0][2] = wrong
        got = problem.run(path=path)
        touched = problem.maps[0] == 2
        touched[7] = True
        assert torch.equal(got[~touched], clean[~touched])
        assert not got[touched].isfinite().any()


def test_overflow_and_nan_are_kept_by_activations():
    weights = [torch.eye(1), torch.eye(1)]
    values = torch.tensor([[torch.nan], [torch.inf], [-torch.inf], [-200.0], [200.0], [-0.0]])
    nan, inf = torch.nan, torch.inf  # torch's own gelu makes inf NaN, or not: it depends on the vector
    for name, want in (
        ("none", [nan, inf, -inf, -200, 200, 0]),
        ("relu", [nan, inf, 0, 0, 200, 0]),
        ("gelu", [nan, inf, nan, 0, 200, 0]),
        ("silu", [nan, inf, nan, 0, 200, 0]),
    ):
        got = recfuse.ikbo_linear(*weights, torch.zeros(1, 1), values, torch.zeros(6).long(), activation=name)
        torch.testing.assert_close(got.flatten(), torch.tensor(want), equal_nan=True)
    half = [weight.half() for weight in weights]
    large = torch.full((1, 1), 60000.0).half()
    assert recfuse.ikbo_linear(*half, large, large, torch.zeros(1).long()).item() == torch.inf


def test_the_same_bits_for_any_number_of_threads(threads):
    problem = Problem(Case(m=40, n=33, items=(5, 300), dtype=torch.bfloat16, activation="gelu", bias=True))
    results = []
    for count in (1, 2, 3, 1):
        threads(count)
        results.append(problem.run())
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_output_equals_the_layer_over_concatenated_features():
    problem = Problem(Case(m=33, features=(17, 11), items=(6, 50), dtype=torch.float64, bias=True))
    for n in (None, 4):
        problem = Problem(Case(m=33, n=n, features=(17, 11), items=(6, 50), dtype=torch.float64))
        x = torch.cat((problem.inputs[0][problem.maps[0]], problem.inputs[1]), 1)
        weight = torch.cat(problem.weights, 1)
        torch.testing.assert_close(problem.run(), F.linear(x, weight) if n is None else weight @ x)


# ---- bad calls

WEIGHT, USERS, CANDIDATES = torch.randn(7, 5), torch.randn(4, 5, 6), torch.randn(9, 5, 6)
MAP = torch.arange(9) % 4


def call(**changes):
    given = {"w_user": WEIGHT, "w_cand": WEIGHT, "x_user": USERS, "x_cand": CANDIDATES, "cand_to_user": MAP}
    return recfuse.ikbo_linear(**{**given, **changes})


def at(position, value, dtype=torch.int64):
    changed = MAP.clone()
    changed[position] = value
    return changed.to(dtype)


BAD_CALLS = {
    "w_user's type": ({"w_user": WEIGHT.long()}, TypeError, "w_user is int64; expected float16, bfloat16"),
    "w_user complex": ({"w_user": WEIGHT.cfloat()}, TypeError, "w_user is complex64"),
    "w_cand's type": (
        {"w_cand": WEIGHT.half()},
        TypeError,
        "w_cand is float16; expected float32 as the first",
    ),
    "x_cand's type": ({"x_cand": CANDIDATES.double()}, TypeError, "x_cand is float64"),
    "bias' type": ({"bias": torch.zeros(7).half()}, TypeError, "bias is float16"),
    "w_user's dimensions": ({"w_user": WEIGHT[0]}, ValueError, "w_user has 1 dimensions; expected 2"),
    "w_cand's rows": ({"w_cand": WEIGHT[:3]}, ValueError, "w_cand has 3 rows; expected 7"),
    "x_user's dimensions": (
        {"x_user": USERS[0, 0]},
        ValueError,
        r"x_user is float32 \[6\]; expected \[items",
    ),
    "x_cand's dimensions": ({"x_cand": CANDIDATES[..., 0]}, ValueError, "of as many dimensions as the first"),
    "x_user's k": (
        {"x_user": USERS[:, :3]},
        ValueError,
        r"x_user is float32 \[4, 3, 6\]; expected \[items, 5",
    ),
    "x_cand's k": ({"x_cand": CANDIDATES[:, 1:]}, ValueError, r"x_cand .* w_cand has so many columns"),
    "x_cand's n": ({"x_cand": CANDIDATES[..., 1:]}, ValueError, "all inputs have one n"),
    "map's type": (
        {"cand_to_user": MAP.short()},
        TypeError,
        "cand_to_user is int16; expected int32 or int64",
    ),
    "map's float": ({"cand_to_user": MAP.float()}, TypeError, "cand_to_user is float32"),
    "map's length": (
        {"cand_to_user": MAP[:8]},
        ValueError,
        "cand_to_user has 8 elements; expected an element for",
    ),
    "map's dimensions": ({"cand_to_user": MAP[:, None]}, ValueError, "cand_to_user has 2 dimensions"),
    "bias' length": ({"bias": torch.zeros(6)}, ValueError, "bias has 6 elements; expected the 7 rows"),
    "bias' dimensions": ({"bias": torch.zeros(7, 1)}, ValueError, "bias has 2 dimensions"),
    "activation": (
        {"activation": "tanh"},
        ValueError,
        'activation is "tanh"; expected "none", "relu", "gelu"',
    ),
    "path": ({"path": "quick"}, ValueError, 'path is "quick"; expected "decomposed", "aligned", "broadcast"'),
    "fused": ({"path": "fused"}, NotImplementedError, 'path is "fused", which is a kernel of GPUs'),
    "bounds_check": ({"bounds_check": "maybe"}, ValueError, "bounds_check is"),
    "no tensor": ({"x_cand": [1.0]}, TypeError, "x_cand is a list; expected a torch.Tensor"),
    "no weight": ({"w_user": None}, TypeError, "w_user is a NoneType"),
    "index above": ({"cand_to_user": at(3, 4)}, IndexError, r"cand_to_user\[3\] is 4; expected 0 to 3"),
    "index below": ({"cand_to_user": at(8, -1)}, IndexError, r"cand_to_user\[8\] is -1; expected 0 to 3"),
    "index int32": ({"cand_to_user": at(0, 2**31 - 1, torch.int32)}, IndexError, r"\[0\] is 2147483647"),
    "index huge": ({"cand_to_user": at(0, 2**63 - 1)}, IndexError, r"\[0\] is 9223372036854775807"),
    "no user": ({"x_user": USERS[:0]}, IndexError, "no index is valid, since x_user has 0 items"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_raise_clear_errors(name):
    changes, kind, words = BAD_CALLS[name]
    with pytest.raises(kind, match=rf"^recfuse\.ikbo_linear: .*{words}"):
        call(**changes)
    with pytest.raises(kind, match=words):
        call(**{"bias": torch.zeros(7, requires_grad=True), **changes})
    assert call().shape == (9, 7, 6)


@pytest.mark.parametrize("path", PATHS)
def test_bad_contents_of_a_chain_name_their_map(path):
    problem = Problem(Case(features=(2, 3, 4), items=(2, 5, 8), chain=True))
    for level, (position, value, most) in enumerate(((4, 2, 1), (1, -7, 4))):
        good = problem.maps[level]
        problem.maps[level] = good.clone()
        problem.maps[level][position] = value
        text = (
            rf"^recfuse\.ikbo_linear_chain: maps\[{level}\]\[{position}\] is {value}; expected 0 to {most},"
        )
        with pytest.raises(IndexError, match=text):
            problem.run(path=path)
        problem.maps[level] = good
    problem.check(problem.run(path=path))


def test_bad_chains():
    weights, inputs, maps = [WEIGHT, WEIGHT], [USERS, CANDIDATES], [MAP]
    for given, words in (
        (([WEIGHT], [USERS], []), "weights has 1 tensors; expected 2 to 4"),
        (([], [], []), "weights has 0 tensors; expected 2 to 4"),
        (([WEIGHT] * 5, [USERS] * 5, [MAP] * 4), "weights has 5 tensors"),
        ((weights, [USERS], maps), "inputs has 1 tensors; expected 2, a tensor for each level$"),
        ((weights, inputs, []), "maps has 0 tensors; expected 1, a tensor for each level but the first"),
        ((weights, inputs, [MAP, MAP]), "maps has 2 tensors; expected 1"),
        ((weights, [USERS, CANDIDATES[:, :4]], maps), r"inputs\[1\] is float32 \[9, 4, 6\]"),
    ):
        with pytest.raises(ValueError, match=rf"^recfuse\.ikbo_linear_chain: .*{words}"):
            recfuse.ikbo_linear_chain(*given)
        with pytest.raises(ValueError, match=words):
            recfuse.ikbo_linear_chain(*given, bias=torch.zeros(7, requires_grad=True))
    with pytest.raises(TypeError, match=r"maps\[0\] is an int; expected a torch.Tensor"):
        recfuse.ikbo_linear_chain(weights, inputs, [3])


def test_the_path_is_told():
    problem = Problem(Case())
    given = *problem.weights, *problem.inputs, *problem.maps
    assert recfuse.ikbo_linear_path(*given) == "broadcast"
    lists = problem.weights, problem.inputs, problem.maps
    assert recfuse.ikbo_linear_chain_path(*lists, bias=torch.zeros(7)) == "broadcast"
    for path in PATHS[:3]:
        assert recfuse.ikbo_linear_path(*given, path=path) == path
    with pytest.raises(ValueError, match="cand_to_user has 8 elements"):
        recfuse.ikbo_linear_path(*given[:-1], MAP[:8])


# ---- gradients

GRADIENT_CASES = [
    *(Case(m=3, n=n, bias=True, activation=a) for n in (None, 2) for a in ACTIVATIONS),
    Case(m=2, n=None, features=(2, 3, 1), items=(2, 3, 5), bias=True, chain=True),
    Case(m=2, n=2, features=(2, 1, 2, 3), items=(2, 3, 3, 4), chain=True, activation="silu"),
]


def leaves(problem):
    for tensor in problem.tensors():
        tensor.requires_grad_()
    return problem


@pytest.mark.parametrize(
    "case", GRADIENT_CASES, ids=lambda case: f"{case.n} {case.activation} {len(case.items)}"
)
def test_gradcheck(case):
    problem = Problem(Case(**{**vars(case), "dtype": torch.float64}))
    levels = len(case.features)

    def function(*tensors):
        problem.weights, problem.inputs = list(tensors[:levels]), list(tensors[levels : 2 * levels])
        problem.bias = tensors[-1] if case.bias else None
        return problem.run()

    given = [tensor.requires_grad_() for tensor in problem.tensors()]
    assert torch.autograd.gradcheck(function, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, given, fast_mode=True)


@pytest.mark.parametrize("n", (None, 3))
def test_every_set_of_gradients(n):
    case = Case(m=4, n=n, dtype=torch.float64, bias=True, activation="gelu")
    for wanted in itertools.product((False, True), repeat=5):
        problem = Problem(case)
        for tensor, needed in zip(problem.tensors(), wanted, strict=True):
            tensor.requires_grad_(needed)
        got = problem.run()
        assert got.requires_grad == any(wanted)
        if not any(wanted):
            continue
        needing = [tensor for tensor in problem.tensors() if tensor.requires_grad]
        factor = torch.randn_like(got)
        ours = torch.autograd.grad((got * factor).sum(), needing)
        want = reference(problem.weights, problem.inputs, problem.maps, problem.bias, "gelu")
        theirs = torch.autograd.grad((want * factor).sum(), needing)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("n", (None, 1))
def test_sums_over_candidates_are_in_float32(dtype, n):
    tail = () if n is None else (n,)
    users = torch.zeros(2, 1, *tail, dtype=dtype, requires_grad=True)
    candidates = torch.zeros(4096, 1, *tail, dtype=dtype)
    one = torch.ones(1, 1, dtype=dtype)
    recfuse.ikbo_linear(one, one, users, candidates, torch.zeros(4096).long()).sum().backward()
    assert users.grad.flatten().tolist() == [4096, 0]  # 2048 + 1 is 2048 in float16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_gradients(dtype):
    draw = random.Random(str(dtype))
    for _ in range(25):
        problem = leaves(Problem(random_case(draw, dtype=dtype, activation="none", weight_layout="plain",
                                             input_layout="plain")))  # fmt: skip
        wide = [tensor.detach().double().requires_grad_() for tensor in problem.tensors()]
        got = problem.run()
        factor = torch.randn_like(got)
        got.backward(factor)
        levels = len(problem.weights)
        bias = wide[-1] if problem.case.bias else None
        reference(wide[:levels], wide[levels : 2 * levels], problem.maps, bias).backward(factor.double())
        for ours, theirs in zip(problem.tensors(), wide, strict=True):
            scale = 1 + float(theirs.grad.abs().max()) if theirs.numel() else 1
            assert ours.grad.dtype == dtype
            assert_close_to_reference(ours.grad, theirs.grad, 8 * torch.finfo(dtype).eps * scale)


def test_forward_mode_is_refused():
    problem = Problem(Case())
    given = *problem.weights, *problem.inputs, *problem.maps
    with pytest.raises(NotImplementedError, match=r"recfuse\.ikbo_linear: forward-mode"):
        torch.func.jvp(lambda w: recfuse.ikbo_linear(w, *given[1:]), (WEIGHT,), (WEIGHT,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(WEIGHT, WEIGHT)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            recfuse.ikbo_linear(dual, *given[1:])


def test_functorch():
    problem = Problem(Case(dtype=torch.float64, activation="gelu", bias=True))
    (w_user, w_cand), (x_user, x_cand), (found,) = problem.weights, problem.inputs, problem.maps

    def ours(w, x, b):
        return recfuse.ikbo_linear(w, w_cand, x, x_cand, found, bias=b, activation="gelu").square().sum()

    def theirs(w, x, b):
        return reference([w, w_cand], [x, x_cand], [found], b, "gelu").square().sum()

    given = w_user, x_user, problem.bias
    for transform in (
        lambda f: torch.func.grad(f, argnums=(0, 1, 2)),
        lambda f: torch.func.jacrev(torch.func.grad(f, argnums=2), argnums=1),
    ):
        torch.testing.assert_close(transform(ours)(*given), transform(theirs)(*given))
    many = [torch.stack([one, 2 * one, -one]) for one in given]
    for dims in ((0, 0, 0), (None, 0, None), (0, None, 0)):
        batch = [one if dim is None else several for one, several, dim in zip(given, many, dims, strict=True)]
        for function in (lambda f: f, lambda f: torch.func.grad(f, argnums=(0, 1))):
            torch.testing.assert_close(
                torch.vmap(function(ours), dims)(*batch), torch.vmap(function(theirs), dims)(*batch)
            )


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast(dtype):
    problem = leaves(Problem(Case(bias=True)))
    narrow = [tensor.detach().to(dtype) for tensor in problem.tensors()]
    with torch.autocast("cpu", dtype=dtype):
        got = problem.run()
        bare = OPS.ikbo_linear(*problem.weights, *problem.inputs, *problem.maps, problem.bias)
    assert torch.equal(got, recfuse.ikbo_linear(*narrow[:4], *problem.maps, bias=narrow[4]))
    problem.check(bare)  # the operator computes in its inputs' dtype
    got.sum().backward()
    assert all(tensor.grad.dtype == torch.float32 for tensor in problem.tensors())


# ---- compiler


@pytest.mark.parametrize("gradients", (False, True))
@pytest.mark.parametrize(
    "case",
    (
        Case(dtype=torch.bfloat16, map_dtype=torch.int32, activation="relu", weight_layout="poisoned"),
        Case(n=None, bias=True, activation="gelu"),
        Case(features=(2, 3, 4), items=(2, 3, 5), chain=True, bias=True, input_layout="transposed"),
    ),
    ids=("matrices", "rows", "chain"),
)
def test_opcheck(case, gradients):
    problem = Problem(case)
    for tensor in problem.tensors():
        tensor.requires_grad_(gradients)
    options = {"activation": case.activation}
    if case.chain:
        lists = problem.weights, problem.inputs, problem.maps, problem.bias
        opcheck(OPS.ikbo_linear_chain.default, lists, options)
    else:
        flat = *problem.weights, *problem.inputs, *problem.maps, problem.bias
        opcheck(OPS.ikbo_linear.default, flat, options)


def compile_and_compare(backend, levels, gradients):
    """The function with a bias and an activation, among other operations, for three sizes of batch."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def compiled(maps, tensors):
        lists = tensors[:levels], tensors[levels : 2 * levels], maps
        options = {"bias": tensors[-1] * 2, "activation": "silu"}
        if levels == 2:
            return recfuse.ikbo_linear(*lists[0], *lists[1], *lists[2], **options) + 1
        return recfuse.ikbo_linear_chain(*lists, **options) + 1

    for items in ((23, 29, 31), (24, 30, 40), (19, 37, 41)):  # no two sizes are equal, or each has its graph
        problem = Problem(
            Case(features=(11, 13, 17)[:levels], items=items[:levels], dtype=torch.float64, bias=True)
        )
        ours, theirs = (
            [tensor.clone().requires_grad_(gradients) for tensor in problem.tensors()] for _ in range(2)
        )
        got = compiled(problem.maps, ours)
        lists = theirs[:levels], theirs[levels : 2 * levels], problem.maps
        want = reference(*lists, theirs[-1] * 2, "silu") + 1
        torch.testing.assert_close(got, want)
        if gradients:
            got.square().sum().backward()
            want.square().sum().backward()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.grad, other.grad)
    assert counter.frame_count == 1  # one graph for every batch


@pytest.mark.parametrize("levels", (2, 3))
def test_compiled(levels):
    compile_and_compare("aot_eager", levels, True)


@pytest.mark.long
def test_compiled_by_inductor():
    compile_and_compare("inductor", 2, False)


def test_fakes_raise_where_the_kernel_would():
    with torch._subclasses.FakeTensorMode():
        weight, users, candidates = torch.zeros(7, 5), torch.zeros(4, 5, 6), torch.zeros(9, 5, 6)
        found = torch.zeros(9, dtype=torch.int32)
        assert OPS.ikbo_linear(weight, weight, users, candidates, found).shape == (9, 7, 6)
        for bad in (
            (weight, weight, users, candidates, found[1:]),
            (weight, weight[1:], users, candidates, found),
            (weight, weight, users[:, 1:], candidates, found),
            (weight, weight, users, candidates[..., 1:], found),
            (weight, weight, users, candidates[..., 0], found),
            (weight[0], weight, users, candidates, found),
        ):
            with pytest.raises(RuntimeError):
                OPS.ikbo_linear(*bad)
        with pytest.raises(RuntimeError, match="expected 2 to 4 weights"):
            OPS.ikbo_linear_chain([weight], [users], [])
