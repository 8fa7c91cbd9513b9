"""TorchRec's ``EmbeddingBagCollection`` with quantised tables.

Only programs with TorchRec import this file."""

from __future__ import annotations

from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recfuse.data.forms import of_keys
from recfuse.nn.packed.pooling import refuse_proxy
from recfuse.nn.quantized.collection import QuantizedEmbeddingBagCollection
from recfuse.nn.quantized.table import QuantizedTable

_OF_TORCHREC = (
    "_embedding_bag_configs",
    "_is_weighted",
    "_embedding_names",
    "_lengths_per_embedding",
    "_feature_names",
    "_device",
)  # attributes that TorchRec's methods read


class QuantizedKeyedEmbeddingBagCollection(EmbeddingBagCollection, QuantizedEmbeddingBagCollection):
    """A quantised collection with the input and output of TorchRec's ``EmbeddingBagCollection``.

    :func:`recfuse.quantize` makes it from a swapped collection by a change of class, which Python allows only
    if that class comes first among the bases.
    """

    def take_names(self, of: EmbeddingBagCollection) -> None:
        """Take the names of the output, and the description of the tables, from TorchRec's collection."""
        for name in _OF_TORCHREC:
            if name in vars(of):
                setattr(self, name, vars(of)[name])

    @property
    def embedding_bags(self) -> dict[str, QuantizedTable]:  # type: ignore[override]
        """The tables by name."""
        return self.tables

    def reset_parameters(self) -> None:
        """Raise TypeError: codes have no initial values."""
        raise TypeError(
            "recfuse: a quantised collection has no Parameters to reset. Call recfuse.dequantize."
        )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool every feature.

        Args:
            features: a KeyedJaggedTensor (or TensorDict) with a key for each feature, in any order, and one
                batch size for all keys.

        Returns:
            KeyedTensor ``[batch, sum of dims]`` of ``output_dtype``.

        Raises:
            ValueError: a key is missing. IndexError: an index outside its table; names feature and bag (on a
                GPU, by the next call, or by :func:`recfuse.check`).
        """
        refuse_proxy(features)
        keyed = maybe_td_to_kjt(features, None)
        indices, offsets, weights = of_keys(keyed, self.feature_names)
        if self._is_weighted and weights is None:
            keyed.weights()  # raises TorchRec's own error
        return KeyedTensor(
            keys=self._embedding_names,
            values=self._pool(indices, offsets, weights if self._is_weighted else None),
            length_per_key=self._lengths_per_embedding,
        )
