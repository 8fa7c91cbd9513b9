"""Exported programs of FusedEmbeddingCollection: any batch, a saved file, AOTInductor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recfuse.nn import FusedEmbeddingCollection
from support.compiled import QUICK

LAYOUTS = ("jagged", "joined", "padded")


class Histories(nn.Module):
    """Two tables of dims 4 and 8; equal lengths of both features."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        dims = (4, 4) if layout == "jagged" else (4, 8)
        self.tables = FusedEmbeddingCollection([(30, dims[0]), (9, dims[1])]).requires_grad_(False)
        self.form = layout

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        if self.form == "jagged":
            half = indices.shape[0] // 2
            return torch.cat(self.tables(indices, offsets, sizes=[half, indices.shape[0] - half]), 1)
        length = 3 if self.form == "padded" else 0
        return self.tables(indices, offsets, layout=self.form, length=length) * 2


def batch(bags: int) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(1, 5, (bags,)).repeat(2)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    return torch.randint(0, 9, (int(offsets[-1]),)), offsets


def exported(model: nn.Module) -> Any:
    pairs, bags = torch.export.Dim("pairs", min=2, max=1 << 20), torch.export.Dim("bags", min=2, max=1 << 20)
    shapes = {"indices": {0: 2 * pairs}, "offsets": {0: 2 * bags + 1}}
    return torch.export.export(model, batch(6), dynamic_shapes=shapes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_programs_take_any_batch(layout: str, tmp_path: Path) -> None:
    model = Histories(layout)
    program = exported(model)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for bags in (2, 6, 100):
        own = batch(bags)
        for run in (program.module(), loaded):
            assert torch.equal(run(*own), model(*own))
    indices, offsets = batch(3)
    indices[-1] = 9
    with pytest.raises(IndexError, match="for feature 1, bag 2; expected 0 to 8"):
        loaded(indices, offsets)


class EveryLayout(nn.Module):
    """One program to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.forms = nn.ModuleList(map(Histories, LAYOUTS))

    def forward(self, indices: Tensor, offsets: Tensor) -> list[Tensor]:
        return [form(indices, offsets) for form in self.forms]


@pytest.mark.long
def test_aotinductor(tmp_path: Path) -> None:
    model, path = EveryLayout(), str(tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(exported(model), package_path=path, inductor_configs=QUICK)
    loaded = torch._inductor.aoti_load_package(path)
    for bags in (2, 6, 100):
        own = batch(bags)
        for layout, found, expected in zip(LAYOUTS, loaded(*own), model(*own), strict=True):
            assert torch.equal(found, expected), (layout, bags)
