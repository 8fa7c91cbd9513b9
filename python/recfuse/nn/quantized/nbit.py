"""FBGEMM's ``IntNBitTableBatchedEmbeddingBagsCodegen`` as a module of a model, with recfuse's call.

Only programs with FBGEMM import this file."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from recfuse.errors import refuse_scripting
from recfuse.nn.packed.pooling import refuse_proxy
from recfuse.nn.quantized.stored import pool_quantized, stored_features, stored_tensor
from recfuse.nn.quantized.tbe import OUTPUTS, POOLINGS, memory_name, tables_of
from recfuse.nn.tuning import Tuning

_ADDED = "_features", "_stored", "_output_dim", "_tuning", "_mode"
_LAYOUT = (
    "set_index_remappings",
    "set_index_remappings_array",
    "move_to_device_with_cache",
    "update_cache_load_factor",
    "reset_embedding_spec_location",
    "reset_weights_placements_and_offsets",
    "recompute_module_buffers",
    "initialize_weights",
)
"""Methods that change where rows lie, or which rows a lookup reads."""


class FusedIntNBitTables(IntNBitTableBatchedEmbeddingBagsCodegen):
    """FBGEMM's inference module, whose rows recfuse's kernel reads where they lie.

    :func:`recfuse.swap` creates it by a change of class. Buffers, constructor and other methods stay
    FBGEMM's, so an in-place update of rows is visible to the next call.
    """

    def take_tables(self) -> None:
        """Describe the tables. Requires that ``why_not_readable`` has no reason."""
        tables = tables_of(self, 0)
        mode = POOLINGS[int(self.pooling_mode)]
        with torch.inference_mode(False):
            features, columns = stored_features(
                (number, tables[number], mode) for number in self.feature_table_map
            )
            described = torch.tensor(features, dtype=torch.int64, device="cpu"), stored_tensor(tables)
        added = (*described, columns, Tuning(len(features)), mode)
        vars(self).update(zip(_ADDED, added, strict=True))

    def leave_tables(self) -> None:
        """Undo ``take_tables``."""
        for name in _ADDED:
            del vars(self)[name]

    def forward(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """Pool every feature.

        Args:
            indices: int32 or int64 ``[lookups]``, feature by feature.
            offsets: ``[features * bags + 1]``.
            per_sample_weights: floating ``[lookups]``. With mean pooling the call goes to FBGEMM.

        Returns:
            Tensor: ``[bags, sum of dims]`` of the output dtype of the module.

        Raises:
            IndexError: an index outside its table; names feature and bag (on a GPU, by the next call, or by
                :func:`recfuse.check`).
        """
        refuse_proxy(indices)
        try:
            mode, columns = self._mode, self._output_dim
            described, tuning, stored = self._features, self._tuning, self._stored
        except AttributeError:
            if isinstance(self, FusedIntNBitTables):
                raise
            mode = ""  # another thread has unswapped the module
        if not mode or (per_sample_weights is not None and mode != "sum"):
            return IntNBitTableBatchedEmbeddingBagsCodegen.forward(self, indices, offsets, per_sample_weights)
        memory: Tensor = getattr(self, memory_name(self))
        lookups: Any = indices, offsets, per_sample_weights
        if indices.device != memory.device:  # as FBGEMM moves them
            lookups = [
                None if tensor is None else tensor.to(memory.device, non_blocking=True) for tensor in lookups
            ]
        return pool_quantized(
            [memory],
            [memory],
            described,
            columns,
            tuple(lookups),
            OUTPUTS[self.output_dtype],
            tuning,
            stored,
        )

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise NotImplementedError for torch.jit.script."""
        refuse_scripting(self)


def _refused(name: str) -> Any:
    def method(self: FusedIntNBitTables, *arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(
            f"recfuse: {name} of a swapped module would change where its rows lie; expected rows that stay. "
            "Call recfuse.unswap(model) first."
        )

    method.__name__ = name
    method.__doc__ = "Raise NotImplementedError: the rows of a swapped module stay where they lie."
    return method


for _name in _LAYOUT:
    setattr(FusedIntNBitTables, _name, _refused(_name))
