"""Feature columns: specifications, the steps that values go through, and the module for all of them."""

from recfuse.nn.columns.kinds import Bucketize, Cross, Hash, Identity, Numeric, Vocabulary
from recfuse.nn.columns.module import EmbeddingColumns
from recfuse.nn.columns.packed import PackedColumns
from recfuse.nn.columns.reference import ReferenceColumns
from recfuse.nn.columns.specs import Column, Key, TableColumn
from recfuse.nn.columns.steps import (
    Affine,
    Cast,
    Clip,
    ClipInteger,
    Log1p,
    Modulo,
    Step,
    ToBucket,
    ToHash,
    ToWord,
)

__all__ = [
    "Affine",
    "Bucketize",
    "Cast",
    "Clip",
    "ClipInteger",
    "Column",
    "Cross",
    "EmbeddingColumns",
    "Hash",
    "Identity",
    "Key",
    "Log1p",
    "Modulo",
    "Numeric",
    "PackedColumns",
    "ReferenceColumns",
    "Step",
    "TableColumn",
    "ToBucket",
    "ToHash",
    "ToWord",
    "Vocabulary",
]
