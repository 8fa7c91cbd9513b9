"""Swaps the tables of a DLRM, and writes the files for serving: `python export.py FOLDER`.

- model.pt2: the exported program, graph and weights, for `torch.export.load` (serve.py)
- package.pt2: the same, compiled by AOTInductor for this machine, for C++ (serve.cpp) or Python
- inputs.pt: a batch, as a list of tensors; expected.pt: the output of the model
- weights.pt: new weights by name, from further training; expected_new.pt: the output with them
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from model import DLRM, batch, fingerprint
from torch.export import Dim
from torch.fx.experimental import _config as any_size

import recfuse


def exported(model: torch.nn.Module) -> torch.export.ExportedProgram:
    """Returns the program of a swapped model, for any number of bags and of lookups, including 0 and 1."""
    sizes = {"dense": {0: Dim.AUTO}, "lS_o": {1: Dim.AUTO}, "lS_i": {1: Dim.AUTO}}
    with any_size.patch(backed_size_oblivious=True):
        return torch.export.export(model, batch(8), dynamic_shapes=sizes)


@torch.no_grad()
def main(folder: Path) -> None:
    """Writes the files of the list on top into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    model = DLRM().eval()
    print(recfuse.swap(model))
    program = exported(model)
    torch.export.save(program, folder / "model.pt2")

    settings = {
        # The package has its own copy of the weights. The fingerprint identifies them.
        "aot_inductor.metadata": {"weights": fingerprint(dict(model.named_parameters()))},
        # Without this, parameters of up to 8 elements become numbers in the code, which nothing can replace.
        "always_keep_tensor_constants": True,
    }
    package = str(folder / "package.pt2")
    with any_size.patch(backed_size_oblivious=True):
        torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=settings)

    given = batch(64, seed=1)  # another size than that of the export
    torch.save(list(given), folder / "inputs.pt")
    torch.save(model(*given), folder / "expected.pt")
    for parameter in model.parameters():  # instead of further training
        parameter.mul_(1.5)
    # Plain tensors by the names of the packed Parameters, as load_constants and a program's own state
    # require.
    torch.save({name: value.detach() for name, value in model.named_parameters()}, folder / "weights.pt")
    torch.save(model(*given), folder / "expected_new.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
