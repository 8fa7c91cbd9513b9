"""The host's time of a call of many features of tiny batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import recfuse
from common.calls import figure_host
from common.report import Figure
from common.settings import Setting
from sequences import bench
from sequences.sides import batch_of, collection_of, names_of, torchrec_of

HISTORIES = 4


def jagged_of(rows: Sequence[Tensor], lengths: Sequence[Tensor]) -> dict[str, Any]:
    """The dict of JaggedTensors of rows and lengths, by TorchRec's constructor."""
    from torchrec import JaggedTensor

    both = zip(names_of(len(rows)), rows, lengths, strict=True)
    return {name: JaggedTensor(values=own, lengths=counts) for name, own, counts in both}


@bench.figure("host")
@torch.inference_mode()
def figure_calls(setting: Setting) -> Iterator[Figure]:
    """Each number of features."""
    arguments = setting.arguments
    torch.manual_seed(arguments.seed)
    for features in arguments.host_features:
        weights = [torch.randn(100, 8, device=setting.device) for _ in range(features)]
        lengths = [torch.full((HISTORIES,), 2)] * features
        indices = [torch.randint(100, (2 * HISTORIES,)) for _ in weights]
        batch = batch_of(lengths, indices, setting.device)
        ours = collection_of(weights)
        call = batch.indices, batch.offsets
        runs: dict[str, Callable[[], Any]] = {
            "recfuse, padded": lambda ours=ours, call=call: ours(*call, layout="padded", length=4),
            "recfuse, joined": lambda ours=ours, call=call: ours(*call, layout="joined"),
            "recfuse, a tensor each": lambda ours=ours, call=call, batch=batch: ours(
                *call, sizes=batch.sizes
            ),
        }
        try:
            theirs, swapped = torchrec_of(weights), nn.ModuleList([torchrec_of(weights)])
            recfuse.swap(swapped)
            runs["TorchRec"] = lambda theirs=theirs, batch=batch: theirs(batch.keyed)
            runs["TorchRec, swapped"] = lambda swapped=swapped, batch=batch: swapped[0](batch.keyed)
            rows, parts = ours(*call, sizes=batch.sizes), [own.to(setting.device) for own in lengths]
            runs["JaggedTensors alone"] = lambda rows=rows, parts=parts: jagged_of(rows, parts)
        except ImportError:
            pass
        title = f"{features} features x {HISTORIES} histories of 2"
        figure = figure_host(title, runs, setting.device, arguments.rounds)
        figure.name = f"host {features}"
        yield figure
