"""The updates of fused calls on the CPU: against the float64 reference, and forbidden effects."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import recfuse  # noqa: F401  (loads the operators)
from support.backward.calls import BAD
from support.fused import Groups
from support.reference import DTYPES, Feature, Hyper, assert_close_to_reference, updated

_ops = torch.ops.recfuse
KINDS = ("SGD", "Adagrad", "RowWiseAdagrad", "Adam")
STATES = (0, 1, 1, 2)  # of each kind
HYPER = Hyper(weight_decay=0.01)
LR, WEIGHT_DECAY, EPS, BETA1, BETA2, STEP, GRAD_SCALE, SKIP = range(8)


def numbers_of(hyper=HYPER, step=1, scale=1.0):
    return torch.tensor([hyper.lr, hyper.weight_decay, hyper.eps, *hyper.betas, step, scale, 0.0])


def states_of(kind, weights):
    """Returns states as after some steps of an optimizer: all above 0."""
    return [
        0.1 + torch.rand(weight.shape[: 1 if KINDS[kind] == "RowWiseAdagrad" else 2])
        for weight in weights
        for _ in range(STATES[kind])
    ]


def update(problem, grad, indices, offsets, factors=None, kind=0, states=None, **changes):
    arguments = {
        "grad": grad,
        "weights": problem.weights,
        "states": states_of(kind, problem.weights) if states is None else states,
        "features": problem.rows,
        "indices": indices,
        "offsets": offsets,
        "per_sample_weights": factors,
        "winners": None,
        "numbers": numbers_of(),
        "after": [],
        "optimizer": kind,
    }
    if "winners" not in changes and grad.numel():
        arguments["winners"] = problem.winners(indices, offsets)
    with torch.no_grad():
        found = _ops.fused_embedding_bag_update(**{**arguments, **changes})
    assert found.shape == (0,) and found.dtype == torch.float32


def looked_up(problem, indices, offsets):
    """Returns for each weight, [rows], whether a lookup of the row counts."""
    found = [torch.zeros(weight.shape[0], dtype=torch.bool) for weight in problem.weights]
    bags = (offsets.numel() - 1) // max(len(problem.features), 1)
    for at, feature in enumerate(problem.features):
        number, first, *_ = problem.places[feature.table]
        own = indices[offsets[at * bags] : offsets[(at + 1) * bags]].long()
        found[number][first + own[own != (-1 if feature.padding_idx is None else feature.padding_idx)]] = True
    return found


def check(problem, grad, indices, offsets, factors=None, kind=0, step=1):
    """One update of random states against the reference; rows without lookups keep every bit."""
    states, before = states_of(kind, problem.weights), [weight.clone() for weight in problem.weights]
    want_grads = magnitude = [torch.zeros(weight.shape) for weight in problem.weights]
    counts = looked_up(problem, indices, offsets)
    if any(count.any() for count in counts):
        sizes = None if factors is None else factors.abs()
        want_grads, _ = problem.expected(grad, indices, offsets, factors)
        magnitude, _ = problem.expected(grad.abs(), indices, offsets, sizes)
    kept = [state.clone() for state in states]
    update(problem, grad, indices, offsets, factors, kind, states, numbers=numbers_of(step=step))
    for number, weight in enumerate(problem.weights):
        mine = slice(number * STATES[kind], (number + 1) * STATES[kind])
        by_row = [state.view(weight.shape[0], -1) for state in kept[mine]]
        want, want_states = updated(
            KINDS[kind], before[number], by_row, want_grads[number], counts[number], step, HYPER
        )
        rows = counts[number] if weight.numel() else torch.zeros_like(counts[number])
        allowed = 1e-6 * (indices.numel() + 20) * (1 + magnitude[number][rows])
        rounding = torch.finfo(weight.dtype).eps * (1 + want[rows].abs())
        assert_close_to_reference(weight[rows], want[rows], allowed + rounding)
        assert torch.equal(weight[~rows].nan_to_num(), before[number][~rows].nan_to_num())
        for state, old, right in zip(states[mine], kept[mine], want_states, strict=True):
            state, old = state.view(weight.shape[0], -1), old.view(weight.shape[0], -1)
            most = (1 + magnitude[number][rows]).square().amax(1, keepdim=True) if weight.numel() else 1
            allowed = 1e-6 * (indices.numel() + 20) * most
            assert_close_to_reference(state[rows], right[rows], allowed)
            assert torch.equal(state[~rows], old[~rows])


SPECS = {
    "one": [(torch.float32, 8, (9, 30, 4))],
    "dims": [(torch.float32, dim, (5 + dim % 7, 12)) for dim in (1, 3, 4, 16, 17, 64, 100, 300, 1100)],
    "mixed": [(torch.float32, 8, (9, 7)), (torch.bfloat16, 20, (6, 4)), (torch.float16, 33, (6, 5))],
    "empty": [(torch.float32, 0, (4, 0)), (torch.float32, 8, (0, 9)), (torch.float32, 4, ())],
}


def features_of(tables, summed):
    if summed:
        return [Feature(table, "sum", (None, 1)[table % 2]) for table in range(tables)]
    modes = [
        Feature(table, ("sum", "mean", "max")[table % 3], (None, 0)[table % 2]) for table in range(tables)
    ]
    return [*modes, Feature(0, "max", 1), Feature(1, "sum", None), Feature(0, "mean", None)]


@pytest.mark.parametrize("summed", (False, True))
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kind", range(4), ids=KINDS)
def test_agrees_with_the_reference(kind, name, summed):
    problem = Groups(SPECS[name], features_of(sum(len(sizes) for *_, sizes in SPECS[name]), summed))
    for integer, bags in ((torch.int64, 7), (torch.int32, 1), (torch.int64, 0), (torch.int32, 33)):
        indices, offsets = problem.lookups(bags, integer=integer)
        grad = torch.randn(bags, problem.output_dim).to(DTYPES[bags % 3])
        check(problem, grad, indices, offsets, kind=kind, step=1 + bags)
        if summed:
            check(problem, grad, indices, offsets, torch.randn(indices.numel()), kind)


@st.composite
def cases(draw):
    """Groups, features over their tables (several of one table), and the seed of all numbers."""
    groups = draw(
        st.lists(
            st.tuples(
                st.sampled_from(DTYPES),
                st.sampled_from((1, 2, 3, 4, 8, 15, 16, 17, 32, 64, 65)),
                st.lists(st.integers(1, 9), min_size=1, max_size=3),
            ),
            min_size=1,
            max_size=3,
        )
    )
    tables = sum(len(sizes) for *_, sizes in groups)
    feature = st.builds(
        Feature,
        st.integers(0, tables - 1),
        st.sampled_from(("sum", "mean", "max")),
        st.sampled_from((None, 0)),
    )
    return groups, draw(st.lists(feature, min_size=1, max_size=5)), draw(st.integers(0, 2**31))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.integers(0, 3), st.integers(0, 9), st.integers(0, 12))
def test_small_cases(case, kind, bags, longest):
    groups, features, seed = case
    torch.manual_seed(seed)
    problem = Groups(groups, features)
    indices, offsets = problem.lookups(bags, longest)
    check(problem, torch.randn(bags, problem.output_dim), indices, offsets, kind=kind)


@pytest.mark.parametrize("kind", range(4), ids=KINDS)
def test_a_million_lookups_of_one_row(kind, threads):
    """In bags of many lengths; together with rows that few lookups hit."""
    threads(2)
    problem = Groups([(torch.float32, 8, (5, 40))], [Feature(0, "mean", None), Feature(1, "sum", None)])
    bags, count = 2000, 1_000_000
    ends = torch.cat((torch.randint(count, (bags - 1,)).sort().values, torch.tensor([count])))
    few = torch.arange(1, bags + 1) + count
    indices = torch.cat((torch.full((count,), 3), torch.randint(40, (bags,))))
    offsets = torch.cat((torch.tensor([0]), ends, few))
    grad = torch.randn(bags, 16)
    total = grad[:, :8][torch.cat((torch.tensor([0]), ends)).diff() > 0].double().sum(0)
    weight, before = problem.weights[0], problem.weights[0].clone()
    first = problem.places[0][1]
    states = states_of(kind, [weight])
    row = [state[first + 3].double().reshape(1, -1) for state in states]
    update(problem, grad, indices, offsets, kind=kind, states=states)
    want, _ = updated(KINDS[kind], before[first + 3][None], row, total[None], torch.tensor([True]), 1, HYPER)
    assert_close_to_reference(weight[first + 3][None], want, 2e-2)  # 10^6 additions in float32
    others = torch.arange(5) != 3
    assert torch.equal(weight[first : first + 5][others], before[first : first + 5][others])


@pytest.mark.parametrize("kind", range(4), ids=KINDS)
def test_same_bits_for_any_number_of_threads(kind, threads):
    groups = [(torch.float32, 16, (7, 900, 20_000)), (torch.bfloat16, 4, (300,))]
    features = [Feature(0, "mean", None), Feature(1, "sum", 3), Feature(2, "sum", None), Feature(3, "max", 0)]
    problem = Groups(groups, [*features, Feature(1, "max", None)])
    indices, offsets = problem.lookups(500, 30)
    grad, states = torch.randn(500, problem.output_dim), states_of(kind, problem.weights)
    winners, results = problem.winners(indices, offsets), []
    for count in (1, 2, 3, 8):
        threads(count)
        weights, own = [w.clone() for w in problem.weights], [state.clone() for state in states]
        options = {"weights": weights, "winners": winners, "stochastic_rounding": True, "seed": 5}
        update(problem, grad, indices, offsets, kind=kind, states=own, **options)
        results.append([tensor.nan_to_num() for tensor in (*weights, *own)])
    for other in results[1:]:
        assert all(torch.equal(one, same) for one, same in zip(results[0], other, strict=True))


@pytest.mark.parametrize("kind", range(4), ids=KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_summed_rows_are_updated_alike(kind, dtype):
    problem = Groups([(dtype, 20, (9, 300, 4))], features_of(3, False))
    indices, offsets = problem.lookups(60)
    grad, states = torch.randn(60, problem.output_dim), states_of(kind, problem.weights)
    call = grad, problem.rows, indices, offsets, 0, *problem.weights[0].shape, 0, None
    rows, sums = _ops.fused_embedding_bag_sparse_backward(*call, problem.winners(indices, offsets))
    weight, own = problem.weights[0].clone(), [state.clone() for state in states]
    numbers, rounding = numbers_of(step=3), (kind, True, 77)
    with torch.no_grad():
        assert _ops.rows_update(weight, own, rows, sums, numbers, *rounding) is None
    options = {"numbers": numbers, "stochastic_rounding": True, "seed": 77}
    update(problem, grad, indices, offsets, kind=kind, states=states, **options)
    assert torch.equal(weight.nan_to_num(), problem.weights[0].nan_to_num())
    assert all(torch.equal(one, same) for one, same in zip(own, states, strict=True))


@pytest.mark.parametrize("sums_dtype", DTYPES, ids=str)
def test_rows_update_reads_any_sums(sums_dtype):
    weight, rows = torch.randn(700, 5), torch.randperm(700)[:600].sort().values
    sums = torch.randn(600, 10).to(sums_dtype)[:, ::2]
    want = weight.double()
    want[rows] -= 0.5 * sums.double()
    _ops.rows_update(weight, [], rows, sums, numbers_of(Hyper(lr=0.5)), 0)
    assert_close_to_reference(weight, want, 1e-6)
    before = weight.clone()
    outside = torch.tensor([-1, 700, 2**62, -(2**62)])
    _ops.rows_update(weight, [], outside, torch.ones(4, 5), numbers_of(), 0)
    _ops.rows_update(weight, [], rows[:0], sums[:0], numbers_of(), 0)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_stochastic_rounding_keeps_the_mean(dtype):
    """Of values between two neighbours, normal and subnormal, either sign; and repeatable."""
    values = torch.tensor([1.0, -1.0, 300.7, 2.0**-20, -(2.0**-16), 1e-3, 0.0, 3.14159])
    values = values + torch.tensor([0.3, 0.1, 0.0, 2.0**-27, 2.0**-30, 0.0, 0.0, 0.0])
    rows, found = torch.arange(20_000), []
    for seed in (1, 1, 2):
        weight = torch.zeros(20_000, 8, dtype=dtype)
        numbers = numbers_of(Hyper(lr=-1.0))
        _ops.rows_update(weight, [], rows, values.expand(20_000, 8), numbers, 0, True, seed)
        found.append(weight)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    nearest = values.to(dtype)
    gap = torch.maximum(
        (nearest.nextafter(torch.tensor(math.inf, dtype=dtype)) - nearest).float(),
        (nearest - nearest.nextafter(torch.tensor(-math.inf, dtype=dtype))).float(),
    )
    for weight in found:
        assert ((weight.float() - values).abs() <= gap).all()
        assert ((weight.double().mean(0) - values).abs() <= 0.02 * gap).all()
    columns = (found[0] > nearest).float() - (found[0] > nearest).float().mean(0)
    spread = columns.std(0)
    columns = columns[:, spread > 0] / spread[spread > 0]
    assert ((columns.t() @ columns / 20_000 - torch.eye(columns.shape[1])).abs() < 0.04).all()


@pytest.mark.parametrize("stochastic", (False, True))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_finite_gradients_stay_in_their_row(dtype, stochastic):
    problem = Groups([(dtype, 4, (6,))], [Feature(0, "sum", None)])
    grad = torch.ones(3, 4)
    grad[1] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30])
    update(problem, grad, torch.tensor([0, 1, 2]), torch.arange(4), stochastic_rounding=stochastic)
    table = problem.tables[0].float()
    assert table[[0, 2, 3, 4, 5]].isfinite().all()
    most = -0.1e30 if dtype != torch.float16 else -torch.inf
    assert table[1, 0].isnan() and table[1, 1] == -torch.inf and table[1, 2] == torch.inf
    assert table[1, 3] == most or abs(table[1, 3] / most - 1) < 0.01


def test_without_decay_non_finite_weights_do_not_change():
    weight = torch.tensor([[torch.inf, 1.0], [-torch.inf, 1.0]])
    state = torch.zeros(2)
    _ops.rows_update(weight, [state], torch.tensor([0, 1]), torch.ones(2, 2), numbers_of(Hyper()), 2)
    assert weight[:, 0].tolist() == [torch.inf, -torch.inf] and state.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", range(4), ids=KINDS)
def test_skip_and_scale(kind):
    problem = Groups([(torch.float32, 8, (9,))], [Feature(0, "sum", None)])
    indices, offsets = problem.lookups(9)
    grad, states = torch.randn(9, 8), states_of(kind, problem.weights)
    before = [tensor.clone() for tensor in (*problem.weights, *states)]
    skip = numbers_of()
    skip[SKIP] = 1
    update(problem, grad * torch.nan, indices, offsets, kind=kind, states=states, numbers=skip)
    _ops.rows_update(problem.weights[0], states, torch.tensor([4]), torch.full((1, 8), torch.nan), skip, kind)
    now = [*problem.weights, *states]
    assert all(
        torch.equal(one.nan_to_num(), same.nan_to_num()) for one, same in zip(now, before, strict=True)
    )
    other = [before[0].clone(), *(state.clone() for state in states)]
    update(problem, 4 * grad, indices, offsets, kind=kind, states=states, numbers=numbers_of(scale=0.25))
    options = {"weights": other[:1], "states": other[1:]}
    update(problem, grad, indices, offsets, kind=kind, **options)
    assert torch.equal(other[0].nan_to_num(), problem.weights[0].nan_to_num())


def test_features_that_are_not_looked_at():
    problem = Groups(SPECS["mixed"], features_of(6, True))
    indices, offsets = problem.lookups(9)
    grad = torch.randn(9, problem.output_dim)
    own, before = problem.rows[:, 0] == 1, [weight.clone() for weight in problem.weights]
    features = problem.rows.clone()
    features[:, 0] = torch.where(own, 0, -1)
    features[~own, 1:6] = 7  # any value
    states = states_of(1, problem.weights[1:2])
    update(problem, grad, indices, offsets, kind=1, weights=problem.weights[1:2], states=states,
           features=features)  # fmt: skip
    changed = [not torch.equal(w.nan_to_num(), b.nan_to_num()) for w, b in
               zip(problem.weights, before, strict=True)]  # fmt: skip
    assert changed == [False, True, False]


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("kind", range(4), ids=KINDS)
def test_bad_contents_have_no_effect(name, kind):
    """The rows that change are those of the sparse gradient, which leaves bad lookups out."""
    problem = Groups(SPECS["one"], features_of(3, True))
    indices, offsets = problem.lookups(9)
    BAD[name](indices, offsets)
    grad = torch.randn(9, problem.output_dim)
    ((rows, _),) = problem.sparse(grad, indices, offsets)
    before = problem.weights[0].clone()
    update(problem, grad, indices, offsets, kind=kind)
    changed = (problem.weights[0].nan_to_num() != before.nan_to_num()).any(1).nonzero()[:, 0]
    assert torch.equal(changed, rows) and problem.tables[0].isfinite().all()


def _no(_):
    return []


def _wide(tensor):
    return torch.empty(tensor.shape[0], tensor.shape[1] + 1, dtype=tensor.dtype)[:, 1:]


WRONG = {
    "strided weights": ({"weights": lambda w: [_wide(w)]}, ValueError, "weights.*contiguous"),
    "strided states": ({"states": lambda w: [_wide(w)]}, ValueError, "states.*contiguous"),
    "a flat weight": ({"weights": lambda w: [w.view(-1)]}, ValueError, "weights"),
    "double weights": ({"weights": lambda w: [w.double()]}, TypeError, "weights is float64"),
    "half states": ({"states": lambda w: [w.half()]}, ValueError, r"states is float16.*float32 \["),
    "states of a row": ({"states": lambda w: [w[:, 0].contiguous()]}, ValueError, "states is float32"),
    "few states": ({"states": _no}, ValueError, "0 tensors; expected 1"),
    "another optimizer": ({"optimizer": lambda w: 4}, ValueError, "optimizer is 4"),
    "double numbers": ({"numbers": lambda w: torch.zeros(8).double()}, ValueError, r"float32 \[8\]"),
    "few numbers": ({"numbers": lambda w: torch.zeros(7)}, ValueError, r"numbers .*float32 \[8\]"),
    "grad of other bags": ({"grad": lambda w: torch.zeros(3, 24)}, ValueError, "bags"),
    "grad of integers": ({"grad": lambda w: torch.zeros(7, 24).long()}, TypeError, "int64"),
    "factors": ({"per_sample_weights": lambda w: torch.zeros(3)}, ValueError, "per_sample_weights"),
    "winners": ({"winners": lambda w: torch.zeros(7, 3).long()}, ValueError, "winners"),
    "features": ({"features": lambda w: torch.zeros(3, 6).long()}, ValueError, "features"),
    "too few weights": ({"weights": _no, "states": _no}, ValueError, "weight 0; expected one of 0"),
    "another dim": (
        {"weights": lambda w: [w.view(-1, 4)], "states": lambda w: [w.view(-1, 4)]},
        ValueError,
        "whole rows",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    changes, error, text = WRONG[name]
    problem = Groups(SPECS["one"], features_of(3, True))
    indices, offsets = problem.lookups(7)
    before = problem.weights[0].clone()
    given = {"grad": torch.zeros(7, 24)}
    given |= {name: change(problem.weights[0]) for name, change in changes.items()}
    with pytest.raises(error, match=f"recfuse.fused_embedding_bag_update.*{text}"):
        update(problem, given.pop("grad"), indices, offsets, kind=1, **given)
    assert torch.equal(problem.weights[0].nan_to_num(), before.nan_to_num())


WRONG_ROWS = {
    "strided weight": ({"weight": _wide(torch.empty(5, 4))}, "contiguous"),
    "int32 rows": ({"rows": torch.zeros(2).int()}, "rows is int32"),
    "other sums": ({"sums": torch.zeros(3, 4)}, r"sums .*expected \[2, 4\]"),
    "narrow sums": ({"sums": torch.zeros(2, 3)}, r"sums .*expected \[2, 4\]"),
    "states": ({"states": [torch.zeros(5, 4)] * 2}, "2 tensors; expected 1"),
    "a state": ({"states": [torch.zeros(5, 3)]}, r"float32 \[5, 4\]"),
    "seed": ({"optimizer": -1}, "optimizer is -1"),
}


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_wrong_rows(name):
    changes, text = WRONG_ROWS[name]
    arguments = {"weight": torch.zeros(5, 4), "states": [torch.zeros(5, 4)], "rows": torch.tensor([1, 2])}
    arguments |= {"sums": torch.zeros(2, 4), "numbers": numbers_of(), "optimizer": 1}
    with pytest.raises(RuntimeError, match=f"recfuse.rows_update.*{text}"):
        _ops.rows_update(**{**arguments, **changes})


@pytest.mark.parametrize("kind", range(4), ids=KINDS)
def test_opcheck(kind):
    weight, rows = torch.randn(9, 4), torch.tensor([1, 5])
    states = states_of(kind, [weight])
    torch.library.opcheck(
        _ops.rows_update.default, (weight, states, rows, torch.randn(2, 4), numbers_of(), kind)
    )
    problem = Groups(SPECS["one"], features_of(3, True))
    call = problem.weights, states_of(kind, problem.weights), problem.rows, *problem.lookups(7)
    torch.library.opcheck(  # its schema hides that weights change
        _ops.fused_embedding_bag_update.default,
        (torch.randn(7, 24), *call, None, None, numbers_of(), [], kind),
        test_utils=("test_faketensor", "test_autograd_registration"),
    )
