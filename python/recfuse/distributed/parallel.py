"""DistributedDataParallel of a model with sharded tables, whose Parameters it ignores."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from recfuse.nn.packed.by_table.raw_states import PART

_ATTRIBUTE = "_recfuse_ignores_parts"
_IGNORED = "_ddp_params_and_buffers_to_ignore"


def ignore_parts() -> None:
    """Patch the constructor of DistributedDataParallel to ignore sharded tables, once.

    It reads the names to ignore from an attribute of its module. These are names in that module, which may be
    any parent of the module that was sharded, so that shard() does not know them.
    """
    create = DistributedDataParallel.__init__
    if hasattr(create, _ATTRIBUTE):
        return

    @functools.wraps(create)
    def ignoring(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        names = _names_of_parts(module)
        if not names:
            create(self, module, *args, **kwargs)
            return
        before = vars(module).get(_IGNORED)
        vars(module)[_IGNORED] = {*(before or ()), *names}
        try:
            create(self, module, *args, **kwargs)
        finally:  # after unshard() the names may be those of whole tables
            if before is None:
                del vars(module)[_IGNORED]
            else:
                vars(module)[_IGNORED] = before

    setattr(ignoring, _ATTRIBUTE, True)
    DistributedDataParallel.__init__ = ignoring  # type: ignore[method-assign]


def _names_of_parts(module: Any) -> set[str]:
    if not isinstance(module, torch.nn.Module):
        return set()
    return {name for name, parameter in module.named_parameters() if getattr(parameter, PART, False)}
