"""Packed batches in files and copies."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

from recfuse.errors import FileFormatError
from recfuse.nn.columns import Bucketize, EmbeddingColumns, Hash, Identity, Numeric, specs


def saved(packed):
    stream = io.BytesIO()
    torch.save(packed, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def flattened(packed):
    leaves, form = pytree.tree_flatten(packed)
    return saved(pytree.tree_unflatten(leaves, form))


WAYS = {
    "torch.save": saved,
    "torch.save, as pytree makes it": flattened,
    "pickle": lambda packed: pickle.loads(pickle.dumps(packed)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_packed_batch_is_saved_and_loaded(way):
    """Values of float32, int32 and int64 are views of one buffer, which torch.save itself refuses."""
    columns = EmbeddingColumns(
        [
            Bucketize("age", boundaries=[18, 30], embedding_dim=8),
            Hash("city", num_embeddings=50, embedding_dim=8),
            Identity("tags", num_embeddings=20, embedding_dim=4, pooling="sum"),
            Numeric("price"),
        ]
    )
    packed = columns.pack(
        {
            "age": torch.tensor([3.0, 20.0]),
            "city": torch.tensor([1, 2], dtype=torch.int32),
            "tags": (torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])),
            "price": torch.tensor([0.5, 2.5]),
        }
    )
    other = WAYS[way](packed)
    assert (other.batch_size, other.device) == (packed.batch_size, packed.device)
    assert torch.equal(columns(other), columns(packed))


def test_a_pickle_of_an_earlier_version_names_the_remedy():
    """It names a feature by a class of that version."""
    earlier = b"crecfuse.nn.columns.specs\nUse\n(S'city'\nNI00\ntR."
    with pytest.raises(FileFormatError, match=r"an earlier version\. Pack the batch again"):
        pickle.loads(earlier)
    assert not hasattr(specs, "Unknown")
