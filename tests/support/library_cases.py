"""Good and bad calls of torch.ops.recfuse.*, for the tests of the library."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import embedding_bag as torch_embedding_bag

import recfuse  # noqa: F401  (registers the operators)

OPS = torch.ops.recfuse
ROWS, DIM, LOOKUPS, BAGS = 100, 12, 60, 7

Inputs = dict[str, Any]


def one_table(**changes: Any) -> Inputs:
    """Arguments of torch.ops.recfuse.embedding_bag: 7 bags of uneven length, one of them empty."""
    torch.manual_seed(1)
    arguments: Inputs = {
        "weight": torch.randn(ROWS, DIM),
        "indices": torch.randint(0, ROWS, (LOOKUPS,)),
        "offsets": torch.tensor([0, 5, 5, 20, 33, 34, 50]),
        "mode": "sum",
    }
    return {**arguments, **changes}


def two_tables(**changes: Any) -> Inputs:
    """Arguments of torch.ops.recfuse.fused_embedding_bag: two tables in one buffer, sum and mean."""
    torch.manual_seed(2)
    arguments: Inputs = {
        "weights": [torch.randn(50 * 4 + 30 * 8)],
        "features": torch.tensor([[0, 0, 50, 4, 0, -1, 0], [0, 200, 30, 8, 1, -1, 4]]),
        "indices": torch.randint(0, 30, (40,)),
        "offsets": torch.tensor([0, 3, 3, 10, 20, 25, 40]),
        "output_dim": 12,
    }
    return {**arguments, **changes}


def expected_one(arguments: Inputs) -> torch.Tensor:
    """torch's own embedding_bag on the same arguments."""
    weights = arguments.get("per_sample_weights")
    return torch_embedding_bag(
        arguments["indices"].long(),
        arguments["weight"],
        arguments["offsets"].long(),
        mode=arguments["mode"],
        per_sample_weights=None if weights is None else weights.float(),
    )


def expected_two(arguments: Inputs) -> torch.Tensor:
    """The two tables of `two_tables`, one after the other."""
    columns = []
    bags = (arguments["offsets"].numel() - 1) // 2
    for feature, mode in enumerate(("sum", "mean")):
        buffer, start, rows, dim = arguments["features"][feature, :4].tolist()
        table = arguments["weights"][buffer].float()[start : start + rows * dim].view(rows, dim)
        offsets = arguments["offsets"].long()[feature * bags : (feature + 1) * bags + 1]
        indices = arguments["indices"].long()[offsets[0] : offsets[-1]]
        columns.append(
            torch_embedding_bag(indices, table, offsets - offsets[0], mode=mode, include_last_offset=True)
        )
    return torch.cat(columns, 1)


def freed(tensor: torch.Tensor, elements: int = 0) -> torch.Tensor:
    """Returns the tensor with only this many elements left in its storage."""
    tensor.untyped_storage().resize_(elements * tensor.element_size())
    return tensor


LAYOUTS: dict[str, Inputs] = {
    "contiguous": {},
    "weight transposed": {"weight": torch.randn(DIM, ROWS).t()},
    "weight with wide rows": {"weight": torch.randn(ROWS, 2 * DIM)[:, 3 : 3 + DIM]},
    "weight with strided columns": {"weight": torch.randn(ROWS, 2 * DIM)[:, ::2]},
    "weight one row expanded": {"weight": torch.randn(1, DIM).expand(ROWS, DIM)},
    "weight overlapping": {"weight": torch.randn(ROWS + DIM).as_strided((ROWS, DIM), (1, 1))},
    "weight of one column": {"weight": torch.randn(ROWS, 3)[:, 1:2]},
    "indices strided": {"indices": torch.randint(0, ROWS, (2 * LOOKUPS,))[::2]},
    "indices int32": {"indices": torch.randint(0, ROWS, (LOOKUPS,), dtype=torch.int32)},
    "indices expanded": {"indices": torch.tensor([3]).expand(LOOKUPS)},
    "offsets strided": {"offsets": torch.arange(0, LOOKUPS)[::10]},
    "offsets int32": {"offsets": torch.tensor([0, 7, 7, 20], dtype=torch.int32)},
    "sample weights strided": {"per_sample_weights": torch.rand(3 * LOOKUPS)[::3]},
    "sample weights float16": {"per_sample_weights": torch.rand(LOOKUPS).half()},
    "sample weights bfloat16": {"per_sample_weights": torch.rand(LOOKUPS).bfloat16()},
    "one offset": {"offsets": torch.tensor([0])},
    "grad": {"weight": torch.randn(DIM, ROWS, requires_grad=True).t()},
}


