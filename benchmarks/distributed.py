"""Sharded tables on several GPUs: the benchmark in the folder distributed, started by torchrun."""

from __future__ import annotations

import os
import sys
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from common.report import texts, write_results
from common.table import Table
from distributed import bench
from distributed.plans import plans
from distributed.setting import SHARE_OF_STEPS, Ranks
from distributed.steps import losses, steps

FUNCTIONS = {"steps": steps, "losses": losses, "plans": plans}
WAIT = timedelta(seconds=60)  # for a rank that has failed


def main() -> None:
    """Runs the command line; see the package's docstring."""
    parser, arguments = bench.parse()
    if "RANK" not in os.environ:
        parser.error("the variable RANK is not set. Run this program with torchrun, as in --help.")
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo", timeout=WAIT)
    setting = Ranks(parser, arguments)
    tables: dict[str, Table] = {}
    results: dict[str, Any] = {"arguments": texts(arguments), "ranks": dist.get_world_size()}
    errors: dict[str, str] = {}
    for name in arguments.parts:
        setting.share = SHARE_OF_STEPS if name == "steps" else 1.0
        shown: dict[str, Table] = {}
        try:
            for part in FUNCTIONS[name](setting):
                tables[part.table.title], results[part.name] = part.table, part.record
                shown[part.table.title] = part.table
                if dist.get_rank() == 0:
                    write_results(arguments.json, list(tables.values()), results, setting.device)
        except Exception:  # all ranks fail alike, or the others stop after WAIT
            errors[name] = traceback.format_exc()
            print(errors[name], file=sys.stderr, flush=True)
        setting.release()
        for table in shown.values() if dist.get_rank() == 0 else ():
            table.show(arguments.markdown)
    if dist.get_rank() == 0:
        write_results(arguments.json, list(tables.values()), {**results, "errors": errors}, setting.device)
    dist.destroy_process_group()
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
