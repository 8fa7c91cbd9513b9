"""ikbo_attention: gradients, torch.func's transforms, autocast, the compiler."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch._dynamo.testing
from torch.library import opcheck

import recfuse
from recfuse.ops.ikbo import attention_backward as backward
from recfuse.ops.ikbo import attention_backward_cpu as backward_cpu
from support.ikbo_attention import DTYPES, HALVES, NOTHING, Case, Problem, random_case, reference

OPS = torch.ops.recfuse
FORMS = {"dense": {}, "lengths": {"lengths": True}, "jagged": {"jagged": True}}
each_form = pytest.mark.parametrize("form", FORMS)
Q, K, MAP = torch.randn(9, 3, 4, 8), torch.randn(5, 6, 2, 8), torch.arange(9) % 5
LENGTHS, OFFSETS = torch.tensor([6, 0, 3, 1, 6]), torch.tensor([0, 2, 2, 5, 6, 6])


def leaves(problem):
    for tensor in problem.tensors():
        tensor.requires_grad_()
    return problem


def outputs(problem, tensors, with_lse=True):
    """Returns the function's results, as one of its tensors, with log-sum-exps that are finite."""
    problem.q, problem.k, problem.v, *rest = tensors
    problem.q_user = rest[0] if rest else None
    found = problem.run(return_lse=True)
    half = len(found) // 2
    finite = [one[one.isfinite()] for one in found[half:]] if with_lse else []
    return tuple(found[:half]) + tuple(finite)


def gradients(of, tensors, factors):
    """Of results of the reference, some of which may need none: zeros if nothing reaches a tensor."""
    pairs = [(one, factor) for one, factor in zip(of, factors, strict=True) if one.requires_grad]
    if not pairs:
        return [torch.zeros_like(one) for one in tensors]
    results, weights = zip(*((one, factor.to(one.dtype)) for one, factor in pairs), strict=True)
    found = torch.autograd.grad(results, tensors, weights, allow_unused=True)
    return [torch.zeros_like(one) if grad is None else grad for one, grad in zip(tensors, found, strict=True)]


