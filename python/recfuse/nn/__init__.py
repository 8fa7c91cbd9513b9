"""Modules: drop-in embedding bags, collections of tables that are pooled in one call, feature columns (their
specifications are in :mod:`recfuse.nn.columns`), linear layers and attention over users and their candidates.
"""

from recfuse.nn import columns
from recfuse.nn.collection import FusedEmbeddingBagCollection, Table
from recfuse.nn.columns.module import EmbeddingColumns
from recfuse.nn.embedding_bag import EmbeddingBag
from recfuse.nn.linear_compression import IKBOLinear, LinearCompression
from recfuse.nn.mapping import Mapping
from recfuse.nn.table_list import FusedEmbeddingBagList
from recfuse.nn.target_attention import TargetAttention

__all__ = [
    "EmbeddingBag",
    "EmbeddingColumns",
    "FusedEmbeddingBagCollection",
    "FusedEmbeddingBagList",
    "IKBOLinear",
    "LinearCompression",
    "Mapping",
    "Table",
    "TargetAttention",
    "columns",
]
