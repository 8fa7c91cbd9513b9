"""A valid call of each operator that reads tensors, for tests that make one tensor invalid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from recfuse.nn import EmbeddingColumns
from recfuse.nn.columns import Identity, Numeric

Call = dict[str, Any]
FLOAT32, SUM, ADAM = 0, 0, 3
READ_NOTHING = {
    "check", "cpu_isa", "library_path", "library_version", "_feature", "_once_a_pass", "_columns",
    "_followed_table", "pin_rows", "unpin",
}  # fmt: skip
"""Operators that read no tensor on the CPU; all others have a call here."""


def calls() -> dict[str, Call]:
    """Returns arguments by name, of operators by name; the tensors are new each time."""
    torch.manual_seed(0)
    bag: Call = {
        "weight": torch.rand(9, 4),
        "indices": torch.tensor([1, 5, 8, 0, 1, 1]),
        "offsets": torch.tensor([0, 2, 3]),
    }
    pooled = {**bag, "mode": "sum", "per_sample_weights": torch.rand(6)}
    plain = {"pooling": SUM, "include_last_offset": False, "padding_idx": -1}
    form = {"rows": 9, "dim": 4, "dtype": FLOAT32}
    lookups: Call = {
        "features": torch.tensor([[0, 0, 9, 4, SUM, -1, 0], [0, 0, 9, 4, SUM, -1, 4]]),
        "indices": bag["indices"],
        "offsets": torch.tensor([0, 2, 3, 5, 6]),
    }
    weights = {"weights": [bag["weight"]]}
    fused = {**weights, **lookups, "output_dim": 8, "per_sample_weights": torch.rand(6)}
    codes: Call = {
        "codes": torch.randint(0, 256, (9, 4), dtype=torch.uint8), "parameters": torch.rand(9, 2).half(),
    }  # fmt: skip
    quantized: Call = {**fused, "weights": [codes["codes"]], "parameters": [codes["parameters"]]}
    histories: Call = {
        **weights, **lookups, "output_dim": 8, "sizes": [], "fill": torch.rand(8), "layout": "padded",
        "length": 2,
    }  # fmt: skip
    gradient: Call = {"grad": torch.rand(2, 8), **lookups}
    factors: Call = {"per_sample_weights": torch.rand(6), "winners": torch.zeros(2, 8, dtype=torch.int64)}
    forms = {"groups": [0], "row_counts": [9], "dims": [4], "dtypes": [FLOAT32]}
    states: Call = {"states": [torch.zeros(9, 4), torch.zeros(9, 4)]}
    numbers: Call = {"numbers": torch.full((8,), 0.5)}
    updater: Call = {
        **states, "numbers": [numbers["numbers"]], "anchors": [], "updater_of": [-1], "options": [ADAM, 0, 0]
    }  # fmt: skip
    linear: Call = {
        "w_user": torch.rand(5, 4), "w_cand": torch.rand(5, 3), "x_user": torch.rand(2, 4),
        "x_cand": torch.rand(3, 3), "cand_to_user": torch.tensor([0, 1, 1]), "bias": torch.rand(5),
    }  # fmt: skip
    chain: Call = {
        "weights": [linear["w_user"], linear["w_cand"]], "inputs": [linear["x_user"], linear["x_cand"]],
        "maps": [linear["cand_to_user"]], "bias": linear["bias"],
    }  # fmt: skip
    attention: Call = {
        "q": torch.rand(3, 2, 2, 8), "k": torch.rand(2, 4, 2, 8), "v": torch.rand(2, 4, 2, 8),
        "cand_to_user": linear["cand_to_user"], "scale": None, "kv_lengths": torch.tensor([3, 4]),
    }  # fmt: skip
    with_users: Call = {"q_user": torch.rand(2, 1, 2, 8), **attention}
    columns = EmbeddingColumns([Identity("a", 9, 4), Numeric("b")])
    jagged = bag["indices"], torch.tensor([0, 2, 3, 6])
    program, given = _program(columns, {"a": jagged, "b": torch.rand(3)})
    batch: Call = {"program": program, **given, "batch": 3}
    of_host = {
        f"host_{name}": value for name, value in (*batch.items(), ("weights", columns.packed_weights()))
    }
    above, _ = _program(EmbeddingColumns([Numeric("x", width=5)]), {"x": torch.rand(3, 5)})
    return {
        "embedding_bag": pooled,
        "_embedding_bag_with_winners": pooled | {"mode": "max", "per_sample_weights": None},
        "_embedding_bag_updated": {**updater, **pooled},
        "_embedding_bag": {**bag, **plain},
        "_embedding_bag_gradient": {
            "grad": torch.rand(3, 4),
            "indices": bag["indices"],
            "offsets": bag["offsets"],
            **plain,
            **form,
        },
        "fused_embedding": histories,
        "_fused_embedding_rows": histories,
        "fused_embedding_bag": fused,
        "_fused_embedding_bag_with_winners": fused | {"per_sample_weights": None},
        "_fused_embedding_bag_updated": {**updater, **fused},
        "fused_embedding_bag_quantized": quantized,
        "quantize_rows": {"weight": bag["weight"], **codes},
        "dequantize_rows": {**codes, "weight": bag["weight"]},
        "fused_embedding_bag_winners": {**weights, **lookups, "output_dim": 8},
        "fused_embedding_bag_backward": {**gradient, "group": 0, **form, **factors},
        "fused_embedding_bag_sparse_backward": {**gradient, "group": 0, **form, **factors},
        "fused_embedding_bag_sparse_gradients": {**gradient, **forms, **factors},
        "fused_embedding_bag_sample_weights_backward": {**gradient, **weights},
        "fused_embedding_bag_quantized_sample_weights_backward": {
            **gradient,
            "weights": [codes["codes"]],
            "parameters": [codes["parameters"]],
        },
        "fused_embedding_bag_update": {
            **gradient,
            **weights,
            **states,
            **factors,
            **numbers,
            "after": [],
            "optimizer": ADAM,
        },
        "rows_update": {
            "weight": bag["weight"],
            **states,
            **numbers,
            "rows": torch.tensor([1, 5]),
            "sums": torch.rand(2, 4),
            "optimizer": ADAM,
        },
        "_features_of": {"features": lookups["features"], "numbers": [0]},
        "_used_table": {"features": lookups["features"], "grad": gradient["grad"], "module": -1, "table": 0},
        "_used_features": {
            "features": lookups["features"],
            "grad": gradient["grad"],
            "missing": [1],
            "module": -1,
        },
        "ikbo_linear": linear,
        "_ikbo_linear_path": linear,
        "ikbo_linear_chain": chain,
        "_ikbo_linear_chain_path": chain,
        "ikbo_attention": attention,
        "ikbo_attention_lse": attention,
        "_ikbo_attention_path": attention,
        "ikbo_attention_self": with_users,
        "ikbo_attention_self_lse": with_users,
        "_ikbo_attention_self_path": with_users,
        "_ikbo_attention_backward": {
            "grad": torch.rand(3, 2, 8),
            "grad_lse": None,
            "q": torch.rand(3, 2, 8),
            "k": attention["k"],
            "v": attention["v"],
            "row_to_user": linear["cand_to_user"],
            "out": torch.rand(3, 2, 8),
            "lse": torch.rand(3, 2),
            "scale": 0.5,
            "kv_lengths": attention["kv_lengths"],
            "kv_offsets": None,
        },
        "embedding_columns": {"weights": list(columns.packed_weights()), **batch, "output_dim": 5},
        "_embedding_columns_lookups": batch,
        "_embedding_columns_split": {
            **{name: [] for name in ("weights", *given)},
            "program": above,
            "batch": 3,
            "output_dim": 5,
            "program_on_device": None,
            **of_host,
        },
    }


def _program(columns: EmbeddingColumns, batch: dict[str, Any]) -> tuple[Tensor, Call]:
    """The program of columns for a batch, and the batch as operators take it."""
    given = columns._reader.read(batch)
    program, _ = columns._whole.programs.of(given.places, torch.device("cpu"))
    lists = {"dense": given.dense, "values": given.values, "offsets": given.offsets, "value_weights": ()}
    return program.clone(), {name: list(value) for name, value in lists.items()}


def overload(name: str) -> Any:
    """The operator, which takes arguments by name."""
    return getattr(torch.ops.recfuse, name).default


def run(name: str, call: Call) -> list[Tensor]:
    """The tensors that an operator gives, and those that it may have written."""
    with torch.no_grad():
        known = {argument.name for argument in overload(name)._schema.arguments}
        found = overload(name)(**{key: value for key, value in call.items() if key in known})
    outputs = list(found) if isinstance(found, (tuple, list)) else [found]
    written = "fused_embedding_bag_update", "rows_update", "quantize_rows", "dequantize_rows"
    return [one for one in outputs if isinstance(one, Tensor)] + (
        [tensor for _, tensor in tensors_of(call)] if name in written else []
    )


def tensors_of(call: Call) -> Iterator[tuple[tuple[str, int | None], Tensor]]:
    """Yields the tensors of a call and their positions."""
    for name, value in call.items():
        if isinstance(value, Tensor):
            yield (name, None), value
        elif isinstance(value, list):
            for at, one in enumerate(value):
                if isinstance(one, Tensor):
                    yield (name, at), one


def with_tensor(call: Call, place: tuple[str, int | None], tensor: Tensor | None) -> Call:
    """Replace a tensor of a call; clone the others."""
    return with_tensors(call, {place: tensor})


def with_tensors(call: Call, tensors: dict[tuple[str, int | None], Tensor | None]) -> Call:
    """Replace tensors of a call; clone the others."""

    def replaced(place: tuple[str, int | None], value: Any) -> Any:
        if place in tensors:
            return tensors[place]
        return value.clone() if isinstance(value, Tensor) else value

    return {
        name: [replaced((name, at), one) for at, one in enumerate(value)]
        if isinstance(value, list)
        else replaced((name, None), value)
        for name, value in call.items()
    }