# The error of each: the arguments, the Python exception, and the beginning of the detail in its text.
ONE_TABLE_ERRORS: dict[str, tuple[Inputs, str, str]] = {
    "weight dims": ({"weight": torch.randn(5)}, "ValueError", "weight has 1 dimension"),
    "weight dtype": ({"weight": torch.randn(5, 2).double()}, "TypeError", "weight is float64"),
    "weight complex": ({"weight": torch.zeros(5, 2).cfloat()}, "TypeError", "weight is comp"),
    "weight odd dtype": (
        {"weight": torch.zeros(5, 2).to(torch.float8_e4m3fn)},
        "TypeError",
        "weight is another dtype",
    ),
    "indices dims": ({"indices": torch.zeros(2, 2).long()}, "ValueError", "indices has 2 dim"),
    "indices dtype": ({"indices": torch.zeros(LOOKUPS)}, "TypeError", "indices is float32"),
    "indices range": ({"indices": torch.full((LOOKUPS,), ROWS)}, "IndexError", ""),
    "indices negative": ({"indices": torch.full((LOOKUPS,), -1)}, "IndexError", ""),
    "offsets dims": ({"offsets": torch.tensor(0)}, "ValueError", "offsets has 0 dim"),
    "offsets dtype": ({"offsets": torch.zeros(2).bool()}, "TypeError", "offsets is bool"),
    "offsets fall": ({"offsets": torch.tensor([0, 5, 2])}, "OffsetError", "offsets"),
    "no last offset": (
        {"offsets": torch.zeros(0).long(), "include_last_offset": True},
        "ValueError",
        "offsets is empty",
    ),
    "mode": ({"mode": "median"}, "ValueError", 'mode is "median"; expected "sum"'),
    "mode empty": ({"mode": ""}, "ValueError", 'mode is ""'),
    "mode long": ({"mode": "x" * 5000}, "ValueError", 'mode is "xxx'),
    "bounds_check": ({"bounds_check": "maybe"}, "ValueError", "bounds_check is"),
    "prefetch": ({"prefetch_distance": -2}, "ValueError", "prefetch_distance is -2"),
    "prefetch far": ({"prefetch_distance": 1 << 40}, "ValueError", "prefetch_distance is"),
    "sample weights number": (
        {"per_sample_weights": torch.rand(LOOKUPS - 1)},
        "ValueError",
        "per_sample_weights has 59 elements",
    ),
    "sample weights dtype": (
        {"per_sample_weights": torch.rand(LOOKUPS).double()},
        "TypeError",
        "per_sample_weights is float64",
    ),
    "sample weights dims": (
        {"per_sample_weights": torch.rand(LOOKUPS, 1)},
        "ValueError",
        "per_sample_weights has 2 dim",
    ),
    "sample weights with max": (
        {"per_sample_weights": torch.rand(LOOKUPS), "mode": "max"},
        "NotImplementedError",
        "",
    ),
    "padding_idx": ({"padding_idx": ROWS}, "ValueError", "padding_idx is 100"),
    "mode with a zero": ({"mode": "sum\0garbage"}, "ValueError", 'mode is "sum" with a zero byte'),
    "bounds_check with a zero": (
        {"bounds_check": "off\0"},
        "ValueError",
        'bounds_check is "off" with a zero byte',
    ),
    "schedule with a zero": ({"schedule": "\0x"}, "ValueError", 'schedule is "" with a zero byte'),
    "weight freed": ({"weight": freed(torch.randn(ROWS, DIM))}, "ValueError", "weight has no memory"),
    "weight cut": ({"weight": freed(torch.randn(ROWS, DIM), 1199)}, "ValueError", "weight has no memory"),
    "weight with wide rows, cut": (
        {"weight": freed(torch.randn(ROWS, 2 * DIM)[:, 3 : 3 + DIM], 2000)},
        "ValueError",
        "weight has no memory",
    ),
    "indices freed": ({"indices": freed(torch.zeros(LOOKUPS).long())}, "ValueError", "indices has no memory"),
    "offsets freed": ({"offsets": freed(torch.zeros(3).long())}, "ValueError", "offsets has no memory"),
    "sample weights freed": (
        {"per_sample_weights": freed(torch.rand(LOOKUPS))},
        "ValueError",
        "per_sample_weights has no memory",
    ),
    "sample weights freed float16": (
        {"per_sample_weights": freed(torch.rand(LOOKUPS).half())},
        "ValueError",
        "per_sample_weights has no memory",
    ),
}
TWO_TABLES_ERRORS: dict[str, tuple[Inputs, str, str]] = {
    "buffer dims": ({"weights": [torch.randn(4, 4, 4)]}, "ValueError", "weights has 3 dim"),
    "buffer dtype": ({"weights": [torch.zeros(9).int()]}, "TypeError", "weights is int32"),
    "buffer strided": ({"weights": [torch.randn(900)[::2]]}, "ValueError", "a tensor of"),
    "second buffer": ({"weights": [torch.randn(440), torch.zeros(9).int()]}, "TypeError", "weights is int32"),
    "no buffer": ({"weights": []}, "ValueError", "features[0] is in weights[0]"),
    "buffer too small": ({"weights": [torch.randn(439)]}, "ValueError", "features[1]"),
    "features dtype": ({"features": two_tables()["features"].int()}, "TypeError", "features is int32 [2, 7]"),
    "features width": (
        {"features": two_tables()["features"][:, :6]},
        "ValueError",
        "features is int64 [2, 6]",
    ),
    "features huge": ({"features": two_tables()["features"] * (1 << 60)}, "ValueError", "features["),
    "offsets number": ({"offsets": torch.zeros(6).long()}, "ValueError", "offsets has 6"),
    "no offsets": ({"offsets": torch.zeros(0).long()}, "ValueError", "offsets has 0"),
    "output_dim": ({"output_dim": 11}, "ValueError", "output_dim is 11"),
    "output_dim negative": ({"output_dim": -1}, "ValueError", "output_dim is -1"),
    "indices range": ({"indices": torch.full((40,), 30)}, "IndexError", ""),
    "sample weights with mean": ({"per_sample_weights": torch.rand(40)}, "NotImplementedError", ""),
    "bounds_check": ({"bounds_check": ""}, "ValueError", "bounds_check is"),
    "bounds_check with a zero": ({"bounds_check": "on\0"}, "ValueError", 'bounds_check is "on" with a zero'),
    "buffer freed": ({"weights": [freed(torch.randn(440))]}, "ValueError", "weights has no memory"),
    "features freed": ({"features": freed(two_tables()["features"])}, "ValueError", "features has no memory"),
    "features transposed, freed": (
        {"features": freed(torch.zeros(7, 2).long().t())},
        "ValueError",
        "features has no memory",
    ),
    "indices freed": ({"indices": freed(torch.zeros(40).long())}, "ValueError", "indices has no memory"),
    "offsets freed": ({"offsets": freed(torch.zeros(7).long())}, "ValueError", "offsets has no memory"),
    "sample weights freed": (
        {
            "per_sample_weights": freed(torch.rand(40)),
            "features": two_tables()["features"] * torch.tensor([1, 1, 1, 1, 0, 1, 1]),
        },
        "ValueError",
        "per_sample_weights has no memory",
    ),
}

FREED = {
    name
    for name, (_, _, detail) in {**ONE_TABLE_ERRORS, **TWO_TABLES_ERRORS}.items()
    if "no memory" in detail
}
"""Cases whose tensors cannot be copied to a GPU."""
