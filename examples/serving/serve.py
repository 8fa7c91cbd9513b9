"""Serves an exported program with only the library: `python serve.py LIBRARY FOLDER OUTPUT [WEIGHTS]`.

The package recfuse need not be installed here: its file LIBRARY registers the operators.
"""

from __future__ import annotations

import sys

import torch


@torch.no_grad()
def main(library: str, folder: str, output: str, weights: str | None = None) -> None:
    """Computes the output for `inputs.pt` of `folder` with `model.pt2`, optionally with new weights."""
    torch.ops.load_library(library)
    module = torch.export.load(f"{folder}/model.pt2").module()
    if weights:
        module.load_state_dict(torch.load(weights), strict=True)
    torch.save(module(*torch.load(f"{folder}/inputs.pt")), output)
    assert "recfuse" not in sys.modules


if __name__ == "__main__":
    main(*sys.argv[1:])
