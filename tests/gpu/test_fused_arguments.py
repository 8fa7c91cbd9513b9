"""Bad arguments, schedules and mappings of fused calls on a GPU: clear errors, and no harm."""

from __future__ import annotations

import pytest
import torch

from recfuse import errors
from support import gpu
from support.gpu import moved
from support.gpu_fused import FEATURES, GOOD, OFFSETS, OPS, RESULT, SCHEDULES, Fused, ones
from support.library_cases import FREED, TWO_TABLES_ERRORS, two_tables

pytestmark = gpu.MARKS


CONTENTS = {"indices range"}


# A copy on the device is contiguous.
@pytest.mark.parametrize("name", sorted(TWO_TABLES_ERRORS.keys() - FREED - {"buffer strided"}))
def test_bad_arguments_are_the_same_on_every_device(name: str) -> None:
    changes, kind, detail = TWO_TABLES_ERRORS[name]
    arguments = two_tables(**changes)
    on_device = {key: value if key == "features" else moved(value) for key, value in arguments.items()}
    with pytest.raises(RuntimeError) as raised:
        OPS.fused_embedding_bag(**on_device)
        OPS.check(0)
    assert type(raised.value) is errors.BY_NAME[kind]
    assert str(raised.value).startswith(f"recfuse.fused_embedding_bag: {detail}")
    assert ("found on the GPU" in str(raised.value)) == (name in CONTENTS)


def test_tensors_on_different_devices() -> None:
    plain = two_tables(per_sample_weights=torch.rand(40))
    plain["features"][:, 4] = 0
    everywhere = {key: value if key == "features" else moved(value) for key, value in plain.items()}
    OPS.fused_embedding_bag(**everywhere)
    for name in ("weights", "offsets", "per_sample_weights"):
        with pytest.raises(ValueError, match=rf"recfuse\.fused_embedding_bag: .*{name}.*CPU"):
            OPS.fused_embedding_bag(**{**everywhere, name: plain[name]})
    with pytest.raises(ValueError, match=r"recfuse\.fused_embedding_bag: features"):
        OPS.fused_embedding_bag(**{**everywhere, "features": plain["features"].to(gpu.DEVICE)})
    for name in ("weights", "indices", "offsets"):
        with pytest.raises(RuntimeError, match=r"recfuse\.fused_embedding_bag|device"):
            OPS.fused_embedding_bag(**{**plain, name: everywhere[name]})
    rows = torch.zeros(2, 5, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"recfuse\.fused_embedding_bag: schedules"):
        OPS.fused_embedding_bag(**everywhere, schedules=rows.to(gpu.DEVICE))


BAD_SCHEDULES = {
    "shape": torch.zeros(3, 5, dtype=torch.int32),
    "width": torch.zeros(2, 6, dtype=torch.int32),
    "dims": torch.zeros(10, dtype=torch.int32),
    "dtype": torch.zeros(2, 5, dtype=torch.int64),
    "kind": torch.tensor([[0] * 5, [9, 0, 0, 0, 0]], dtype=torch.int32),
    "negative kind": torch.tensor([[0] * 5, [-1, 0, 0, 0, 0]], dtype=torch.int32),
    "threads": torch.tensor([[0] * 5, [1, 48, 0, 0, 0]], dtype=torch.int32),
    "distance": torch.tensor([[0] * 5, [1, 0, 17, 0, 0]], dtype=torch.int32),
    "split": torch.tensor([[0] * 5, [1, 0, 0, 65, 0]], dtype=torch.int32),
    "least": torch.full((2, 5), -(2**31), dtype=torch.int32),
    "most": torch.full((2, 5), 2**31 - 1, dtype=torch.int32),
}


@pytest.mark.parametrize("name", BAD_SCHEDULES)
def test_bad_schedules(name: str) -> None:
    arguments = {key: value if key == "features" else moved(value) for key, value in two_tables().items()}
    with pytest.raises(RuntimeError, match=r"^recfuse\.fused_embedding_bag: .*schedule"):
        OPS.fused_embedding_bag(**arguments, schedules=BAD_SCHEDULES[name])
    OPS.fused_embedding_bag(**arguments)


def test_any_expectation_is_allowed() -> None:
    for value in (-1, 1, 16, 2**31 - 1):
        rows = torch.tensor([[0, 0, 0, 0, value]] * FEATURES, dtype=torch.int32)
        one = Fused(ones(), schedules=rows)
        got = one.run(torch.tensor(GOOD), torch.tensor(OFFSETS))
        assert got[:, [0, 16, 20]].tolist() == RESULT


def test_bad_mappings() -> None:
    """Any contents: an error, or no harm."""
    one = Fused(ones(), schedules=[SCHEDULES["default"]] * FEATURES)
    given = torch.tensor(GOOD), torch.tensor(OFFSETS)
    good = one.map(given[1])
    for bad in (
        good[:-1], good[:0], good[:, :7], good.long(), good.reshape(-1), torch.zeros_like(good), good + 1,
        Fused(ones(), schedules=[SCHEDULES["pool"]] * FEATURES).map(given[1][:4]),
        torch.full_like(good, 2**31 - 1), torch.full_like(good, -1),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"^recfuse\.fused_embedding_bag: mapping"):
            one.run(*given, mapping=bad)
    assert one.run(*given, mapping=good)[:, [0, 16, 20]].tolist() == RESULT


CORRUPT_MAPPINGS = """
    import sys
    import torch
    import recfuse
    collection = recfuse.nn.FusedEmbeddingBagCollection([(9, 4), (9, 8), (9, 300)], device="cuda")
    offsets = torch.arange(0, 3 * 40 * 3 + 1, 3)
    given = (torch.arange(360) % 9).cuda(), offsets.cuda()
    want = collection(*given)
    mapping = collection.map(offsets)
    torch.manual_seed(int(sys.argv[1]))
    for _ in range(40):
        bad = mapping.tensor.clone()
        row, column = int(torch.randint(0, len(bad), ())), int(torch.randint(0, 8, ()))
        values = -1, 2**31 - 1, -(2**31), 1 << 16, int(bad[row, column]) + 1
        bad[row, column] = values[int(torch.randint(0, 5, ()))]
        try:
            collection(*given, mapping=recfuse.nn.Mapping(bad, 40, mapping.features, mapping.schedules, 0))
        except (ValueError, MemoryError, NotImplementedError):
            pass
        torch.cuda.synchronize()
    assert torch.equal(collection(*given, mapping=mapping), want)
    recfuse.check()
    print("fine")
"""


@pytest.mark.parametrize("seed", range(3))
def test_corrupt_mappings_do_not_end_the_use_of_the_gpu(seed: int) -> None:
    assert gpu.run_alone(CORRUPT_MAPPINGS, str(seed)) == "fine\n"
