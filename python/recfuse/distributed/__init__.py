"""Tables over the ranks of a process group, in place: :func:`shard` and :func:`unshard`, by a :func:`plan`.

.. code-block:: python

    import torch.distributed as dist
    import recfuse.distributed

    dist.init_process_group()
    recfuse.swap(model)
    print(recfuse.distributed.shard(model))

Processes, groups, collectives and checkpoints are ``torch.distributed``'s. For several hosts, and for
TorchRec's plans and pipelines, see :mod:`recfuse.torchrec`.
"""

from recfuse.distributed import group_threads as _group_threads  # noqa: F401  (registers a function)
from recfuse.distributed.clipping import clip_grad_norm_
from recfuse.distributed.entry import shard, unshard
from recfuse.distributed.placements import Cuts
from recfuse.distributed.planning import plan
from recfuse.distributed.reports import ShardEntry, ShardReport
from recfuse.perf.placing.plan import ShardPlan

__all__ = ["Cuts", "ShardEntry", "ShardPlan", "ShardReport", "clip_grad_norm_", "plan", "shard", "unshard"]
