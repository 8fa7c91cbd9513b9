"""``TableBatchedEmbeddingBags`` compared with FBGEMM's module of the same interface."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("fbgemm_gpu")
pytest.importorskip("torchrec")

from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

from recfuse.torchrec import TableBatchedEmbeddingBags

ROWS, DIMS, TABLE_OF_FEATURE = (20, 7, 30), (8, 4, 8), [0, 1, 1, 2]
SPECS = [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in zip(ROWS, DIMS, strict=True)]
OPTIMIZERS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
COMMON = {
    "feature_table_map": TABLE_OF_FEATURE,
    "learning_rate": 0.1,
    "eps": 1e-3,
    "device": "cpu",
    "stochastic_rounding": False,
}


def make(kind=TableBatchedEmbeddingBags, specs=SPECS, **options):
    made = kind(specs, **{**COMMON, **options})
    for number, rows in enumerate(made.split_embedding_weights()):
        rows.copy_(torch.rand(rows.shape, generator=torch.Generator().manual_seed(number)) - 0.5)
    return made


def lookups(bags=5, weighted=False, sizes=None):
    """Indices, offsets and weights; ``sizes``: bags of each feature."""
    sizes = [bags] * len(TABLE_OF_FEATURE) if sizes is None else sizes
    lengths = [torch.randint(0, 4, (size,)) for size in sizes]
    indices = [
        torch.randint(0, ROWS[table], (int(each.sum()),))
        for table, each in zip(TABLE_OF_FEATURE, lengths, strict=True)
    ]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])
    indices = torch.cat(indices)
    return indices, offsets, torch.rand(len(indices)) if weighted else None


def assert_same(ours, theirs, tolerance=1e-5):
    for own, other in zip(ours.split_embedding_weights(), theirs.split_embedding_weights(), strict=True):
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)
    assert [s.keys() for s in ours.get_optimizer_state()] == [s.keys() for s in theirs.get_optimizer_state()]
    pairs = zip(ours.split_optimizer_states(), theirs.split_optimizer_states(), strict=True)
    for own, other in itertools.chain.from_iterable(zip(*pair, strict=True) for pair in pairs):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("precision", ["FP32", "FP16"])
@pytest.mark.parametrize("output", ["FP32", "FP16"])
@pytest.mark.parametrize("pooling", ["SUM", "MEAN", "weighted"])
def test_training_is_that_of_fbgemm(optimizer, precision, output, pooling):
    weighted = pooling == "weighted"
    options = {
        "optimizer": optimizer,
        "weights_precision": SparseType[precision],
        "output_dtype": SparseType[output],
        "pooling_mode": PoolingMode.MEAN if pooling == "MEAN" else PoolingMode.SUM,
    }
    ours, theirs = make(**options), make(SplitTableBatchedEmbeddingBagsCodegen, **options)
    tolerance = 1e-5 if precision == output == "FP32" else 4e-3
    for _ in range(10):
        indices, offsets, weights = lookups(weighted=weighted)
        factors = [None if weights is None else weights.clone().requires_grad_() for _ in range(2)]
        pooled = [
            each(indices, offsets, factor) for each, factor in zip((ours, theirs), factors, strict=True)
        ]
        assert pooled[0].dtype == pooled[1].dtype
        torch.testing.assert_close(*pooled, rtol=tolerance, atol=tolerance)
        gradient = torch.rand_like(pooled[0])
        for each in pooled:
            each.backward(gradient)
        if weighted:
            torch.testing.assert_close(factors[0].grad, factors[1].grad, rtol=tolerance, atol=tolerance)
    assert_same(ours, theirs, 1e-5 if precision == "FP32" else 4e-3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("output", ["FP32", "BF16"])
def test_bfloat16_is_float32_rounded_after_each_update(optimizer, output):
    """FBGEMM has no bfloat16 on the CPU: its float32 tables take the rounded rows before each step."""
    options = {"optimizer": optimizer, "output_dtype": SparseType[output]}
    ours = make(weights_precision=SparseType.BF16, **options)
    theirs = make(SplitTableBatchedEmbeddingBagsCodegen, optimizer=optimizer)
    for _ in range(10):
        for own, other in zip(ours.split_embedding_weights(), theirs.split_embedding_weights(), strict=True):
            other.copy_(own)
        indices, offsets, _ = lookups()
        pooled, expected = ours(indices, offsets), theirs(indices, offsets)
        torch.testing.assert_close(pooled, expected.to(pooled.dtype), rtol=1e-5, atol=1e-6)
        gradient = torch.rand_like(pooled)
        pooled.backward(gradient)
        expected.backward(gradient.float())
        for own, other in zip(ours.split_embedding_weights(), theirs.split_embedding_weights(), strict=True):
            assert own.dtype is torch.bfloat16
            rounded = other.bfloat16()
            assert (own != rounded).float().mean() < 0.01  # ties, of sums in another order
            torch.testing.assert_close(own, rounded, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("precision", ["FP16", "BF16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda kind: kind.name)
def test_stochastic_rounding_keeps_the_mean(precision, optimizer):
    """A step of a tenth of the distance to the next number. On the CPU FBGEMM rounds to the nearest."""
    rows, dim = 2000, 16
    place = EmbeddingLocation.HOST, ComputeDevice.CPU
    below = {"FP16": 2**-11, "BF16": 2**-8}[precision]  # from 1 to the next number below it
    moved = {}
    for rounding in (False, True):
        tables = make(
            specs=[(rows, dim, *place)],
            feature_table_map=[0],
            optimizer=optimizer,
            learning_rate=0.1 * below,
            eps=0.0,
            stochastic_rounding=rounding,
            weights_precision=SparseType[precision],
        )
        (weight,) = tables.split_embedding_weights()
        weight.fill_(1.0)
        pooled = tables(torch.arange(rows), torch.arange(rows + 1))
        pooled.backward(torch.ones_like(pooled))  # with Adagrad's states the step is that of SGD
        moved[rounding] = (1 - weight.float()) / below
    assert moved[False].abs().max() == 0
    assert set(moved[True].unique().tolist()) == {0.0, 1.0}
    deviation = (0.1 * 0.9 / moved[True].numel()) ** 0.5
    assert abs(moved[True].mean().item() - 0.1) < 5 * deviation


def test_adam_is_fbgemms_formula():
    ours = make(optimizer=EmbOptimType.ADAM, beta1=0.8, beta2=0.99)
    expected = [rows.double().clone() for rows in ours.split_embedding_weights()]
    moments = [(torch.zeros_like(rows), torch.zeros_like(rows)) for rows in expected]
    for step in range(1, 8):
        indices, offsets, _ = lookups()
        pooled = ours(indices, offsets)
        gradient = torch.rand_like(pooled)
        pooled.backward(gradient)
        sums = [torch.zeros_like(rows) for rows in expected]
        column = 0
        for feature, table in enumerate(TABLE_OF_FEATURE):
            for bag in range(5):
                at = feature * 5 + bag
                for index in indices[offsets[at] : offsets[at + 1]]:
                    sums[table][index] += gradient[bag, column : column + DIMS[table]].double()
            column += DIMS[table]
        for table, total in enumerate(sums):
            looked_up = total.abs().sum(1) > 0
            first, second = moments[table]
            first[looked_up] = 0.8 * first[looked_up] + 0.2 * total[looked_up]
            second[looked_up] = 0.99 * second[looked_up] + 0.01 * total[looked_up] ** 2
            move = first / (1 - 0.8**step) / ((second / (1 - 0.99**step)).sqrt() + 1e-3)
            expected[table][looked_up] -= 0.1 * move[looked_up]
    for rows, other in zip(ours.split_embedding_weights(), expected, strict=True):
        torch.testing.assert_close(rows.double(), other, rtol=1e-5, atol=1e-6)
    assert list(ours.get_optimizer_state()[0]) == ["exp_avg", "exp_avg_sq"]


def test_a_batch_size_for_each_feature():
    sizes = [[2, 3], [0, 1], [4, 4], [1, 0]]
    for optimizer in (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD):
        ours = make(optimizer=optimizer)
        theirs = make(SplitTableBatchedEmbeddingBagsCodegen, optimizer=optimizer)
        for _ in range(3):
            indices, offsets, _ = lookups(sizes=[sum(ranks) for ranks in sizes])
            pooled = [
                each(indices, offsets, batch_size_per_feature_per_rank=sizes) for each in (ours, theirs)
            ]
            torch.testing.assert_close(pooled[0], pooled[1].reshape(-1))
            gradient = torch.rand_like(pooled[0])
            pooled[0].backward(gradient)
            pooled[1].backward(gradient.view_as(pooled[1]))
        assert_same(ours, theirs)


def test_a_batch_size_for_each_feature_into_an_output():
    tables = make()
    sizes = [[2, 1], [1, 1], [0, 3], [2, 2]]
    indices, offsets, _ = lookups(sizes=[sum(ranks) for ranks in sizes])
    flat = tables(indices, offsets, batch_size_per_feature_per_rank=sizes)
    lengths = [
        ranks[rank] * DIMS[table]
        for rank in range(2)
        for ranks, table in zip(sizes, TABLE_OF_FEATURE, strict=True)
    ]
    begins, at = [], 3
    for length in lengths:  # 3 elements before each piece
        begins.append(at)
        at += length + 3
    before = torch.rand(at, requires_grad=True)
    into = tables(
        indices,
        offsets,
        batch_size_per_feature_per_rank=sizes,
        vbe_output=before,
        vbe_output_offsets=torch.tensor(begins).view(2, -1),
    )
    pieces = [into[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)]
    torch.testing.assert_close(torch.cat(pieces), flat)
    assert torch.equal(into[:3], before[:3])
    into.sum().backward()
    assert before.grad.sum() == at - sum(lengths)


def test_several_forward_passes_before_their_backward_passes():
    ours, theirs = make(), make(SplitTableBatchedEmbeddingBagsCodegen)
    for _ in range(3):
        batches = [lookups()[:2] for _ in range(3)]
        for each in (ours, theirs):
            for pooled in [each(*batch) for batch in batches]:
                pooled.square().sum().backward()
    assert_same(ours, theirs)


@pytest.mark.parametrize("optimizer", (*OPTIMIZERS, EmbOptimType.ADAM), ids=str)
def test_training_under_a_profiler_or_a_hook_of_all_steps(optimizer):
    """Both run torch's hooks of a step, which check that the optimizer of packed tables is row-wise."""
    ours, plain = make(optimizer=optimizer), make(optimizer=optimizer)
    calls = [lookups() for _ in range(3)]
    for call in calls:
        plain(*call).sum().backward()
    with torch.profiler.profile():
        ours(*calls[0]).sum().backward()
    seen = []
    hook = register_optimizer_step_post_hook(lambda *given: seen.append(given))
    try:
        ours(*calls[1]).sum().backward()
    finally:
        hook.remove()
    assert seen
    ours(*calls[2]).sum().backward()
    assert_same(ours, plain, 0)