@each_form
@pytest.mark.parametrize("own", (None, pytest.param(2, marks=pytest.mark.long)))
def test_gradcheck(own, form):
    case = Case(
        sq=2, heads=4, dim=3, users=3, candidates=4, positions=5, dtype=torch.float64, self_queries=own
    )
    problem = leaves(Problem(case.but(**FORMS[form])))
    with torch.no_grad():  # numerical gradients add to NaN
        problem.k.nan_to_num_()
        problem.v.nan_to_num_()
    given = problem.tensors()
    assert torch.autograd.gradcheck(lambda *tensors: outputs(problem, tensors, False), given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_gradients(dtype):
    draw = random.Random(str(dtype))
    for _ in range(60):
        problem = leaves(Problem(random_case(draw, largest=8, dtype=dtype, peak=1.0)))
        given = problem.tensors()
        wide = [one.detach().double().requires_grad_() for one in given]
        with_lse = draw.random() < 0.5
        got = outputs(problem, given, with_lse)
        pairs = problem.expected(wide)
        want = [pair[0] for pair in pairs]
        want += [pair[1][pair[1].isfinite()] for pair in pairs] if with_lse else []
        factors = [torch.randn_like(one) for one in got]
        ours = torch.autograd.grad(got, given, factors)
        for one, other in zip(ours, gradients(want, wide, factors), strict=True):
            assert one.dtype == dtype
            largest = float(other.abs().max()) if other.numel() else 0.0
            eps = torch.finfo(dtype).eps * (8 if dtype in HALVES else 64)
            torch.testing.assert_close(one.double(), other, rtol=0, atol=eps * (2 + largest))


@pytest.mark.parametrize("empty", NOTHING, ids=str)
def test_gradients_where_something_is_empty(empty):
    problem = leaves(Problem(Case(dtype=torch.float64, **empty)))
    given = problem.tensors()
    got, want = outputs(problem, given, False), [pair[0] for pair in problem.expected()]
    ours = torch.autograd.grad(got, given, [torch.ones_like(one) for one in got])
    theirs = gradients(want, given, [torch.ones_like(one) for one in want])
    torch.testing.assert_close(list(ours), theirs)


def test_every_set_of_gradients():
    for form, wanted in itertools.product(FORMS, itertools.product((False, True), repeat=4)):
        problem = Problem(Case(dtype=torch.float64, self_queries=2, **FORMS[form]))
        for tensor, needed in zip(problem.tensors(), wanted, strict=True):
            tensor.requires_grad_(needed)
        got = problem.run()
        assert [one.requires_grad for one in got] == [any(wanted)] * 2
        if not any(wanted):
            continue
        needing = [tensor for tensor in problem.tensors() if tensor.requires_grad]
        factors = [torch.randn_like(one) for one in got]
        ours = torch.autograd.grad(got, needing, factors)
        theirs = gradients([pair[0] for pair in problem.expected()], needing, factors)
        torch.testing.assert_close(list(ours), theirs)


@pytest.mark.parametrize("dtype", HALVES)
def test_sums_over_candidates_are_in_float32(dtype):
    q = torch.zeros(4096, 1, 1, 1, dtype=dtype)
    k, v = (torch.zeros(2, 1, 1, 1, dtype=dtype, requires_grad=True) for _ in range(2))
    recfuse.ikbo_attention(q, k, v, torch.zeros(4096).long()).sum().backward()
    assert v.grad.flatten().tolist() == [4096, 0]  # 2048 + 1 is 2048 in float16


@each_form
def test_padding_keys_get_no_gradient(form):
    problem = leaves(Problem(Case(dtype=torch.float64, self_queries=1, **FORMS[form])))
    found = torch.autograd.grad([one.sum() for one in problem.run()], problem.tensors())
    assert all(one.isfinite().all() for one in found)
    behind = problem.k.isnan()
    assert not found[1][behind].any() and not found[2][behind].any()


@each_form
def test_many_users_are_worked_through_in_parts(form, monkeypatch):
    problem = leaves(Problem(Case(dtype=torch.float64, candidates=40, users=12, **FORMS[form])))
    want = torch.autograd.grad(problem.run().square().sum(), problem.tensors())
    monkeypatch.setattr(backward_cpu, "_MOST_ELEMENTS", 100)
    got = torch.autograd.grad(problem.run().square().sum(), problem.tensors())
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("lengths", (False, True))
@pytest.mark.parametrize("uneven", (False, True))
def test_many_users_are_few_calls(uneven, lengths, monkeypatch):
    """Because a call per user takes longer than its work."""
    calls, users = [], 2048
    kernel = backward_cpu._backward
    monkeypatch.setattr(
        backward_cpu, "_backward", lambda *given, **options: calls.append(1) or kernel(*given, **options)
    )
    q = torch.randn(users, 1, 2, 8)
    k, v = (torch.randn(users, 20, 2, 8).requires_grad_() for _ in range(2))
    owners = (torch.rand(users) ** 3 * users).long() if uneven else torch.arange(users)
    sizes = torch.randint(0, 21, (users,)) if lengths else None
    out = recfuse.ikbo_attention(q, k, v, owners, kv_lengths=sizes)
    factors = torch.randn_like(out)
    got = torch.autograd.grad(out, (k, v), factors)
    assert 1 <= len(calls) <= (200 if uneven and lengths else 20)
    pick = torch.zeros(users, 20).masked_fill(
        torch.arange(20) >= (sizes if lengths else torch.full((users,), 20))[:, None], -torch.inf
    )
    given = (one[owners].transpose(1, 2) for one in (k, v))
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), *given, attn_mask=pick[owners][:, None, None]
    )
    want = torch.where(pick[owners][:, None, :1].isinf()[..., None], 0, want).transpose(1, 2)
    torch.testing.assert_close(got, torch.autograd.grad(want, (k, v), factors), rtol=1e-4, atol=1e-4)


