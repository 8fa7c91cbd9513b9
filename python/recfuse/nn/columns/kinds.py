"""Kinds of columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from recfuse._arguments import integer, wrong_type
from recfuse.nn.columns.specs import (
    MOST_DIM,
    Column,
    FeatureColumn,
    FeatureRef,
    Key,
    Source,
    TableColumn,
    check_name,
    checked_steps,
)
from recfuse.nn.columns.steps import MOST_BUCKETS, MOST_SEED, Step, ToBucket, ToHash, ToWord


@dataclass(frozen=True)
class Identity(FeatureColumn):
    """Column whose values are rows: integers, after ``preprocess``.

    Args:
        name, num_embeddings, embedding_dim: as in :class:`TableColumn`, which has further arguments.

    Example:
        >>> columns = recfuse.nn.EmbeddingColumns([recfuse.nn.columns.Identity("tag", 5000, 16)])
        >>> columns({"tag": torch.tensor([5, 7])}).shape
        torch.Size([2, 16])
    """

    num_embeddings: int  # type: ignore[misc,assignment]
    embedding_dim: int  # type: ignore[misc]
    kind: ClassVar[str] = "identity"

    def _step(self) -> Step | None:
        return None


@dataclass(frozen=True)
class Bucketize(FeatureColumn):
    """Column whose row is the number of boundaries that are less than a value, as ``torch.bucketize``.

    Args:
        boundaries: ascending numbers, rounded to float32.
        right: count boundaries that are not greater, instead of less. Default: False.
        num_embeddings: rows of the table. Default: the number of boundaries plus 1.

    Example:
        >>> age = recfuse.nn.columns.Bucketize("age", boundaries=[18, 25, 35], embedding_dim=8)
        >>> age.rows
        4
    """

    boundaries: Sequence[float]
    embedding_dim: int  # type: ignore[misc]
    _: KW_ONLY
    right: bool = False
    num_embeddings: int | None = None  # type: ignore[misc]
    kind: ClassVar[str] = "bucketize"

    def _check(self) -> None:
        step = ToBucket(self.boundaries, self.right)
        self._set("boundaries", step.boundaries)
        self._set("_own", step)
        if self.num_embeddings is None:
            self._set("num_embeddings", len(step.boundaries) + 1)
        super()._check()

    def _step(self) -> Step | None:
        return self._own  # type: ignore[attr-defined,no-any-return]


@dataclass(frozen=True)
class Hash(FeatureColumn):
    """Column whose row is the hash of an integer: ``XXH64(8 bytes, seed) * num_buckets / 2^64``.

    Args:
        num_buckets: the number of values of the hash. Default: the rows.
        seed: the seed of the hash, 0 to 2^64 - 1. Default: 0.

    Example:
        >>> city = recfuse.nn.columns.Hash("city", num_embeddings=1000, embedding_dim=8)
        >>> columns = recfuse.nn.EmbeddingColumns([city])
        >>> columns({"city": recfuse.data.hash_strings(["Oslo", "Lima"])}).shape
        torch.Size([2, 8])
    """

    num_embeddings: int  # type: ignore[misc,assignment]
    embedding_dim: int  # type: ignore[misc]
    _: KW_ONLY
    num_buckets: int | None = None
    seed: int = 0
    kind: ClassVar[str] = "hash"

    def _check(self) -> None:
        if self.num_buckets is None:
            integer("num_embeddings", self.num_embeddings, 1, MOST_BUCKETS)
        buckets = self.num_embeddings if self.num_buckets is None else self.num_buckets
        self._set("_own", ToHash(buckets, self.seed))
        super()._check()

    def _step(self) -> Step | None:
        return self._own  # type: ignore[attr-defined,no-any-return]


@dataclass(frozen=True)
class Vocabulary(FeatureColumn):
    """Column whose row is the position of an integer in a list; other integers are invalid.

    Args:
        vocabulary: different integers.
        num_embeddings: rows of the table. Default: the length of ``vocabulary``.

    Example:
        >>> recfuse.nn.columns.Vocabulary("country", vocabulary=[47, 51, 44], embedding_dim=4).rows
        3
    """

    vocabulary: Sequence[int]
    embedding_dim: int  # type: ignore[misc]
    _: KW_ONLY
    num_embeddings: int | None = None  # type: ignore[misc]
    kind: ClassVar[str] = "vocabulary"

    def _check(self) -> None:
        step = ToWord(self.vocabulary)
        self._set("vocabulary", step.vocabulary)
        self._set("_own", step)
        if self.num_embeddings is None:
            self._set("num_embeddings", len(step.vocabulary))
        super()._check()

    def _step(self) -> Step | None:
        return self._own  # type: ignore[attr-defined,no-any-return]


@dataclass(frozen=True)
class Cross(TableColumn):
    """Column whose rows are hashes of pairs of values: ``XXH64(16 bytes, seed) * num_buckets / 2^64``.

    Args:
        keys: the two features, by name or as :class:`Key`; a sample has each pair of their values.
        num_buckets: the number of values of the hash. Default: the rows.
        seed: the seed of the hash, 0 to 2^64 - 1. Default: 0.

    Example:
        >>> pairs = recfuse.nn.columns.Cross("pairs", keys=["a", "b"], num_embeddings=100, embedding_dim=8)
        >>> pairs.buckets
        100
    """

    keys: Sequence[Key | str]
    num_embeddings: int  # type: ignore[misc,assignment]
    embedding_dim: int  # type: ignore[misc]
    _: KW_ONLY
    num_buckets: int | None = None
    seed: int = 0
    kind: ClassVar[str] = "cross"

    def sources(self) -> tuple[Source, ...]:
        """Return the two features with their steps."""
        return tuple(Source(FeatureRef(key.feature), tuple(key.preprocess)) for key in self.keys)  # type: ignore[union-attr]

    @property
    def buckets(self) -> int:
        """The number of values of the hash."""
        return self.num_embeddings if self.num_buckets is None else self.num_buckets

    def _check(self) -> None:
        super()._check()
        if isinstance(self.keys, str) or not isinstance(self.keys, Sequence) or len(self.keys) != 2:
            raise TypeError(
                "keys has another form; expected two features, as names or recfuse.nn.columns.Key"
            )
        keys = tuple(Key(key) if isinstance(key, str) else key for key in self.keys)
        for key in keys:
            if not isinstance(key, Key):
                raise wrong_type("a key", key, "a name or a recfuse.nn.columns.Key")
        self._set("keys", keys)
        name = "num_embeddings" if self.num_buckets is None else "num_buckets"
        integer(name, self.buckets, 1, MOST_BUCKETS)
        self._set("seed", integer("seed", self.seed, 0, MOST_SEED))


@dataclass(frozen=True)
class Numeric(Column):
    """Column that writes values as floats, without a table.

    Args:
        width: the number of values of a sample. Default: 1.
        feature: the entry of the batch, ``[batch, width]``, or ``[batch]`` for width 1. Default: the entry
            with the name of the column.
        preprocess: steps, in order.

    Example:
        >>> price = recfuse.nn.columns.Numeric("price", preprocess=[recfuse.nn.columns.Affine(scale=0.5)])
        >>> recfuse.nn.EmbeddingColumns([price])({"price": torch.tensor([3.0])})
        tensor([[1.5000]])
    """

    width: int = 1
    _: KW_ONLY
    feature: str | None = None
    preprocess: Sequence[Step] = ()
    kind: ClassVar[str] = "numeric"

    def _check(self) -> None:
        self._set("width", integer("width", self.width, 1, MOST_DIM))
        if self.feature is not None:
            check_name("feature", self.feature)
        self._set("preprocess", checked_steps(self.preprocess))

    def sources(self) -> tuple[Source, ...]:
        """Return the feature with its steps."""
        return (Source(FeatureRef(self.feature or self.name), tuple(self.preprocess)),)

    @property
    def output_dim(self) -> int:
        """The number of columns in the output."""
        return self.width


COLUMNS: dict[str, type[Column]] = {
    kind.kind: kind for kind in (Identity, Bucketize, Hash, Vocabulary, Cross, Numeric)
}
"""The classes of columns, by their names in JSON."""