def test_hyper_parameters():
    tables = make(optimizer=EmbOptimType.ADAM)
    tables.set_learning_rate(0.5)
    assert tables.get_learning_rate() == 0.5
    tables.update_hyper_parameters({"lr": 0.25, "beta1": 0.5, "beta2": 0.75})
    assert tables.get_learning_rate() == 0.25
    assert tables._fused.param_groups[0]["betas"] == (0.5, 0.75)
    with pytest.raises(NotImplementedError, match="momentum"):
        tables.update_hyper_parameters({"momentum": 0.1})
    before = [rows.clone() for rows in tables.split_embedding_weights()]
    tables.set_learning_rate(0.0)
    indices, offsets, _ = lookups()
    tables(indices, offsets).sum().backward()
    for rows, old in zip(tables.split_embedding_weights(), before, strict=True):
        assert torch.equal(rows, old)


def test_column_shards_of_a_table_lie_under_each_other():
    place = EmbeddingLocation.HOST, ComputeDevice.CPU
    specs = [(5, 3, *place), (9, 3, *place), (5, 3, *place)]
    tables = TableBatchedEmbeddingBags(specs, table_names=["a", "b", "a"], device="cpu")
    first, _, second = tables.split_embedding_weights()
    assert second.data_ptr() - first.data_ptr() == first.numel() * first.element_size()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"optimizer": EmbOptimType.LAMB}, ["optimizer", "LAMB", "EXACT_SGD"]),
        ({"gradient_clipping": True}, ["gradient_clipping", "Leave it out"]),
        ({"max_norm": 1.0}, ["max_norm"]),
        ({"weights_precision": SparseType.INT8}, ["weights_precision", "INT8", "FP16"]),
        ({"output_dtype": SparseType.INT8}, ["output_dtype", "INT8"]),
        ({"pooling_mode": PoolingMode.NONE}, ["pooling_mode", "NONE", "SUM"]),
        ({"weight_decay": 0.1}, ["weight_decay", "EXACT_SGD", "Set it to 0"]),
        (
            {"weight_decay": 0.1, "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD},
            ["weight_decay", "NONE", "WeightDecayMode.L2"],
        ),
        ({"global_weight_decay": object()}, ["global_weight_decay"]),
        ({"no_such_option": 1}, ["no_such_option", "Remove it"]),
    ],
)
def test_options_without_a_fused_form_are_refused_by_name(options, names):
    with pytest.raises((ValueError, TypeError)) as error:
        make(**options)
    assert all(name in str(error.value) for name in names), error.value


