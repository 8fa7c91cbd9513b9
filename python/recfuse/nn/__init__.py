"""Modules: drop-in embedding bags, and collections of tables that are pooled in one call."""

from recfuse.nn.collection import FusedEmbeddingBagCollection, Table
from recfuse.nn.embedding_bag import EmbeddingBag
from recfuse.nn.mapping import Mapping
from recfuse.nn.table_list import FusedEmbeddingBagList

__all__ = ["EmbeddingBag", "FusedEmbeddingBagCollection", "FusedEmbeddingBagList", "Mapping", "Table"]
