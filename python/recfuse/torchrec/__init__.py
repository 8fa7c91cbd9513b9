"""recfuse's kernels inside TorchRec: sharded training on several GPUs and hosts.

.. code-block:: python

    from torchrec.distributed import DistributedModelParallel
    from recfuse.torchrec import EmbeddingBagCollectionSharder

    model = DistributedModelParallel(model, sharders=[EmbeddingBagCollectionSharder()], device=device)

TorchRec plans, shards, moves and saves; lookups and updates of rows are recfuse's.
"""

from __future__ import annotations

import importlib.metadata
import warnings

TESTED = ("1.6.1", "1.8.0")
"""The versions of TorchRec that are tested."""

try:
    from recfuse.torchrec.calibrated_planner import planner
    from recfuse.torchrec.pipelines import refuse_prefetching
    from recfuse.torchrec.sharder import EmbeddingBagCollectionSharder, disable, enable, uses_recfuse
    from recfuse.torchrec.tables import TableBatchedEmbeddingBags
except (ImportError, AttributeError) as error:  # a class or a method that another version has moved
    raise ImportError(
        f"recfuse.torchrec: {error}. Install torchrec and fbgemm-gpu or fbgemm-gpu-cpu, as tested with "
        f"torchrec {' and '.join(TESTED)}."
    ) from error


def _warn_of_another_version() -> None:
    """Warn if the installed TorchRec is not a tested version; a nightly build has no version."""
    try:
        version = importlib.metadata.version("torchrec")
    except importlib.metadata.PackageNotFoundError:
        return
    if version.split("+")[0] not in TESTED:
        warnings.warn(
            f"recfuse.torchrec: torchrec is {version}, which is not tested; expected {' or '.join(TESTED)}",
            stacklevel=3,
        )


_warn_of_another_version()
refuse_prefetching()

__all__ = [
    "EmbeddingBagCollectionSharder",
    "TableBatchedEmbeddingBags",
    "disable",
    "enable",
    "planner",
    "uses_recfuse",
]
