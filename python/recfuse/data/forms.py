"""The forms of batches: adapters from the arguments of each class of modules to lookups.

| class | a batch |
| --- | --- |
| `EmbeddingBag` | as `forward`: a tensor [bags, n], (input, offsets[, per_sample_weights]), or a single key |
| `FusedEmbeddingBagCollection` | as `forward`: (indices, offsets[, per_sample_weights]), or keyed as below |
| TorchRec's, swapped | as `forward`: a KeyedJaggedTensor or a TensorDict |
| `FusedEmbeddingBagList` | as `pool`: (offsets, indices[, row_weights]) |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from recfuse._codes import INTEGERS
from recfuse._storage import check_storages, is_readable
from recfuse.data.joined import are_tensors, join_tables
from recfuse.errors import ArgumentTypeError, ArgumentValueError, OffsetError, a_type


class BagLookups(NamedTuple):
    """The lookups of a call of a table."""

    indices: Tensor  # [lookups] int32 or int64
    offsets: Tensor  # [bags], or [bags + 1] with include_last_offset
    include_last_offset: bool
    weights: Tensor | None  # [lookups]

    @property
    def bags(self) -> int:
        """The number of bags."""
        return self.offsets.numel() - int(self.include_last_offset)


class Lookups(NamedTuple):
    """The lookups of a call of many features, feature by feature."""

    indices: Tensor  # [lookups] int32 or int64
    offsets: Tensor  # [features * bags + 1] int32 or int64
    weights: Tensor | None  # [lookups]


AnyLookups = TypeVar("AnyLookups", BagLookups, Lookups)


def each_batch(batches: Iterable[Any], function: str = "recfuse") -> Iterator[tuple[str, Any]]:
    """Yield each batch with its name in errors; TypeError for a single batch, ValueError for no batch."""
    single = isinstance(batches, (str, bytes)) or hasattr(batches, "keys")
    several = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if single or not several or (isinstance(batches, Tensor) and batches.dim() < 3):
        raise ArgumentTypeError(
            f"{function}: batches is {a_type(batches)}; expected an iterable of batches. Pass [batch] for a "
            "single batch."
        )
    number = -1
    for number, batch in enumerate(batches):
        yield f"{function}: batches[{number}]", batch
    if number < 0:
        raise ArgumentValueError(f"{function}: batches is empty; expected at least one batch")


def moved(lookups: AnyLookups, device: torch.device | None, prefix: str) -> AnyLookups:
    """Return lookups on `device` (None: their own), detached and contiguous; ValueError for freed tensors."""
    tensors = {name: getattr(lookups, name) for name in ("indices", "offsets", "weights")}
    for name, tensor in tensors.items():
        check_storages(prefix, "per_sample_weights" if name == "weights" else name, (tensor,))
    return lookups._replace(
        **{name: t.detach().to(device).contiguous() for name, t in tensors.items() if t is not None}
    )


def of_embedding_bag(batch: Any, include_last_offset: bool, prefix: str) -> BagLookups:
    """Return the lookups of arguments of `EmbeddingBag.forward`, or of a KeyedJaggedTensor with one key."""
    if is_keyed(batch):
        if len(batch.keys()) != 1:
            raise ArgumentValueError(
                f"{prefix} has the keys {batch.keys()[:8]}; expected one key for one table"
            )
        lookups = _checked(of_keys(batch, batch.keys(), prefix), 1, prefix)
        return BagLookups(lookups.indices, lookups.offsets, True, lookups.weights)
    items = (batch,) if isinstance(batch, Tensor) else _items(batch)
    if not (
        1 <= len(items) <= 3
        and isinstance(items[0], Tensor)
        and all(item is None or isinstance(item, Tensor) for item in items)
    ):
        must = "a tensor [bags, n] or a tuple (input, offsets) or (input, offsets, per_sample_weights) of "
        _fail_type(prefix, batch, must + "tensors, or a KeyedJaggedTensor")
    indices, offsets, weights = (*items, None, None)[:3]
    if indices.dim() == 2 and offsets is None:
        bags, size = indices.shape
        offsets = torch.arange(bags, dtype=torch.int64, device=indices.device) * size
        include_last_offset = False
    elif indices.dim() != 1 or offsets is None or offsets.dim() != 1:
        raise ArgumentValueError(
            f"{prefix} has an input of {indices.dim()} dimensions {'without' if offsets is None else 'with'} "
            "offsets; expected 2 without or 1 with 1-D offsets"
        )
    _check_types(prefix, indices, offsets, weights, "input")
    if weights is not None and weights.numel() != indices.numel():
        _fail_weights(prefix, weights, indices)
    weights = None if weights is None else weights.reshape(-1)
    return BagLookups(indices.reshape(-1), offsets, include_last_offset, weights)


def of_collection(batch: Any, feature_names: Sequence[str], prefix: str) -> Lookups:
    """Return the lookups of arguments of `FusedEmbeddingBagCollection.forward`."""
    if is_keyed(batch):
        return _checked(of_keys(batch, feature_names, prefix), len(feature_names), prefix)
    return of_tuple(batch, len(feature_names), prefix, " or a KeyedJaggedTensor")


def of_tuple(batch: Any, features: int, prefix: str, others: str = "") -> Lookups:
    """Return the lookups of (indices, offsets[, per_sample_weights]), feature by feature."""
    items = [torch.from_numpy(item) if isinstance(item, np.ndarray) else item for item in _items(batch)]
    indices, offsets, weights = (*items, None)[:3] if len(items) in (2, 3) else (None, None, None)
    if not (isinstance(indices, Tensor) and isinstance(offsets, Tensor)) or not (
        weights is None or isinstance(weights, Tensor)
    ):
        must = "a tuple (indices, offsets) or (indices, offsets, per_sample_weights) of tensors"
        _fail_type(prefix, batch, must + others)
    return _checked(Lookups(indices, offsets, weights), features, prefix)


def of_torchrec(batch: Any, feature_names: Sequence[str], weighted: bool, prefix: str) -> Lookups:
    """Return the lookups of the argument of a swapped `EmbeddingBagCollection.forward`."""
    from torchrec.sparse.tensor_dict import maybe_td_to_kjt

    keyed = maybe_td_to_kjt(batch, None)
    if not is_keyed(keyed):
        _fail_type(prefix, batch, "a KeyedJaggedTensor or a TensorDict")
    lookups = of_keys(keyed, feature_names, prefix)
    if weighted and lookups.weights is None:
        raise ArgumentValueError(
            f"{prefix} has no weights; expected weights, since the collection is weighted"
        )
    return _checked(lookups if weighted else lookups._replace(weights=None), len(feature_names), prefix)


def is_keyed(batch: Any) -> bool:
    """Return whether a batch is a KeyedJaggedTensor, without TorchRec, whose import takes seconds."""
    return all(hasattr(batch, name) for name in ("keys", "values", "offsets", "weights_or_none"))


def of_keys(keyed: Any, feature_names: Sequence[str], prefix: str = "recfuse: features") -> Lookups:
    """Return the lookups of a KeyedJaggedTensor, with its keys in the order of ``feature_names``.

    Raises:
        ValueError: a key is missing, batch sizes differ between keys, or lengths are not those of the values.
    """
    if keyed.variable_stride_per_key():
        raise ArgumentValueError(
            f"{prefix}: a KeyedJaggedTensor has a batch size per key; expected one batch size for all keys"
        )
    keys = keyed.keys()
    if keys != feature_names:
        position = {key: number for number, key in enumerate(keys)}
        missing = [name for name in feature_names if name not in position]
        if missing:
            raise ArgumentValueError(
                f"{prefix}: a KeyedJaggedTensor with the keys {keys[:8]} has no key {missing[0]!r} "
                f"({len(missing)} of {len(feature_names)} features are missing)"
            )
        keyed = unshared(keyed)
        _check_lengths(keyed, prefix)
        keyed = keyed.permute([position[name] for name in feature_names])
    return Lookups(keyed.values(), jagged_offsets(keyed), keyed.weights_or_none())


def lookups_per_key(keyed: Any, prefix: str = "recfuse: features") -> list[int]:
    """Return the number of lookups of each key of a KeyedJaggedTensor; waits for a GPU unless it is known.

    Raises:
        ValueError: their sum is not the number of values.
    """
    per_key: list[int] = keyed.length_per_key()
    if is_readable(keyed.values()) and sum(per_key) != keyed.values().shape[0]:
        _fail_lengths(prefix, sum(per_key), keyed)
    return per_key


def _check_lengths(keyed: Any, prefix: str) -> None:
    """Raise unless the lengths are those of the values. A permutation reads and writes by them unchecked."""
    lookups_per_key(keyed, prefix)
    lengths = keyed.lengths()
    if not (lengths.is_cpu and is_readable(lengths) and lengths.numel()):
        return
    if (least := int(lengths.min())) < 0:
        raise OffsetError(f"{prefix}: a KeyedJaggedTensor has the length {least}; expected 0 or more")
    if (lookups := int(lengths.sum())) != keyed.values().shape[0]:
        _fail_lengths(prefix, lookups, keyed)


def _fail_lengths(prefix: str, lookups: int, keyed: Any) -> NoReturn:
    raise OffsetError(
        f"{prefix}: a KeyedJaggedTensor has lengths of the sum {lookups}; expected "
        f"{keyed.values().shape[0]}, the number of its values"
    )


def jagged_offsets(jagged: Any) -> Tensor:
    """Return the offsets of a JaggedTensor or KeyedJaggedTensor, without a change to it.

    Its own method would store the offsets in it. A program that is exported with it would then refuse batches
    without stored offsets.
    """
    offsets: Tensor | None = jagged.offsets_or_none() if hasattr(jagged, "offsets_or_none") else None
    if offsets is not None:
        return offsets
    lengths = jagged.lengths_or_none() if hasattr(jagged, "lengths_or_none") else None
    return jagged.offsets() if lengths is None else torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)


def unshared(keyed: Any) -> Any:
    """Return a new object with the tensors of a KeyedJaggedTensor, for methods that store lengths in it."""
    return type(keyed)(
        keyed.keys(),
        keyed.values(),
        keyed.weights_or_none(),
        keyed.lengths_or_none(),
        keyed.offsets_or_none(),
        keyed.stride(),
        length_per_key=keyed.length_per_key(),  # waits for the GPU, but the original caches the numbers
    )


def of_list(batch: Any, tables: int, prefix: str) -> Lookups:
    """Return the lookups of arguments of `FusedEmbeddingBagList.pool`."""
    items = _items(batch)
    if not 2 <= len(items) <= 3 or not all(are_tensors(item) for item in items[:2]):
        must = "a tuple (offsets, indices) or (offsets, indices, row_weights) as pool takes it: each "
        _fail_type(prefix, batch, must + "a tensor or a list of tensors")
    return _checked(Lookups(*join_tables(*items, tables=tables, prefix=prefix)), tables, prefix)


def _items(batch: Any) -> Sequence[Any]:
    return batch if isinstance(batch, (tuple, list)) else ()


def _checked(lookups: Lookups, features: int, prefix: str) -> Lookups:
    """Return the lookups; raises TypeError or ValueError unless the tensors fit the number of features."""
    indices, offsets, weights = lookups
    _check_types(prefix, indices, offsets, weights, "indices")
    if indices.dim() != 1 or offsets.dim() != 1 or not offsets.numel() or (offsets.numel() - 1) % features:
        raise ArgumentValueError(
            f"{prefix} has indices {list(indices.shape)} and offsets {list(offsets.shape)}; expected "
            f"[lookups] and [features * bags + 1] with {features} features"
        )
    if weights is not None and weights.shape != indices.shape:
        _fail_weights(prefix, weights, indices)
    return lookups


def _check_types(prefix: str, indices: Tensor, offsets: Tensor, weights: Tensor | None, name: str) -> None:
    if indices.dtype not in INTEGERS or offsets.dtype not in INTEGERS:
        raise ArgumentTypeError(
            f"{prefix} has {indices.dtype} {name} and {offsets.dtype} offsets; expected int32 or int64"
        )
    if weights is not None and not weights.is_floating_point():
        raise ArgumentTypeError(
            f"{prefix} has {weights.dtype} per_sample_weights; expected a floating-point dtype"
        )


def _fail_weights(prefix: str, weights: Tensor, indices: Tensor) -> NoReturn:
    raise ArgumentValueError(
        f"{prefix} has per_sample_weights {list(weights.shape)}; expected a weight for each of the "
        f"{indices.numel()} lookups"
    )


def _fail_type(prefix: str, batch: Any, must: str) -> NoReturn:
    kind = a_type(batch)
    if isinstance(batch, (tuple, list)):
        kind += f" of {', '.join(type(item).__name__ for item in batch[:4]) or 'nothing'}"
    raise ArgumentTypeError(f"{prefix} is {kind}; expected {must}")
