"""ikbo_attention: values and bad calls; its module is in tests/nn."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

import recfuse
from support.ikbo import LAYOUTS
from support.ikbo_attention import (
    DTYPES,
    KV_LAYOUTS,
    MAPS,
    NOTHING,
    Case,
    Problem,
    random_case,
)

OPS = torch.ops.recfuse
FORMS = {"dense": {}, "lengths": {"lengths": True}, "jagged": {"jagged": True}}
each_form = pytest.mark.parametrize("form", FORMS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_calls(dtype):
    draw = random.Random(str(dtype))
    random.seed(1)
    for _ in range(40):
        Problem(random_case(draw, largest=12, dtype=dtype)).check_all(path=draw.choice(("packed", "auto")))


@pytest.mark.parametrize("q_layout", LAYOUTS)
@pytest.mark.parametrize("kv_layout", KV_LAYOUTS)
def test_layouts(kv_layout, q_layout):
    """Every pair of them, and each of them in every form and type."""
    pair = list(LAYOUTS).index(q_layout) + list(LAYOUTS).index(kv_layout)
    form, dtype = list(FORMS)[pair % 3], (torch.float32, torch.bfloat16)[pair // 3 % 2]
    problem = Problem(
        Case(dtype=dtype, q_layout=q_layout, kv_layout=kv_layout, self_queries=2, **FORMS[form])
    )
    for name in ("map", "lengths", "offsets"):
        given = getattr(problem, name)
        if given is not None:
            setattr(problem, name, torch.stack((given, given + 10**6), 1)[:, 0])
    problem.check_all()


def test_keys_that_are_also_values_and_all_users_share():
    for form in ("dense", "lengths"):
        problem = Problem(Case(users=5, **FORMS[form]))
        problem.k = problem.v = problem.k[:1].expand(5, -1, -1, -1)
        problem.check_all()
    problem.q = problem.q[:1, :1].expand_as(problem.q)
    problem.map = problem.map[:1].expand_as(problem.map)
    problem.check_all()


@pytest.mark.parametrize("kind", MAPS)
def test_maps(kind):
    for number, (users, candidates) in enumerate(((1, 6), (6, 1), (6, 6), (40, 7), (3, 50))):
        index = (torch.int32, torch.int64)[(number + MAPS.index(kind)) % 2]
        problem = Problem(Case(users=users, candidates=candidates, map=kind, map_dtype=index, lengths=True))
        specified = problem.specified()
        problem.check_all(specified)
        problem.check_all(specified, bounds_check="off")


def test_heads():
    for number, (kv_heads, share) in enumerate(itertools.product((1, 2, 3), (1, 2, 5))):
        dtype = (torch.float32, torch.float16)[number % 2]
        Problem(Case(heads=kv_heads * share, kv_heads=kv_heads, dtype=dtype, lengths=True)).check_all()


@each_form
def test_nothing_of_something(form):
    for number, changes in enumerate(NOTHING):
        dtype = (torch.float32, torch.bfloat16)[(number + list(FORMS).index(form)) % 2]
        if not (changes.get("jagged") and form == "lengths"):
            Problem(Case(**{**FORMS[form], "dtype": dtype, **changes})).check_all()


def test_it_is_torchs_attention_over_gathered_keys():
    for heads, kv_heads in ((4, 4), (6, 2)):
        problem = Problem(Case(heads=heads, kv_heads=kv_heads, dtype=torch.float64))
        q, k, v = (one.transpose(1, 2) for one in (problem.q, problem.k[problem.map], problem.v[problem.map]))
        for scale in (None, 0.7):
            want = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True).transpose(1, 2)
            torch.testing.assert_close(recfuse.ikbo_attention(
                problem.q, problem.k, problem.v, problem.map, scale=scale), want)  # fmt: skip


def test_jagged_keys_are_those_with_lengths():
    problem = Problem(Case(lengths=True, self_queries=2))
    lengths = problem.lengths.tolist()
    k, v = (
        torch.cat([one[user, :length] for user, length in enumerate(lengths)])
        for one in (problem.k, problem.v)
    )
    offsets = F.pad(problem.lengths.cumsum(0), (1, 0))
    jagged = recfuse.ikbo_attention(
        problem.q, k, v, problem.map, kv_offsets=offsets, q_user=problem.q_user, return_lse=True
    )
    for one, other in zip(jagged, problem.run(return_lse=True), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("wrong", (torch.nan, torch.inf, -torch.inf))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@each_form
def test_non_finite_inputs_stay_in_their_rows(form, dtype, wrong):
    problem = Problem(Case(dtype=dtype, users=4, candidates=30, self_queries=2, **FORMS[form]))
    clean = problem.run(return_lse=True)
    start, end = (2, 3) if problem.offsets is None else problem.offsets[2:4].tolist()
    users = torch.arange(4) == 2
    for name in ("k", "v"):
        before = getattr(problem, name)
        setattr(problem, name, before.clone())
        getattr(problem, name)[start:end] = wrong
        got = problem.run(return_lse=True)
        for one, other, touched in zip(got, clean, (users, problem.map == 2) * 2, strict=True):
            assert torch.equal(one[~touched], other[~touched])
        setattr(problem, name, before)
    problem.q[7] = wrong
    got = problem.run()
    assert torch.equal(got[0], clean[0])
    assert torch.equal(got[1][torch.arange(30) != 7], clean[1][torch.arange(30) != 7])


def test_the_same_bits_for_any_number_of_threads(threads):
    problem = Problem(Case(sq=9, candidates=200, positions=100, dtype=torch.bfloat16, lengths=True))
    results = []
    for count in (1, 2, 3, 1):
        threads(count)
        results.append(problem.run())
    assert all(torch.equal(results[0], other) for other in results[1:])


# ---- bad calls

Q, K, MAP = torch.randn(9, 3, 4, 8), torch.randn(5, 6, 2, 8), torch.arange(9) % 5
LENGTHS, OFFSETS = torch.tensor([6, 0, 3, 1, 6]), torch.tensor([0, 2, 2, 5, 6, 6])
JAGGED = {"k": K[0], "v": K[0], "kv_offsets": OFFSETS}


def call(**changes):
    given = {"q": Q, "k": K, "v": K, "cand_to_user": MAP}
    return recfuse.ikbo_attention(**{**given, **changes})


def at(given, position, value, dtype=torch.int64):
    changed = given.clone().to(dtype)
    changed[position] = value
    return changed


BAD_CALLS = {
    "q's type": ({"q": Q.long()}, TypeError, "q is int64; expected float16, bfloat16, float32 or float64"),
    "k's type": ({"k": K.half()}, TypeError, "k is float16; expected float32 as q is"),
    "v's type": ({"v": K.double()}, TypeError, "v is float64; expected float32 as q is"),
    "q_user's type": ({"q_user": K[:, :1].half()}, TypeError, "q_user is float16; expected float32 as q is"),
    "q's dimensions": (
        {"q": Q[0]},
        ValueError,
        r"q is float32 \[3, 4, 8\]; expected \[items, queries, heads",
    ),
    "k's dimensions": ({"k": K[0]}, ValueError, r"k is .*there are no kv_offsets"),
    "jagged k": ({"kv_offsets": OFFSETS}, ValueError, r"k is .*kv_offsets are given"),
    "k's dim": ({"k": K[..., 1:]}, ValueError, r"k is float32 \[5, 6, 2, 7\]; expected .*q has such heads"),
    "v's sizes": ({"v": K[:, 1:]}, ValueError, r"v is float32 \[5, 5, 2, 8\]; expected the sizes of k"),
    "heads": ({"q": Q[:, :, 1:]}, ValueError, "heads is 3 of queries and 2 of keys"),
    "no heads of keys": (
        {"k": K[:, :, :0], "v": K[:, :, :0]},
        ValueError,
        "heads is 4 of queries and 0 of keys",
    ),
    "map's type": (
        {"cand_to_user": MAP.short()},
        TypeError,
        "cand_to_user is int16; expected int32 or int64",
    ),
    "map's length": (
        {"cand_to_user": MAP[1:]},
        ValueError,
        "cand_to_user has 8 elements; expected an element for",
    ),
    "map's dimensions": ({"cand_to_user": MAP[:, None]}, ValueError, "cand_to_user has 2 dimensions"),
    "lengths' type": ({"kv_lengths": LENGTHS.float()}, TypeError, "kv_lengths is float32"),
    "lengths' number": (
        {"kv_lengths": LENGTHS[1:]},
        ValueError,
        "kv_lengths has 4 elements; expected a length",
    ),
    "both": ({**JAGGED, "kv_lengths": LENGTHS}, ValueError, "kv_lengths and kv_offsets are both given"),
    "offsets' type": ({**JAGGED, "kv_offsets": OFFSETS.char()}, TypeError, "kv_offsets is int8"),
    "no offsets": ({**JAGGED, "kv_offsets": OFFSETS[:0]}, ValueError, "kv_offsets has no elements"),
    "q_user's users": (
        {"q_user": K[1:].repeat(1, 1, 2, 1)},
        ValueError,
        "q_user has 4 items; expected an item",
    ),
    "q_user's heads": ({"q_user": K}, ValueError, r"q_user is float32 \[5, 6, 2, 8\]; expected \[users, q"),
    "scale 0": ({"scale": 0.0}, ValueError, "scale is 0; expected a positive"),
    "scale below": ({"scale": -1}, ValueError, "scale is -1; expected a positive"),
    "scale NaN": ({"scale": float("nan")}, ValueError, "scale is -?nan; expected a positive"),
    "scale's type": ({"scale": "1"}, TypeError, "scale is a str; expected a number"),
    "path": ({"path": "quick"}, ValueError, 'path is "quick"; expected "packed", "fused"'),
    "fused": ({"path": "fused"}, NotImplementedError, 'path is "fused", which is a kernel of GPUs'),
    "bounds_check": ({"bounds_check": "maybe"}, ValueError, "bounds_check is"),
    "no tensor": ({"q": [1.0]}, TypeError, "q is a list; expected a torch.Tensor"),
    "no k": ({"k": None}, TypeError, "k is a NoneType; expected a torch.Tensor"),
    "lengths, a list": ({"kv_lengths": [1]}, TypeError, "kv_lengths is a list; expected a torch.Tensor"),
    "user above": ({"cand_to_user": at(MAP, 3, 5)}, IndexError, r"cand_to_user\[3\] is 5; expected 0 to 4"),
    "user below": ({"cand_to_user": at(MAP, 8, -1)}, IndexError, r"cand_to_user\[8\] is -1; expected 0 to"),
    "user int32": ({"cand_to_user": at(MAP, 0, 2**31 - 1, torch.int32)}, IndexError, r"\[0\] is 2147483647"),
    "user huge": ({"cand_to_user": at(MAP, 0, 2**63 - 1)}, IndexError, r"\[0\] is 9223372036854775807"),
    "no user": ({"k": K[:0], "v": K[:0]}, IndexError, r"cand_to_user\[0\] is 0"),
    "length above": ({"kv_lengths": at(LENGTHS, 2, 7)}, ValueError, r"kv_lengths\[2\] is 7; "),
    "length below": (
        {"kv_lengths": at(LENGTHS, 4, -1)},
        (IndexError, ValueError),
        r"kv_lengths\[4\] is -1; ",
    ),
    "offset above": ({**JAGGED, "kv_offsets": at(OFFSETS, 5, 7)}, ValueError, r"kv_offsets\[5\] is 7"),
    "offset below": ({**JAGGED, "kv_offsets": at(OFFSETS, 0, -1)}, ValueError, r"kv_offsets\[0\] is -1"),
    "offsets fall": ({**JAGGED, "kv_offsets": at(OFFSETS, 2, 1)}, ValueError, r"kv_offsets\[2\] is 1"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_raise_clear_errors(name):
    changes, kind, words = BAD_CALLS[name]
    for more in ({}, {"return_lse": True}, {"q": Q.clone().requires_grad_()}):
        with pytest.raises(kind, match=rf"^recfuse\.ikbo_attention(_\w+)?: .*{words}"):
            call(**{**more, **changes})
    assert call().shape == (9, 3, 4, 8)
    assert call(**JAGGED).shape == (9, 3, 4, 8)


def test_bad_contents_of_users_without_candidates_are_found_too():
    with pytest.raises((IndexError, ValueError), match=r"kv_lengths\[2\] is 9"):
        call(kv_lengths=at(LENGTHS, 2, 9), q=Q[:1], cand_to_user=MAP[:1])


def test_the_path_is_told():
    for more in ({}, {"kv_lengths": LENGTHS}, JAGGED, {"q_user": Q[:5]}, {"path": "packed"}):
        assert (
            recfuse.ikbo_attention_path(**{"q": Q, "k": K, "v": K, "cand_to_user": MAP, **more}) == "packed"
        )
    with pytest.raises(ValueError, match="cand_to_user has 8 elements"):
        recfuse.ikbo_attention_path(Q, K, K, MAP[1:])


class Logged(torch.Tensor):
    """A tensor that sees which functions it is given to."""

    seen: list[object]

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("name", ("q", "kv_lengths", "q_user"))
def test_torch_function(name):
    Logged.seen = []
    given = {"q": Q, "k": K, "v": K, "cand_to_user": MAP, "kv_lengths": LENGTHS, "q_user": Q[:5]}
    given[name] = given[name].as_subclass(Logged)
    found = recfuse.ikbo_attention(**given, scale=0.5, return_lse=True)
    assert recfuse.ikbo_attention in Logged.seen
    want = call(kv_lengths=LENGTHS, q_user=Q[:5], scale=0.5, return_lse=True)
    for one, other in zip(found, want, strict=True):
        assert torch.equal(one.as_subclass(torch.Tensor), other)
