"""The restoration of a sharded module: whole tables on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from recfuse.distributed.sharding import Sharding
from recfuse.nn.packed.layout import arrange, layout_of, table_rows


@torch.no_grad()
def restore(module: Any) -> None:
    """Give a module its class, its tables and whole Parameters; a collective call of all ranks."""
    sharding: Sharding = module._sharding
    forms = [form._replace(tag=None) for form in sharding.forms]
    matrices = arrange(forms)
    specs = sharding.specs
    parameters = {
        name: parameter for name, parameter, _ in module._allocate(matrices, [spec.name for spec in specs])
    }
    old = sharding.layout
    layout = layout_of(specs, range(len(specs)), old.table_of_feature, matrices, old.sparse)
    for number, spec in enumerate(layout.tables):
        whole = table_rows(spec, parameters[layout.parameter_names[spec.matrix]].detach())
        local = sharding.rows(number)
        for part in sharding.placed[number].parts:
            rectangle = whole.narrow(0, part.row, part.rows).narrow(1, part.column, part.columns)
            if sharding.placed[number].kind == "copies":
                rectangle.copy_(local)
                break
            values = torch.empty(rectangle.shape, dtype=whole.dtype, device=whole.device)
            if part.rank == sharding.rank and local is not None:
                values.copy_(local)
            dist.broadcast(values, group=sharding.group, group_src=part.rank)
            rectangle.copy_(values)
    training = [table.training for table in module.tables.values()]
    if not module._tables_name:
        module._modules.clear()
        for name in sharding.store.layout.parameter_names:
            del module._parameters[name]
    module.__class__ = sharding.original
    del vars(module)["_sharding"]
    module._publish(layout, parameters, training)
