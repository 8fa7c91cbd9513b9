"""`recfuse place`: every table is placed once, within memory, and the slowest rank is near the best."""

from __future__ import annotations

import itertools
import json
import random
import time
from typing import Any

import pytest
import torch

from recfuse.cli import main
from recfuse.perf.choosing import choose
from recfuse.perf.placement import Placement, Shard, Table, place


def tables(count: int, seed: int = 0) -> list[Table]:
    rng = random.Random(seed)
    return [
        Table(
            f"t{number}",
            round(10 ** rng.uniform(2, 7)),
            rng.choice((16, 32, 64, 128)),
            rng.choice((1, 2, 5, 20)),
        )
        for number in range(count)
    ]


def columns_of(found: Placement, table: Table) -> list[int]:
    shards = sorted(
        (one for one in found.shards if one.table == table.name), key=lambda one: one.first_column
    )
    assert [one.first_column for one in shards] == list(
        itertools.accumulate((one.columns for one in shards[:-1]), initial=0)
    )
    return [one.columns for one in shards]


@pytest.mark.parametrize(("count", "gpus"), [(1, 1), (3, 4), (26, 2), (26, 4), (200, 8)])
def test_every_column_is_placed_once(count, gpus):
    given = tables(count)
    found = place(given, gpus, 70e9, gpu="H100")
    assert {one.table for one in found.shards} == {table.name for table in given}
    assert all(sum(columns_of(found, table)) == table.dim for table in given)
    assert sum(found.bytes) == sum(table.bytes for table in given) and max(found.bytes) <= 70e9
    assert all(0 <= one.rank < gpus for one in found.shards) and len(found.rank_us) == gpus


def test_the_slowest_rank_is_near_the_mean():
    found = place(tables(100), 4, 70e9, gpu="H100")
    assert found.us < 1.01 * sum(found.rank_us) / 4


def test_placement_equals_the_best_of_all():
    given = [
        Table(f"t{number}", 10_000, 64, pooling) for number, pooling in enumerate((50, 40, 30, 20, 20, 20))
    ]
    found = place(given, 2, 70e9, gpu="H100")
    launches = choose("H100").calibration.bags.forward_rates.launches
    alone = {
        table.name: place([table], 1, gpu="H100", batch=4096).pooling_us[0] - launches for table in given
    }
    best = min(
        max(
            sum(alone[table.name] for table, rank in zip(given, ranks, strict=True) if rank == own)
            for own in (0, 1)
        )
        for ranks in itertools.product((0, 1), repeat=len(given))
    )
    assert max(found.pooling_us) - launches < best * 1.06  # the exchange counts as well


def test_200_tables_on_8_gpus_in_a_second():
    given = tables(200)
    place(given[:2], 2, gpu="H100")  # reads the calibration
    begin = time.process_time()
    place(given, 8, 70e9, gpu="H100")
    assert time.process_time() - begin < 1.0


def test_tables_that_are_too_large_are_halved():
    found = place([Table("large", 200_000_000, 128), Table("small", 100, 64)], 2, 70e9, gpu="H100")
    assert [one.columns for one in found.shards if one.table == "large"] == [64, 64]
    assert max(found.bytes) <= 70e9 and "cut into columns: large" in str(found)


def test_training_costs_more():
    inference, training = (place(tables(20), 2, 70e9, gpu="H100", training=one) for one in (False, True))
    assert training.us > 1.5 * inference.us


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([], {}, "no table is given"),
        ([Table("a", 10, 8), Table("a", 20, 8)], {}, "two tables are named 'a'"),
        ([{"name": "a", "rows": 10}], {}, "expected name, rows and dim"),
        ([{"name": "a", "rows": 0, "dim": 8}], {}, "rows of 'a' is 0"),
        ([Table("a", 10**9, 100)], {"memory": 1e9}, "even parts of its 100 columns do not fit in 1.0 GB"),
        (
            [Table(f"{n}", 10**6, 100) for n in range(9)],
            {"memory": 1e9},
            "the tables have 3.6 GB, 2 GPUs have room for 2.0",
        ),
    ],
)
def test_tables_that_do_not_fit_are_refused(given: Any, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        place(given, 2, gpu="H100", **options)


def test_the_command(tmp_path, capsys):
    path, out = tmp_path / "tables.json", tmp_path / "placement.json"
    path.write_text(
        json.dumps([{"name": f"t{n}", "rows": 1000 * (n + 1), "dim": 64, "pooling": n} for n in range(1, 9)])
    )
    assert (
        main(["place", str(path), "--gpus", "4", "--memory", "70GB", "--gpu", "h100", "--json", str(out)])
        == 0
    )
    assert "slowest rank" in capsys.readouterr().out
    record = json.loads(out.read_text())
    assert len(record["rank_us"]) == 4 and len(record["shards"]) >= 8
    path.write_text('{"name": 3}')
    with pytest.raises(SystemExit):
        main(["place", str(path)])
    error = capsys.readouterr().err
    assert "expected a list of objects" in error and error.count("recfuse place: ") == 1


def test_torchrec_accepts_the_placement():
    pytest.importorskip("torchrec")
    given = [Table("large", 200_000_000, 128), Table("small", 100, 64)]
    found = place(given, 2, 70e9, gpu="H100")
    constraints = found.torchrec_constraints()
    assert constraints["large"].sharding_types == ["column_wise"] and constraints["large"].min_partition == 64
    assert constraints["small"].sharding_types == ["table_wise"]
    assert found.torchrec_sharding().keys() == {"large", "small"}
    assert sorted(found.ranks_of("large")) == [0, 1]


def test_torchrec_gets_the_columns_of_each_rank():
    torchrec = pytest.importorskip("torchrec")
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan

    widths = [(0, 32, 2), (32, 16, 0), (48, 16, 1)]
    shards = [Shard("a", rank, first, columns) for first, columns, rank in widths]
    placed = Placement(tuple(shards), (1.0,) * 3, (1.0,) * 3, (1,) * 3)
    config = torchrec.EmbeddingBagConfig(name="a", embedding_dim=64, num_embeddings=10, feature_names=["f"])
    collection = torchrec.EmbeddingBagCollection([config], device=torch.device("meta"))
    plan = construct_module_sharding_plan(
        collection, placed.torchrec_sharding(), EmbeddingBagCollectionSharder(), local_size=3, world_size=3,
        device_type="cuda",
    )  # fmt: skip
    parts = plan["a"].sharding_spec.shards
    placed_at = [(part.shard_offsets[1], part.shard_sizes[1], part.placement.rank()) for part in parts]
    assert placed_at == [(0, 16, 2), (16, 16, 2), (32, 16, 0), (48, 16, 1)]
