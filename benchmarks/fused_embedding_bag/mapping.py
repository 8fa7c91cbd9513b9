"""Figure 13 of RecFlex (SC'24): blocks assigned to features at run time, or statically.

A static mapping keeps the blocks of each feature as they are for a batch of the average or the largest size
in the history. Each block takes its share of the bags of the current batch: it loops if the batch is larger,
and is idle if there are fewer bags than blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from common.batches import Batch
from common.report import Figure, Panels
from common.table import Table, times
from fused_embedding_bag import bench
from fused_embedding_bag.ablations import FP32, stream_us, verified
from fused_embedding_bag.candidates import collection, fused_run, tuned_collection
from fused_embedding_bag.native import SPLIT, never_staged, schedules_of
from fused_embedding_bag.setting import FusedSetting, ModelSubject
from fused_embedding_bag.streams import Run
from recfuse.nn.mapping import rows_before_lists

CACHED, RUNTIME = "by batch size, cached", "at run time"
AVERAGE, MAXIMUM = "static, average", "static, maximum"
_TAIL_SEED = 3_000_000
# The first row of a mapping has the numbers of tasks, of groups that share bags, and of bags; tasks follow.
_TASKS, _GROUPS, _BAGS = 1, 3, 5
_FIRST_BAG, _LAST_BAG = 1, 2  # of a task


def rescaled(mapping: Tensor, bags: int) -> Tensor:
    """Returns the same blocks, int32 [rows, 8], for `bags` bags per feature: their bags scale in proportion.

    ValueError: blocks share bags and keep partial sums; or tables are staged.
    """
    tasks, before = int(mapping[0, _TASKS]), int(mapping[0, _BAGS])
    if mapping[0, _GROUPS]:
        raise ValueError("blocks share bags; expected blocks of whole bags")
    if len(mapping) > rows_before_lists(mapping):
        raise ValueError("tables are staged; expected a mapping without staged tables")
    changed = mapping.clone()
    changed[0, _BAGS] = bags
    for column in (_FIRST_BAG, _LAST_BAG):
        changed[1 : tasks + 1, column] = (mapping[1 : tasks + 1, column].long() * bags // before).int()
    return changed


def mapped_run(module: Any, mapping_of: Callable[[Batch], Any]) -> Run:
    """Returns a run with mappings that are computed at a batch's first call."""
    mappings: dict[int, tuple[Batch, Any]] = {}

    @torch.inference_mode()
    def run(batch: Batch) -> Tensor:
        if id(batch) not in mappings:
            mappings[id(batch)] = batch, mapping_of(batch)
        return module(batch.indices, batch.offsets, mapping=mappings[id(batch)][1])

    return run


def static_mapping(module: Any, history: Batch) -> Callable[[Batch], Any]:
    """Returns the blocks of a batch of the history, for every batch."""
    original = module.map(history.host_offsets)

    def mapping_of(batch: Batch) -> Any:
        tensor = rescaled(original.tensor, batch.size)
        mapping = dataclasses.replace(original, tensor=tensor, bags=batch.size)
        return mapping.pin_memory() if batch.indices.is_cuda else mapping

    return mapping_of


def _runs(subject: ModelSubject) -> dict[str, Run]:
    """Returns the tuned kernel with each mapping; no blocks share a bag, and no table is staged."""
    schedules, warps = schedules_of(tuned_collection(subject, FP32))
    schedules[:, SPLIT] = 1
    schedules = never_staged(schedules)
    module = collection(subject, FP32)
    module.set_plan(torch.from_numpy(schedules), warps)
    history = subject.tuning_batches
    mean = sum(batch.size for batch in history) / len(history)
    average = min(history, key=lambda batch: abs(batch.size - mean))
    largest = max(history, key=lambda batch: len(batch.indices))
    return {
        CACHED: fused_run(module),
        RUNTIME: mapped_run(module, lambda batch: module.map(batch.host_offsets)),
        AVERAGE: mapped_run(module, static_mapping(module, average)),
        MAXIMUM: mapped_run(module, static_mapping(module, largest)),
    }


@bench.figure("13", on=["cuda"], group="ablations")
def figure_13(setting: FusedSetting) -> Figure:
    """The test batches, and a request of `--tail-size` samples, by each mapping."""
    arguments = setting.arguments
    table = Table(
        f"Figure 13: us a batch of the published sizes, mean / of a request of {arguments.tail_size:,}",
        ["model", CACHED, RUNTIME, AVERAGE, MAXIMUM, "over average", "over maximum"],
    )
    record: dict[str, Any] = {}
    panels: Panels = {
        title: {f"over {kind}": {} for kind in (AVERAGE, MAXIMUM)}
        for title in ("published sizes", f"a request of {arguments.tail_size:,}")
    }
    for name in tqdm(arguments.models, desc="figure 13", leave=False):
        subject = setting.subject(name)
        runs, errors = verified(subject, _runs(subject), arguments.batch_sizes[0])
        tail = subject.make([arguments.tail_size] * 2, arguments.seed + _TAIL_SEED)
        times = [stream_us(subject, runs, batches) for batches in (subject.test_batches, tail)]
        record[name] = {"us": dict(zip(panels, times, strict=True)), "relative_error": errors}
        for us, series in zip(times, panels.values(), strict=True):
            for kind in (AVERAGE, MAXIMUM):
                series[f"over {kind}"][name] = us[kind] / us[RUNTIME]
        cells = [" / ".join(f"{us[kind]:.1f}" for us in times) for kind in runs]
        table.rows.append([name, *cells, *_ratios(panels, lambda ratios, name=name: ratios[name])])
    means = _ratios(panels, lambda ratios: geometric_mean(ratios.values()))
    table.rows.append(["geometric mean", *[""] * 4, *means])
    table.notes = [
        "All with the plan's schedules, but without bags that several blocks share. At run time: from the "
        "batch's lengths, by the host before the call; this and the static ones are copied to the GPU in "
        "the call. By batch size: recfuse's way where no mapping is given. Ratios are those of at run time."
    ]
    return Figure([table], panels, record)


def _ratios(panels: Panels, pick: Any) -> list[str]:
    return [
        " / ".join(times(pick(series[f"over {kind}"])) for series in panels.values())
        for kind in (AVERAGE, MAXIMUM)
    ]
