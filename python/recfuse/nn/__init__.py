"""Modules: embedding bags, collections of tables, feature columns, and layers over users and candidates.

An :class:`EmbeddingBag` is a drop-in for torch's. A collection pools its tables in one call, or looks their
rows up. Specifications of feature columns are in :mod:`recfuse.nn.columns`. Linear layers and attention
combine users with their candidates.
"""

from recfuse.nn import columns
from recfuse.nn.collection import FusedEmbeddingBagCollection
from recfuse.nn.columns.module import EmbeddingColumns
from recfuse.nn.descriptions import Table
from recfuse.nn.embedding_bag import EmbeddingBag
from recfuse.nn.linear_compression import IKBOLinear, LinearCompression
from recfuse.nn.lookups.collection import FusedEmbeddingCollection
from recfuse.nn.mapping import Mapping
from recfuse.nn.quantized.bag import QuantizedEmbeddingBag
from recfuse.nn.quantized.collection import QuantizedEmbeddingBagCollection
from recfuse.nn.table_list import FusedEmbeddingBagList
from recfuse.nn.target_attention import TargetAttention

__all__ = [
    "EmbeddingBag",
    "EmbeddingColumns",
    "FusedEmbeddingBagCollection",
    "FusedEmbeddingBagList",
    "FusedEmbeddingCollection",
    "IKBOLinear",
    "LinearCompression",
    "Mapping",
    "QuantizedEmbeddingBag",
    "QuantizedEmbeddingBagCollection",
    "Table",
    "TargetAttention",
    "columns",
]