def test_options_of_caches_are_accepted():
    make(cache_load_factor=0.5, prefetch_pipeline=True, weight_decay_mode=WeightDecayMode.NONE, eta=0.1)


@pytest.mark.parametrize("location", [EmbeddingLocation.MANAGED, EmbeddingLocation.MANAGED_CACHING])
def test_tables_in_a_cache_are_refused(location):
    with pytest.raises(ValueError, match=f"the_table.*{location.name}.*cache"):
        TableBatchedEmbeddingBags([(4, 4, location, ComputeDevice.CUDA)], table_names=["the_table"])


def test_a_bad_index_names_table_feature_and_bag():
    tables = make(table_names=["a", "b", "c"])
    indices, offsets = torch.tensor([1, 7]), torch.zeros(21, dtype=torch.int64)
    offsets[6:] = 1
    offsets[11:] = 2
    with pytest.raises(IndexError, match=r"feature 2.*bag 0.*7.*a, b, b, c"):
        tables(indices, offsets)
    with pytest.raises(IndexError):
        make(bounds_check_mode=BoundsCheckMode.WARNING)(indices, offsets)


def test_arguments_that_are_not_supported_are_refused():
    indices, offsets, _ = lookups()
    with pytest.raises(ValueError, match="feature_requires_grad"):
        make()(indices, offsets, feature_requires_grad=torch.ones(4))
