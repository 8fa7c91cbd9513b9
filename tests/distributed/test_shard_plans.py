"""Plans of sharding: made without ranks, within memory, even by predicted cost, read back from files."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from recfuse.cli import main
from recfuse.distributed import Cuts, ShardPlan, plan
from recfuse.distributed.plans import TableFacts, placements_of
from recfuse.nn import EmbeddingBag, FusedEmbeddingBagCollection, FusedEmbeddingBagList, Table
from recfuse.perf.choosing import choose
from recfuse.perf.models.exchanges import dense_bytes, gathered_bytes
from recfuse.perf.placing import plan as planning
from recfuse.perf.placing import tables as placing
from recfuse.perf.placing.costs import Costs

GB = 1e9
EMPTY = torch.zeros(0, dtype=torch.int64), torch.tensor([0])
BAD = torch.tensor([9, 50, 9]), torch.arange(4)


def sizes(draw: random.Random) -> list[placing.Table]:
    count = draw.choice((3, 8, 26, 60))
    return [
        placing.Table(
            f"t{number}",
            round(10 ** draw.uniform(1, 7)),
            draw.choice((8, 16, 32, 64, 128)),
            draw.choice((1, 1, 2, 5, 20, 60)),
            draw.choice((2, 4)),
            features=draw.choice((1, 1, 2)),
        )
        for number in range(count)
    ]


def planned(tables: list[placing.Table], ranks: int, **options: Any) -> ShardPlan:
    given = dict(memory=70 * GB, batch=2048, optimizer=None) | options
    return planning.make_plan(tables, ranks, chosen=choose("H100"), where="test", **given)


def collection(device: str = "meta") -> FusedEmbeddingBagCollection:
    tables = [Table(2_000_000, 64, "large"), Table(50, 8, "small"), Table(100_000, 32, "item", "mean")]
    return FusedEmbeddingBagCollection(tables, device=device)


def batch(bags: int = 64, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(count, (bags * 4,), generator=generator) for count in (2_000_000, 50, 100_000)]
    return torch.cat(rows), torch.arange(0, bags * 12 + 1, 4)


def test_the_slowest_rank_is_near_the_mean_of_30_collections():
    ratios = []
    for seed in range(30):
        draw = random.Random(seed)
        ranks, optimizer = draw.choice((2, 3, 4, 8)), draw.choice((None, "SGD", "Adam", "RowWiseAdagrad"))
        tables = sizes(draw)
        found = planned(tables, ranks, optimizer=optimizer, batch=draw.choice((512, 2048, 16384)))
        assert [each.table for each in found.tables] == tables
        assert max(found.bytes) <= 70 * GB
        ratios.append(found.slowest_over_mean)
    assert max(ratios) <= 1.10, ratios


@pytest.mark.parametrize("optimizer", [None, "Adam"])
def test_parts_cover_each_table_once(optimizer):
    tables = sizes(random.Random(3))
    found = planned(tables, 4, optimizer=optimizer, memory=6 * GB)
    assert "copies" in {each.kind for each in found.tables} if optimizer is None else found.us > 0
    for each in found.tables:
        if each.points:
            size = each.table.rows if each.kind == "rows" else each.table.dim
            assert len(each.points) == 5 and (each.points[0], each.points[-1]) == (0, size)
            assert list(each.points) == sorted(each.points)
        assert any(each.is_on(rank) for rank in range(4))


def test_copies_are_where_they_cost_less():
    tables = [placing.Table("small", 100, 64), placing.Table("large", 50_000_000, 64)]
    for optimizer in (None, "SGD"):
        kinds = {each.table.name: each.kind for each in planned(tables, 4, optimizer=optimizer).tables}
        assert kinds["small"] == "copies" and kinds["large"] in ("rows", "columns"), kinds


def test_a_row_wise_state_forbids_cuts_by_columns():
    table = [placing.Table("t", 500_000, 512, 20.0)]
    assert planned(table, 4, optimizer="Adagrad").tables[0].kind == "columns"
    assert planned(table, 4, optimizer="RowWiseAdagrad").tables[0].kind == "rows"


def test_states_and_buffers_count():
    table = [placing.Table("t", 10_000_000, 64, shares=(0.5, 0.5))]
    weights = 10_000_000 * 64 * 4
    counted = {name: planned(table, 1, optimizer=name).bytes[0] for name in (None, "SGD", "Adagrad", "Adam")}
    pooled = 2048 * 64 * 4
    assert weights + 2 * pooled < counted[None] < weights + 20 * pooled
    assert counted["SGD"] - counted[None] == 4 * pooled  # gradients of rows that are pooled, sent and joined
    assert counted["Adagrad"] - counted["SGD"] == weights == counted["Adam"] - counted["Adagrad"]
    assert planned(table, 1, optimizer="RowWiseAdagrad").bytes[0] - counted["SGD"] == 10_000_000 * 4


def test_too_little_memory():
    table = [placing.Table("t", 10_000_000, 64)]
    text = r"memory is 1 GB on each of 2 ranks; expected at least 1\.28 GB for tables, states and exchanges"
    with pytest.raises(ValueError, match=text):
        planned(table, 2, memory=GB)
    assert planned(table, 2, memory=1.35 * GB).tables[0].kind in ("rows", "columns")
    with pytest.raises(ValueError, match="no part of table 't' fits"):
        planned([placing.Table("t", 1, 4, 1e5)], 4, memory=GB / 2, batch=100)


def test_tables_that_hardly_fit():
    """A plan exists with a fifth more memory than the sum of tables, states and exchanges."""
    for seed in range(6):
        draw = random.Random(seed)
        tables, ranks = sizes(draw), draw.choice((2, 3, 4))
        with pytest.raises(ValueError, match="expected at least") as error:
            planned(tables, ranks, memory=1e6, batch=512)
        needed = float(str(error.value).split("at least ")[1].split()[0]) * GB
        assert max(planned(tables, ranks, memory=1.2 * needed, batch=512).bytes) <= 1.2 * needed


def test_a_part_of_rows_sends_rows_of_few_lookups():
    model = choose("H100").calibration.bags
    few, many = placing.Table("t", 1000, 64, 0.25), placing.Table("t", 1000, 64, 4.0)
    inference, training = (Costs(model, 8192, 4, is_training) for is_training in (False, True))
    lookups = inference.lookups(few)
    saved = inference.exchange(64, lookups) - inference.exchange(0.25 * 64, lookups)
    assert inference.load(few) - inference.load(few, True) == pytest.approx(saved)
    assert inference.load(many) == inference.load(many, True)
    assert training.load(few) == training.load(few, True)


def test_skewed_rows_weigh_more():
    table = placing.Table("t", 640, 64, 10.0, unique=100, shares=(0.5, *[0.5 / 63] * 63))
    first, second = placing.rows_from(table, 0, 10), placing.rows_from(table, 10, 640)
    assert first.pooling == pytest.approx(5.0) and second.pooling == pytest.approx(5.0)
    assert placing.rows_from(table, 0, 5).pooling == pytest.approx(2.5)
    assert placing.rows_from(table, 0, 640).pooling == pytest.approx(10.0)
    assert first.unique == pytest.approx(100 / 64)


def test_bytes_of_copies():
    assert gathered_bytes(10, 4, 8, 4, 2, 3) == 2 * (40 + 4 * (4 + 16))
    assert dense_bytes(100, 8, 3) == 2 * 2 * 100 * 33


def test_a_module_its_file_and_its_report(tmp_path):
    found = plan(
        collection(), 2, [batch(seed=seed) for seed in range(3)], 70 * GB, optimizer="SGD", gpu="H100"
    )
    assert (found.ranks, found.batch, found.gpu, found.optimizer) == (2, 64, "H100", "SGD")
    names = [each.table.name for each in found.tables]
    assert names == ["embedding_bags.large", "embedding_bags.small", "embedding_bags.item"]
    facts = found.tables[1].table
    assert (facts.pooling, facts.unique, facts.features) == (4.0, 50, 1)
    assert sum(facts.shares) == pytest.approx(1.0)
    path = tmp_path / "plan.json"
    found.save(path)
    assert ShardPlan.load(path) == found
    lines = found.report().splitlines()
    assert lines[1].startswith("embedding_bags.large  ") and "of the mean" in lines[-1]
    assert "a step of SGD on H100, 64 samples a rank" in lines[-2] and str(found) == found.report()
    record = json.loads(path.read_text())
    assert record["tables"][1]["name"] == "embedding_bags.small"

    def fails(change: Any, message: str) -> None:
        changed = json.loads(path.read_text())
        change(changed)
        other = tmp_path / "other.json"
        other.write_text(json.dumps(changed))
        with pytest.raises((ValueError, TypeError), match=message):
            ShardPlan.load(other)

    fails(lambda one: one.pop("format"), "has no format")
    fails(lambda one: one.update(version=9), "has version 9; expected 1")
    fails(lambda one: one.pop("tables"), "tables")
    fails(lambda one: one["tables"].append(one["tables"][0]), "'embedding_bags.large' is named twice")
    fails(lambda one: one["tables"][0].update(placement={"rows": [0, 1]}), 'expected a rank, "every rank"')
    fails(lambda one: one["tables"][0].update(placement=2), r"expected \[0, 1\]")
    fails(lambda one: one["tables"][0].update(rows=0), "rows of 'embedding_bags.large' is 0")
    fails(lambda one: one["pooling_us"].append(1.0), "pooling_us has 3 elements; expected 2")


def test_a_plan_of_other_ranks_or_tables():
    found = plan(collection(), 2, [batch()], gpu="H100")
    facts = [
        TableFacts(each.table.name, each.table.rows, each.table.dim, torch.float32, 1)
        for each in found.tables
    ]
    assert placements_of(found, facts, 2)
    with pytest.raises(ValueError, match="plan is of 2 ranks, and the mesh has 3"):
        placements_of(found, facts, 3)
    with pytest.raises(ValueError, match="in the plan and 2000001 x 64 in the module"):
        placements_of(found, [facts[0]._replace(rows=2_000_001), *facts[1:]], 2)
    with pytest.raises(ValueError, match="no placement of table 'other'"):
        placements_of(found, [*facts, facts[0]._replace(name="other")], 2)
    with pytest.raises(ValueError, match=r"'embedding_bags\.item' is no table of the module"):
        placements_of(found, facts[:2], 2)


def test_placements_of_a_plan():
    table = placing.Table("t", 10, 8)
    facts = [TableFacts("t", 10, 8, torch.float32, 1)]
    found = planned([table], 2)
    for kind, rank, points, expected in (
        ("whole", 1, (), 1),
        ("copies", 0, (), Replicate()),
        ("rows", 0, (0, 5, 10), Shard(0)),
        ("columns", 0, (0, 0, 8), Cuts(1, (0, 0, 8))),
    ):
        each = planning.Found(table, kind, rank, points)
        own = ShardPlan(**{**vars(found), "tables": (each,)})
        assert planning.from_json(json.loads(json.dumps(own.to_json())), "x") == own
        assert placements_of(own, facts, 2) == placements_of({"t": expected}, facts, 2)


def test_several_collections_and_a_list():
    model = torch.nn.ModuleDict({"p": collection(), "q": FusedEmbeddingBagList([EmbeddingBag(20, 4)])})
    offsets, indices = torch.tensor([[0, 2]]), [torch.tensor([1, 2, 3])]
    found = plan(model, 2, {"p": [batch()], "q": [(offsets, indices)]}, gpu="H100")
    assert [each.table.name for each in found.tables][-1] == "q.0"
    assert found.tables[-1].table.pooling == 1.5
    with pytest.raises(ValueError, match="and the model has 2; expected a dict"):
        plan(model, 2, [batch()])
    with pytest.raises(ValueError, match="batches are of 'p'; expected those of 'p', 'q'"):
        plan(model, 2, {"p": [batch()]})


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (TypeError, {"module": 3}, "module is an int"),
        (ValueError, {"module": torch.nn.Linear(1, 1)}, "recfuse.distributed.plan: the module has no"),
        (ValueError, {"ranks": 0}, "ranks is 0"),
        (ValueError, {"batches": []}, "batches is empty"),
        (TypeError, {"batches": 3}, "expected an iterable of batches"),
        (ValueError, {"batches": [EMPTY]}, "expected the samples of a step"),
        (IndexError, {"batches": [BAD]}, "feature 1: bag 0: place 0: index is 50"),
        (ValueError, {"optimizer": "Adamax"}, "optimizer is 'Adamax'; expected SGD"),
        (ValueError, {"memory": -1.0}, "expected bytes above 0"),
        (ValueError, {"memory": 1e6}, "expected at least"),
    ],
)  # fmt: skip
def test_bad_arguments(kind, options, message):
    arguments = {"module": collection(), "ranks": 2, "batches": [batch()], "gpu": "H100", **options}
    with pytest.raises(kind, match=message):
        plan(**arguments)


def test_the_command_writes_and_reads_a_plan(tmp_path, capsys):
    tables, path = tmp_path / "tables.json", tmp_path / "plan.json"
    records = [{"name": f"t{n}", "rows": 1000 * 10**n, "dim": 64, "pooling": 5} for n in range(4)]
    tables.write_text(json.dumps(records))
    options = ["--memory", "70GB", "--gpu", "h100"]
    assert main(["place", str(tables), "--gpus", "2", *options, "--plan", str(path)]) == 0
    assert "slowest rank" in capsys.readouterr().out
    found = ShardPlan.load(path)
    assert found.ranks == 2 and found.optimizer is None and len(found.tables) == 4
    again = ["--gpus", "4", *options, "--training", "--plan", str(path)]
    assert main(["place", str(path), *again]) == 0
    assert (ShardPlan.load(path).ranks, ShardPlan.load(path).optimizer) == (4, "SGD")
    assert main(["place", str(path), "--gpus", "2", *options]) == 0
    assert "tables" in capsys.readouterr().out


def test_the_plot():
    pytest.importorskip("matplotlib")
    figure = plan(collection(), 2, [batch()], gpu="H100").plot()
    assert len(figure.axes) == 2 and figure.axes[0].get_ylabel() == "µs a step"
