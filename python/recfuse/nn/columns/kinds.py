"""The kinds of columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from recfuse._arguments import integer, wrong_type
from recfuse.nn.columns.specs import (
    MOST_DIM,
    Column,
    FeatureColumn,
    Key,
    Source,
    TableColumn,
    Use,
    check_name,
    checked_steps,
)
from recfuse.nn.columns.steps import MOST_BUCKETS, MOST_SEED, Step, ToBucket, ToHash, ToWord


@dataclass(frozen=True)
class Identity(FeatureColumn):
    """Values that are rows: integers, after ``preprocess``."""

    num_embeddings: int  # type: ignore[misc,assignment]
    embedding_dim: int  # type: ignore[misc]
    kind: ClassVar[str] = "identity"

    def _step(self) -> Step | None:
        return None


@dataclass(frozen=True)
class Bucketize(FeatureColumn):
    """The bucket that a number lies in: how many boundaries are less than it, as ``torch.bucketize``.

    Args:
        boundaries: rising numbers, rounded to float32.
        right: a number on a boundary lies above it.
        num_embeddings: None: one more than boundaries.
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
    """An integer's hash.

    Args:
        num_buckets: how many values the hash has; None: as many as rows.
        seed: of the hash.
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
    """An integer's place in a list; one that is not in the list is no row (see ``invalid``).

    Args:
        vocabulary: integers that differ.
        num_embeddings: None: as many as words.
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
    """Each pair of values of two features, hashed: ``XXH64(16 bytes, seed) * num_buckets / 2^64``.

    Args:
        keys: the two features, by name or as :class:`Key`.
        num_buckets: how many values the hash has; None: as many as rows.
        seed: of the hash.
    """

    keys: Sequence[Key | str]
    num_embeddings: int  # type: ignore[misc,assignment]
    embedding_dim: int  # type: ignore[misc]
    _: KW_ONLY
    num_buckets: int | None = None
    seed: int = 0
    kind: ClassVar[str] = "cross"

    def sources(self) -> tuple[Source, ...]:
        """The two."""
        return tuple(Source(Use(key.feature), tuple(key.preprocess)) for key in self.keys)  # type: ignore[union-attr]

    @property
    def buckets(self) -> int:
        """How many values the hash has."""
        return self.num_embeddings if self.num_buckets is None else self.num_buckets

    def _check(self) -> None:
        super()._check()
        if isinstance(self.keys, str) or not isinstance(self.keys, Sequence) or len(self.keys) != 2:
            raise TypeError("keys must be two features: names or recfuse.nn.columns.Key")
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
    """The values themselves, as floats: no table.

    Args:
        width: how many values a sample has.
        feature: the batch's entry that it reads, dense ``[batch, width]``, or ``[batch]`` of width 1; None:
            the one of the column's name.
        preprocess: steps.
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
        """The one."""
        return (Source(Use(self.feature or self.name), tuple(self.preprocess)),)

    @property
    def output_dim(self) -> int:
        """How many columns of the output it has."""
        return self.width


COLUMNS: dict[str, type[Column]] = {
    kind.kind: kind for kind in (Identity, Bucketize, Hash, Vocabulary, Cross, Numeric)
}
"""By the name in JSON."""
