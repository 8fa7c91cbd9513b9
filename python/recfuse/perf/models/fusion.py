"""Predicts the kernels of a compiled step by a rule.

Memory-bound operators (pointwise, cat, index, reductions) that follow each other without another
kernel between them become one kernel, if each reads or writes a tensor of the group. A cat of
more than eight tensors copies each result of another kernel with a separate kernel. Matrix
products, bags and updates stay separate kernels; views vanish. A fused kernel moves the bytes
that the group reads from outside and writes to the outside.
"""

from __future__ import annotations

from collections.abc import Sequence

from recfuse.perf.tracing.operators import Operator

_MOST_CAT = 8  # inputs of a cat that is a separate kernel


def fuse(operators: Sequence[Operator]) -> list[Operator]:
    """Return the operators, with a single operator for each fused group."""
    fused: list[Operator] = []
    group: list[Operator] = []
    touched: set[int] = set()

    def close() -> None:
        if group:
            fused.append(_merged(group))
            group.clear()
            touched.clear()

    written: set[int] = set()  # storages that unfused kernels have written
    for operator in operators:
        if not operator.fusable and operator.kind is not None:
            written.update(operator.writes)
        if operator.kind is None:  # a view: its storage is that of its source
            if touched & {*operator.reads}:
                touched.update(operator.writes)
            continue
        if operator.kind == "cat" and len(operator.reads) > _MOST_CAT:
            close()
            copied = [storage for storage in operator.reads if storage in written]
            words = operator.sizes[0] / len(operator.reads)
            fused += [Operator("copy", operator.phase, "pointwise_1", (words,), operator.module)] * len(
                copied
            )
            continue
        if not operator.fusable:
            close()
            fused.append(operator)
            continue
        storages = {*operator.reads, *operator.writes}
        if group and not touched & storages:
            close()
        group.append(operator)
        touched.update(storages)
    close()
    return fused


def _merged(group: Sequence[Operator]) -> Operator:
    """Return a kernel for a group: the words of its largest operator, read once and written once."""
    if len(group) == 1:
        return group[0]
    words = max(_words(operator) for operator in group)
    inner = {storage for operator in group for storage in operator.writes}
    outside = {storage for operator in group for storage in operator.reads} - inner
    count = min(max(len(outside), 1), 3)
    return Operator("fused", group[-1].phase, f"pointwise_{count}", (words,), group[-1].module, fusable=True)


def _words(operator: Operator) -> float:
    """Return the words of an operator's largest tensor."""
    assert operator.kind is not None
    if operator.kind.startswith(("index", "sum", "softmax")):
        return operator.sizes[0] * operator.sizes[1]
    return operator.sizes[0]
