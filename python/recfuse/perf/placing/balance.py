"""Ranks of parts: longest first, then exchanges between ranks."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

_MOST_EXCHANGES = 2000


def balanced(
    load: Any, size: Any, gpus: int, room: float, base_load: Any = None, base_size: Any = None
) -> Any:
    """Returns the rank of each part, or None if the parts do not fit.

    Args:
        load: microseconds of each part.
        size: bytes of each part.
        gpus: the number of ranks.
        room: bytes of each rank.
        base_load, base_size: microseconds and bytes by rank that are there already.
    """
    total = np.zeros(gpus) if base_load is None else np.array(base_load, float)
    used = np.zeros(gpus) if base_size is None else np.array(base_size, float)
    rank_of = _longest_first(load, size, room, total, used)
    if rank_of is not None:
        _exchange(rank_of, load, size, room, total, used)
    return rank_of


def _longest_first(load: Any, size: Any, room: float, base_load: Any, base_size: Any) -> Any:
    """Assigns each part to the least loaded rank with room."""
    gpus = len(base_load)
    rank_of, used = np.zeros(len(load), np.int64), base_size.copy()
    queue = [(float(base_load[rank]), rank) for rank in range(gpus)]
    heapq.heapify(queue)
    is_roomy = size.sum() + used.sum() < 0.8 * room * gpus
    for part in np.lexsort((-size, -load)) if is_roomy else np.argsort(-size):
        waiting = []
        while queue and used[queue[0][1]] + size[part] > room:
            waiting.append(heapq.heappop(queue))
        if not queue:
            return None
        cost, rank = heapq.heappop(queue)
        rank_of[part] = rank
        used[rank] += size[part]
        for each in (*waiting, (cost + float(load[part]), rank)):
            heapq.heappush(queue, each)
    return rank_of


def _exchange(rank_of: Any, load: Any, size: Any, room: float, base_load: Any, base_size: Any) -> None:
    """Moves a part of the slowest rank, or exchanges it with another, while that lowers the
    larger of both times.
    """
    gpus = len(base_load)
    total = base_load + np.bincount(rank_of, load, gpus)
    used = base_size + np.bincount(rank_of, size, gpus)
    for _ in range(_MOST_EXCHANGES):
        slow = int(total.argmax())
        own, others = np.flatnonzero(rank_of == slow), np.flatnonzero(rank_of != slow)
        ranks = np.concatenate([rank_of[others], np.arange(gpus)])
        loads = np.concatenate([load[others], np.zeros(gpus)])  # the last entries: a move without exchange
        sizes = np.concatenate([size[others], np.zeros(gpus)])
        moved = load[own][:, None] - loads
        fits = (used[ranks] + size[own][:, None] - sizes <= room) & (
            used[slow] - size[own][:, None] + sizes <= room
        )
        worst = np.maximum(total[slow] - moved, total[ranks] + moved)
        worst[~fits | (ranks == slow)] = np.inf
        if not worst.size or worst.min() >= total[slow] * (1 - 1e-9):
            return
        first, second = np.unravel_index(int(worst.argmin()), worst.shape)
        target = int(ranks[second])
        rank_of[own[first]] = target
        if second < len(others):
            rank_of[others[second]] = slow
        total = base_load + np.bincount(rank_of, load, gpus)
        used = base_size + np.bincount(rank_of, size, gpus)
