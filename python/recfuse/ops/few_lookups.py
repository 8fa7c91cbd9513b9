"""Where torch's own bag makes the faster step: few lookups on the CPU, with a sparse gradient.

A gradient of recfuse's has each row once, which saves what adds it to the weight as much as rows repeat, and
comes through a Function in Python. torch lists a row for every lookup. So torch's is faster where hardly a
row is looked up twice, or so few are looked up that the Function counts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from recfuse import _C
from recfuse._codes import INTEGERS, MEAN, SUM
from recfuse.ops.library import is_transformed
from recfuse.ops.updates import update_of

MOST_LOOKUPS = 1 << 14  # beyond, threads make up for the rest
_INTEGER_CODES = {dtype: code for code, dtype in enumerate(INTEGERS)}


def pooled_by_torch(
    input: Tensor, weight: Tensor, offsets: Tensor | None, mode: str, include_last_offset: bool
) -> Tensor | None:
    """The output of a call with torch's sparse gradient; None where the call is not for torch, also where an
    argument, an index or an offset is bad. Arguments as in `embedding_bag`; the others are the defaults.

    One condition and one look at the contents: what is done here before the call of torch's, a small bag
    takes longer.
    """
    if (
        is_transformed()
        or type(input) is not Tensor
        or type(weight) not in (Parameter, Tensor)
        or not weight.requires_grad
        or weight.dtype is not torch.float32
        or not (weight.is_cpu and weight.is_contiguous() and weight.dim() == 2)
        or not (input.is_cpu and input.is_contiguous())
        or (of := _INTEGER_CODES.get(input.dtype)) is None
        or (count := input.numel()) > MOST_LOOKUPS
        or (pooling := SUM if mode == "sum" else MEAN if mode == "mean" else None) is None
        or not torch.is_grad_enabled()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack()
        or update_of(weight) is not None
    ):
        return None
    if offsets is None:
        if input.dim() != 2:
            return None
        bags, length = input.shape
        offsets = torch.arange(bags, dtype=input.dtype) * length
        input, include_last_offset = input.reshape(-1), False
    elif (
        type(offsets) is not Tensor
        or offsets.dtype is not input.dtype
        or not (offsets.is_cpu and offsets.is_contiguous() and offsets.dim() == input.dim() == 1)
        or type(include_last_offset) is not bool
    ):
        return None
    bags = offsets.numel() - include_last_offset
    if not _C.lookups_suit_torch(
        input.data_ptr(), count, offsets.data_ptr(), bags, include_last_offset, of, weight.size(0)
    ):
        return None
    return torch.embedding_bag(weight, input, offsets, False, pooling, True, None, include_last_offset)[0]
