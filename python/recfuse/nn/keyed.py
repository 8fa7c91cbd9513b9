"""TorchRec's ``EmbeddingBagCollection`` with its tables pooled in one call. Imported only where TorchRec is
in use.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recfuse.nn.collection import jagged_of
from recfuse.nn.packed import PackedModule


class FusedKeyedEmbeddingBagCollection(EmbeddingBagCollection, PackedModule):
    """An ``EmbeddingBagCollection``: the same input, output, parameters and state_dict.

    Made by :func:`recfuse.swap` from a model's own collection, by a change of class (which Python allows
    only where that class comes first among the bases).
    """

    def _packed_holder(self) -> torch.nn.Module:
        return self._modules["embedding_bags"]

    def pack_features(self) -> None:
        """Packs the tables, a feature for each feature name of each table."""
        self._flat_feature_names = [name for names in self._feature_names for name in names]
        self.pack([number for number, names in enumerate(self._feature_names) for _ in names])

    def _offsets_of(self, batch: KeyedJaggedTensor) -> Tensor:
        return jagged_of(maybe_td_to_kjt(batch, None), self._flat_feature_names)[1]

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pools every feature.

        Args:
            features: a KeyedJaggedTensor (or TensorDict) with a key for each feature, in any order. One with
                a batch size per key, or with inverse indices, goes to TorchRec's own forward, table by table.

        Returns:
            KeyedTensor ``[batch, sum of dims]``, float32.

        Raises:
            ValueError: a key is missing. IndexError: an index outside its table; names feature and bag (on a
                GPU, by the next call, or by :func:`recfuse.check`).
        """
        features = maybe_td_to_kjt(features, None)
        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            return super().forward(features)
        indices, offsets, _ = jagged = jagged_of(features, self._flat_feature_names)
        if self._is_weighted and jagged[2] is None:
            features.weights()  # raises TorchRec's own error
        weights = jagged[2] if self._is_weighted else None
        return KeyedTensor(
            keys=self._embedding_names,
            values=self._packed(self._packed_modules(), indices, offsets, weights).float(),
            length_per_key=self._lengths_per_embedding,
        )
