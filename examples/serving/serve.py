"""Serves an exported program with the library alone: `python serve.py LIBRARY FOLDER OUTPUT [WEIGHTS]`.

The package recfuse need not be installed here: its one file LIBRARY registers the operators.
"""

from __future__ import annotations

import sys

import torch


@torch.no_grad()
def main(library: str, folder: str, output: str, weights: str | None = None) -> None:
    """Answers `inputs.pt` of `folder` with `model.pt2`, with new weights where they are given."""
    torch.ops.load_library(library)
    module = torch.export.load(f"{folder}/model.pt2").module()
    if weights:
        module.load_state_dict(torch.load(weights), strict=True)
    torch.save(module(*torch.load(f"{folder}/inputs.pt")), output)
    assert "recfuse" not in sys.modules


if __name__ == "__main__":
    main(*sys.argv[1:])
