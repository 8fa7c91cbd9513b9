"""TorchRec's ``EmbeddingCollection``, with its tables looked up in one call.

Only programs with TorchRec import this file.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recfuse.data.forms import lookups_per_key, of_keys
from recfuse.nn.lookups.module import PackedLookups
from recfuse.nn.packed.pooling import has_kernel, refuse_proxy
from recfuse.nn.packed.table_dict import Tables
from recfuse.ops.library import is_transformed


class FusedKeyedEmbeddingCollection(EmbeddingCollection, PackedLookups):
    """An ``EmbeddingCollection`` with packed Parameters, and the same input, output and state_dict.

    :func:`recfuse.swap` creates it from a model's own collection by a change of class, which Python allows
    only if that class comes first among the bases.
    """

    def pack_features(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        """Pack the tables, with a feature for each feature name of each table."""
        tables = self._modules["embeddings"]
        table_of_feature = [number for number, names in enumerate(self._feature_names) for _ in names]
        self._flat_feature_names = [name for names in self._feature_names for name in names]
        self._flat_embedding_names = [name for names in self._embedding_names_by_table for name in names]
        self._pack_embeddings(
            list(tables._modules), list(tables._modules.values()), table_of_feature, optimizers
        )

    @property
    def embeddings(self) -> Tables:
        """The tables by name; each can be called."""
        return self._modules["embeddings"]  # type: ignore[return-value]

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up the rows of every feature.

        Args:
            features: a KeyedJaggedTensor (or TensorDict) with a key for each feature, in any order. With a
                batch size per key it goes to TorchRec's own forward, table by table.

        Returns:
            dict: a JaggedTensor of float32 for each feature, by its name, or "feature@table" if several
            tables have it; all are views of one buffer.

        Raises:
            ValueError: a key is missing. IndexError: an index outside its table; names feature, bag and
                position (on a GPU, by the next call, or by :func:`recfuse.check`).
        """
        refuse_proxy(features)
        features = maybe_td_to_kjt(features, None)
        store = self.__dict__.get("_store")
        try:
            if features.variable_stride_per_key() or not has_kernel(self.packed_weights()):
                return EmbeddingCollection.forward(self, features)
            return self._fused(features)
        except AttributeError:
            if store is not None and self.__dict__.get("_store") is store:
                raise
            # Another thread is swapping or unswapping the tables.
            return EmbeddingCollection.forward(self, features)

    def _fused(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up all tables in one call."""
        names, keys = self._flat_feature_names, features.keys()
        indices, offsets, _ = of_keys(features, names)
        sizes = lookups_per_key(features)
        lengths = features.lengths_or_none()
        if lengths is None:
            lengths = features.offsets().diff()
        of_key: Sequence[Tensor] = _rows(lengths, len(keys), features.stride())
        if keys != names:
            position = {key: number for number, key in enumerate(keys)}
            order = [position[name] for name in names]
            sizes, of_key = [sizes[at] for at in order], [of_key[at] for at in order]
        rows = self._look_up(indices, offsets, sizes, dtype=torch.float32)
        own = indices.split(sizes) if self._need_indices else (None,) * len(names)
        of_feature = zip(self._flat_embedding_names, rows, own, of_key, strict=False)
        if torch.compiler.is_compiling() or not _is_plain():
            return {name: JaggedTensor(*tensors) for name, *tensors in of_feature}
        return _created(of_feature)


def _rows(lengths: Tensor, keys: int, bags: int) -> Sequence[Tensor]:
    """Return the lengths ``[bags]`` of each key.

    Integers have no gradient, so their parts need no record as views of a tensor.
    """
    if is_transformed():
        return lengths.view(keys, bags).unbind(0)
    return torch.unsafe_split_with_sizes(lengths, [bags] * keys)  # type: ignore[no-any-return]


@functools.cache
def _is_plain() -> bool:
    """Return whether TorchRec's constructor sets these four attributes and no others.

    The constructor takes 1.6 us for each feature, mostly to look for compilers and to check the type of the
    lengths, which those of a KeyedJaggedTensor have passed.
    """
    values, weights, lengths = torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.int64)
    constructed = vars(JaggedTensor(values, weights, lengths))
    created = vars(_created([("", values, weights, lengths)])[""])
    return constructed.keys() == created.keys() and all(
        constructed[name] is created[name] for name in created
    )


def _created(
    of_feature: Iterable[tuple[str, Tensor, Tensor | None, Tensor]],
) -> dict[str, JaggedTensor]:
    """Create a JaggedTensor of values, weights and lengths for each name, as copies are: by attributes."""
    new, by_name = object.__new__, {}
    for name, values, weights, lengths in of_feature:
        by_name[name] = jagged = new(JaggedTensor)
        jagged._values = values
        jagged._weights = weights
        jagged._lengths = lengths
        jagged._offsets = None
    return by_name
