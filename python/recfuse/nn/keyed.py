"""TorchRec's ``EmbeddingBagCollection``, with its tables pooled in one call.

Only programs with TorchRec import this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recfuse.data.forms import Lookups, of_keys, of_torchrec
from recfuse.nn.mapping import Mapping
from recfuse.nn.packed.module import PackedModule
from recfuse.nn.packed.pooling import refuse_proxy
from recfuse.nn.packed.table_dict import Tables


class FusedKeyedEmbeddingBagCollection(EmbeddingBagCollection, PackedModule):
    """An ``EmbeddingBagCollection`` with packed Parameters, and the same input, output and state_dict.

    :func:`recfuse.swap` creates it from a model's own collection by a change of class, which Python allows
    only if that class comes first among the bases.
    """

    def pack_features(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        """Pack the tables, with a feature for each feature name of each table.

        A call of another thread pools the old tables until the packed tables are complete.
        """
        bags = self._modules["embedding_bags"]
        table_of_feature = [number for number, names in enumerate(self._feature_names) for _ in names]
        self._flat_feature_names = [name for names in self._feature_names for name in names]
        self._pack(list(bags._modules), list(bags._modules.values()), table_of_feature, optimizers)

    @property
    def embedding_bags(self) -> Tables:
        """The tables by name; each can be called."""
        return self._modules["embedding_bags"]  # type: ignore[return-value]

    def _lookups_of(self, batch: Any, prefix: str) -> Lookups:
        return of_torchrec(batch, self._flat_feature_names, self._is_weighted, prefix)

    def forward(self, features: KeyedJaggedTensor, *, mapping: Mapping | None = None) -> KeyedTensor:
        """Pool every feature.

        Args:
            features: a KeyedJaggedTensor (or TensorDict) with a key for each feature, in any order. With a
                batch size per key, or with inverse indices, it goes to TorchRec's own forward, table by
                table.
            mapping: the partition of this batch, from ``map(features)``. The CPU does not use it.

        Returns:
            KeyedTensor ``[batch, sum of dims]``, float32.

        Raises:
            ValueError: a key is missing. IndexError: an index outside its table; names feature and bag (on a
                GPU, by the next call, or by :func:`recfuse.check`).
        """
        refuse_proxy(features)
        features = maybe_td_to_kjt(features, None)
        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            # Not super(), which fails if another thread has changed the class in the meantime.
            return EmbeddingBagCollection.forward(self, features)
        store = self.__dict__.get("_store")
        try:
            return self._fused(features, mapping)
        except AttributeError:
            if store is not None and self.__dict__.get("_store") is store:
                raise
            # Another thread is swapping or unswapping the tables.
            return EmbeddingBagCollection.forward(self, features)

    def _fused(self, features: KeyedJaggedTensor, mapping: Mapping | None) -> KeyedTensor:
        """Pool all tables in one call."""
        indices, offsets, _ = jagged = of_keys(features, self._flat_feature_names)
        if self._is_weighted and jagged[2] is None:
            features.weights()  # raises TorchRec's own error
        weights = jagged[2] if self._is_weighted else None
        return KeyedTensor(
            keys=self._embedding_names,
            values=self._pool(indices, offsets, weights, mapping).float(),
            length_per_key=self._lengths_per_embedding,
        )