def test_second_derivatives_and_forward_mode_are_refused():
    problem = leaves(Problem(Case(dtype=torch.float64)))
    (grad,) = torch.autograd.grad(problem.run().square().sum(), problem.q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        grad.sum().backward()
    with pytest.raises(NotImplementedError, match=r"recfuse\.ikbo_attention: forward-mode"):
        torch.func.jvp(lambda q: recfuse.ikbo_attention(q, K, K, MAP), (Q,), (Q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(K, K)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            recfuse.ikbo_attention(Q, dual, K, MAP, return_lse=True)


@each_form
def test_functorch(form):
    problem = Problem(Case(dtype=torch.float64, candidates=5, positions=6, **FORMS[form]))
    given = problem.q, problem.k.nan_to_num(), problem.v.nan_to_num()
    extra = {"kv_lengths": problem.lengths, "kv_offsets": problem.offsets}

    def ours(q, k, v):
        out, lse = recfuse.ikbo_attention(q, k, v, problem.map, return_lse=True, **extra)
        return out.square().sum() + torch.where(lse.isfinite(), lse, 0).double().sum()

    def theirs(q, k, v):
        out, lse = reference(q, k, v, problem.map, **extra)
        return out.square().sum() + torch.where(lse.isfinite(), lse, 0).sum()

    grads = (torch.func.grad(f, argnums=(0, 1, 2))(*given) for f in (ours, theirs))
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)
    many = [torch.stack([one, 2 * one, -one]) for one in given]
    for dims in ((0, 0, 0), (None, 0, None), (0, None, None)):
        batch = [one if dim is None else several for one, several, dim in zip(given, many, dims, strict=True)]
        singles = [
            [one if dim is None else one[i] for one, dim in zip(batch, dims, strict=True)] for i in range(3)
        ]
        torch.testing.assert_close(
            torch.vmap(ours, dims)(*batch),
            torch.stack([theirs(*one) for one in singles]),
            rtol=1e-5,
            atol=1e-5,
        )
        got = torch.vmap(torch.func.grad(ours, argnums=(0, 1)), dims)(*batch)
        want = [torch.func.grad(theirs, argnums=(0, 1))(*one) for one in singles]
        for one, others in zip(got, zip(*want, strict=True), strict=True):
            torch.testing.assert_close(one, torch.stack(others), rtol=1e-5, atol=1e-5)


def test_vmap_over_maps_and_lengths():
    maps, lengths = torch.stack((MAP, MAP.flip(0))), torch.stack((LENGTHS, LENGTHS.flip(0)))
    got = torch.vmap(lambda users, sizes: recfuse.ikbo_attention(Q, K, K, users, kv_lengths=sizes))(
        maps, lengths
    )
    for one, users, sizes in zip(got, maps, lengths, strict=True):
        torch.testing.assert_close(one, recfuse.ikbo_attention(Q, K, K, users, kv_lengths=sizes))
    offsets = torch.stack((OFFSETS, torch.tensor([0, 6, 6, 6, 6, 6])))
    got = torch.vmap(lambda one: recfuse.ikbo_attention(Q, K[0], K[0], MAP, kv_offsets=one))(offsets)
    for one, ends in zip(got, offsets, strict=True):
        torch.testing.assert_close(one, recfuse.ikbo_attention(Q, K[0], K[0], MAP, kv_offsets=ends))


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast(dtype):
    problem = leaves(Problem(Case(self_queries=2)))
    narrow = [tensor.detach().to(dtype) for tensor in problem.tensors()]
    with torch.autocast("cpu", dtype=dtype):
        got = problem.run()
        bare = OPS.ikbo_attention(problem.q, problem.k, problem.v, problem.map)
    want = recfuse.ikbo_attention(*narrow[:3], problem.map, q_user=narrow[3])
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert bare.dtype == torch.float32  # the operator computes in its inputs' dtype
    sum(one.sum() for one in got).backward()
    assert all(tensor.grad.dtype == torch.float32 for tensor in problem.tensors())


# ---- compiler


@pytest.mark.parametrize("wanted", (False, pytest.param(True, marks=pytest.mark.long)))
@each_form
def test_opcheck(form, wanted):
    case = Case(
        dtype=torch.float32, map_dtype=torch.int32, self_queries=2, q_layout="poisoned", **FORMS[form]
    )
    problem = Problem(case)
    problem.k, problem.v = problem.k.nan_to_num(), problem.v.nan_to_num()
    for tensor in problem.tensors():
        tensor.requires_grad_(wanted)
    options = {"kv_lengths": problem.lengths, "kv_offsets": problem.offsets, "scale": 0.3}
    given = problem.q, problem.k, problem.v, problem.map
    for name in ("ikbo_attention", "ikbo_attention_lse"):
        opcheck(getattr(OPS, name).default, given, options)
        opcheck(
            getattr(OPS, name.replace("attention", "attention_self")).default,
            (problem.q_user, *given),
            options,
        )


def test_opcheck_of_the_gradients():
    problem = Problem(Case(lengths=True))
    rows = torch.randn(33, 4, 32), problem.map.repeat_interleave(3)
    out, lse = torch.randn(33, 4, 32), torch.randn(33, 4)
    given = rows[0], torch.randn(33, 4), problem.q.flatten(0, 1), problem.k, problem.v, rows[1], out, lse
    opcheck(OPS._ikbo_attention_backward.default, (*given, 0.3, problem.lengths, None),
            test_utils=("test_schema", "test_faketensor"))  # fmt: skip


def compile_and_compare(backend, form, wanted, own=None):
    """The function among other operations, for three sizes of batch, with gradients of log-sum-exps too."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def compiled(q, k, v, users, lengths, offsets, q_user):
        options = {"kv_lengths": lengths, "kv_offsets": offsets, "scale": 0.3, "return_lse": True}
        return [one * 2 for one in recfuse.ikbo_attention(q + 1, k, v, users, q_user=q_user, **options)]

    for sizes in (
        (23, 29, 31, 5),
        (24, 30, 40, 6),
        (19, 37, 41, 7),
    ):  # no two are equal
        users, candidates, positions, sq = sizes
        case = Case(sq, 4, 2, 8, users, candidates, positions, torch.float64, scale=0.3, **FORMS[form])
        problem = Problem(case.but(self_queries=None if own is None else own + sq * 2))
        ours, theirs = ([one.clone().requires_grad_(wanted) for one in problem.tensors()] for _ in range(2))
        q_user = ours[3] if own is not None else None
        got = compiled(*ours[:3], problem.map, problem.lengths, problem.offsets, q_user)
        pairs = problem.expected([theirs[0] + 1, *theirs[1:]])
        want = [2 * one for one in (*(pair[0] for pair in pairs), *(pair[1] for pair in pairs))]
        half = len(want) // 2
        torch.testing.assert_close(got[:half], want[:half])
        torch.testing.assert_close(got[half:], [one.float() for one in want[half:]], rtol=1e-5, atol=1e-5)
        if not wanted:
            continue
        for found in (got, want):
            sums = [torch.where(one.isfinite(), one, 0).double().sum() for one in found[half:]]
            sum([one.square().sum() for one in found[:half]] + sums).backward()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-6)
    assert counter.frame_count == 1  # one graph for every batch


@pytest.mark.parametrize("own", (None, pytest.param(1, marks=pytest.mark.long)))
@each_form
def test_compiled(form, own):
    compile_and_compare("aot_eager", form, True, own)


@pytest.mark.long
def test_compiled_by_inductor():
    compile_and_compare("inductor", "lengths", False)


def test_fakes_raise_where_the_kernel_would():
    with torch._subclasses.FakeTensorMode():
        q, k, users = torch.zeros(9, 3, 4, 8).half(), torch.zeros(5, 6, 2, 8).half(), torch.zeros(9).int()
        sizes, ends = torch.zeros(5, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
        out, lse = OPS.ikbo_attention_lse(q, k, k, users)
        assert (out.shape, lse.shape, lse.dtype) == ((9, 3, 4, 8), (9, 4, 3), torch.float32)
        assert OPS.ikbo_attention_self(q[:5], q, k[0], k[0], users, kv_offsets=ends)[0].shape == (5, 3, 4, 8)
        for bad, options in (
            ((q, k, k, users[1:]), {}),
            ((q, k, k[1:], users), {}),
            ((q, k[..., 1:], k[..., 1:], users), {}),
            ((q[0], k, k, users), {}),
            ((q, k[0], k[0], users), {}),
            ((q, k, k, users), {"kv_offsets": ends}),
            ((q, k, k, users), {"kv_lengths": ends}),
            ((q, k[0], k[0], users), {"kv_offsets": ends, "kv_lengths": sizes}),
        ):
            with pytest.raises(RuntimeError):
                OPS.ikbo_attention(*bad, **options)
        with pytest.raises(RuntimeError):
            OPS.ikbo_attention_self(q, q, k, k, users)


# ---- arguments on a GPU


def varlen_backward(packed, of_rows, of_keys):
    """As torch's kernels compute it, sequence by sequence; unwritten results are NaN."""
    assert all(one.dtype == torch.int32 and one.is_contiguous() for one in (of_rows, of_keys))
    found = [torch.full_like(one, torch.nan) for one in (packed.q, packed.k, packed.v)]
    bounds = zip(*(itertools.pairwise(one.tolist()) for one in (of_rows, of_keys)), strict=True)
    for (first, last), (start, end) in bounds:
        assert 0 <= first <= last <= len(packed.q) and end - start <= packed.longest
        if last == first or end <= start:
            continue
        q, grad, out = (
            one[first:last].float().transpose(0, 1) for one in (packed.q, packed.grad, packed.out)
        )
        k, v = (one[start:end].float().transpose(0, 1) for one in (packed.k, packed.v))
        weights = (packed.scale * q @ k.mT - packed.lse[first:last].t()[..., None]).exp()
        slopes = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * packed.scale
        found[0][first:last] = (slopes @ k).transpose(0, 1)
        found[1][start:end] = (slopes.mT @ q).transpose(0, 1)
        found[2][start:end] = (weights.mT @ grad).transpose(0, 1)
    return found


@pytest.mark.parametrize("most_users", (None, 1, 2))
@pytest.mark.parametrize("kernel", ("_flash", "_efficient"))
def test_rows_are_packed_for_a_gpu(kernel, most_users, monkeypatch):
    """On the CPU, with torch's kernel replaced: all results that it leaves unwritten are zero at the end."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    calls = []
    for name in ("_flash", "_efficient"):
        replaced = lambda *given, name=name: calls.append(name) or varlen_backward(*given)  # noqa: E731
        monkeypatch.setattr(backward, name, replaced)
    if most_users is not None:
        monkeypatch.setattr(backward, "_MOST_SEQUENCES", 2 * most_users + 1)
    dtype = torch.float32 if kernel == "_efficient" else torch.bfloat16
    draw = random.Random(kernel)
    for number in range(30):
        case = random_case(draw, largest=8, dtype=dtype, peak=1.0, scale=None)
        problem = Problem(case.but(self_queries=None))
        q, share = problem.q.flatten(0, 1), case.sq
        users = problem.map.repeat_interleave(share)
        ((out, lse),) = problem.expected()
        grad, lse_rows = torch.randn_like(q), lse.transpose(1, 2).flatten(0, 1)
        grad_lse = torch.randn_like(lse_rows).float() if number % 2 and case.dim < 256 else None
        given = grad, grad_lse, q, problem.k, problem.v, users, out.to(dtype).flatten(0, 1), lse_rows.float()
        rest = case.dim**-0.5, problem.lengths, problem.offsets
        got, want = backward._on_cuda(*given, *rest), backward._on_cpu(*given, *rest)
        for one, other in zip(got, want, strict=True):
            largest = float(other.abs().max()) if other.numel() else 0.0
            assert one.shape == other.shape and one.dtype == dtype
            units = 1e-5 if dtype == torch.float32 else 0.03
            torch.testing.assert_close(one, other, rtol=0, atol=units * (1 + largest))
    assert set(calls) == {kernel}


def test_bad_contents_have_no_gradient_on_a_gpu(monkeypatch):
    monkeypatch.setattr(backward, "_efficient", varlen_backward)
    for changes in ({"lengths": True}, {"jagged": True}):
        problem = Problem(Case(sq=1, users=3, candidates=12, **changes))
        problem.map[4], problem.map[5] = -1, 10**6
        kept = (problem.map >= 0) & (problem.map < 3)
        if problem.lengths is not None:
            problem.lengths[1] = -5
        else:
            problem.offsets[1:3] = torch.tensor([10**6, -1])  # leaves no user any keys
        out, lse = torch.randn(12, 4, 32), torch.randn(12, 4)
        q, grad = problem.q.flatten(0, 1), torch.randn_like(out)
        given = grad, None, q, problem.k, problem.v, problem.map, out, lse
        dq, dk, dv = backward._on_cuda(*given, 0.3, problem.lengths, problem.offsets)
        assert not dq[~kept].any() and not dq[problem.map == 1].any()
        if problem.offsets is not None:
            assert not dq.any() and not dk.any() and not dv.any()
        assert all(one.isfinite().all() for one in (dq, dk, dv))


def test_torchs_kernel_gets_valid_shapes_and_dtypes(monkeypatch):
    """Shapes and types, without elements. The memory-efficient kernel has no such function that is right."""
    dtype = torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with torch.device("meta"):
        q, k = torch.empty(30, 4, 40, dtype=dtype), torch.empty(5, 6, 2, 40, dtype=dtype)
        users, lse = torch.empty(30, dtype=torch.int64), torch.empty(30, 4)
        for grad_lse in (None, lse):
            for keys, offsets in ((k, None), (k[0], torch.empty(6, dtype=torch.int32))):
                given = q, grad_lse, q, keys, keys, users, q, lse, 0.3, None, offsets
                found = backward._on_cuda(*given)
                assert [one.shape for one in found] == [q.shape, keys.shape, keys.shape]
                assert all(one.dtype == dtype for one in found)
    double = torch.zeros(2, 2, 8, dtype=torch.float64)
    with pytest.raises(
        NotImplementedError,
        match=r"^recfuse\.ikbo_attention: q is float64 on a GPU, for which there are no gradients",
    ):
        given = double, None, double, double[None], double[None], MAP[:2], double, double[..., 0]
        backward._on_cuda(*given, 1.0, None, None)
