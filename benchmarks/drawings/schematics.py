"""Pictures without measurements: many calls that become one call, and the rooms of the code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.plots import Draw, drawn

ROOT = Path(__file__).resolve().parents[2]
SHARED = {"driver", "jit", "tune", "launches", "device"}
INCLUDE = re.compile(r'^#\s*include\s*"([^"]+)', re.MULTILINE)
IMPORT = re.compile(r"^\s*(?:from|import) recfuse\.(\w+)", re.MULTILINE)
PALE, GREY, ORANGE = "#d7ece4", "#f0f0f0", "#dd7a1f"
TABLES = 26
SCHEDULES = ((6, "#1b7f5c"), (3, "#4a7fb5"), (9, "#7d5ba6"), (4, "#dd7a1f"), (4, "#b5485d"))
WORDS = {"include": "include\n(public C API)", "device": "device\n(shared with kernels)"}

Edges = set[tuple[str, str]]


def _room(path: Path) -> str:
    """Returns the room of a path: a folder of csrc, csrc/gpu or csrc/families; include and the list of
    families are rooms too."""
    parts = path.relative_to(ROOT).parts
    if path.name == "families.h" or path.name.endswith("_family.h"):
        return "families.h"
    return "include" if parts[0] == "include" else parts[2] if parts[1] in ("gpu", "families") else parts[1]


def library_edges() -> Edges:
    """Returns the includes between rooms of the C sources."""
    files = [
        path
        for pattern in ("csrc/**/*.[ch]", "csrc/**/*.cu*", "include/**/*.h")
        for path in ROOT.glob(pattern)
    ]
    roots = ROOT / "include", ROOT / "csrc"
    edges = set()
    for path in files:
        for included in INCLUDE.findall(path.read_text()):
            match = next(
                (root / included for root in (path.parent, *roots) if (root / included).exists()), None
            )
            if match is not None and _room(match.resolve()) != _room(path):
                edges.add((_room(path), _room(match.resolve())))
    return edges


def python_edges() -> Edges:
    """Returns the imports between packages of python/recfuse."""
    package = ROOT / "python" / "recfuse"
    rooms = {path.name for path in package.iterdir() if (path / "__init__.py").exists()}
    return {
        (room, imported)
        for room in rooms
        for path in (package / room).glob("**/*.py")
        for imported in IMPORT.findall(path.read_text())
        if imported in rooms and imported != room
    }


def reduced(edges: Edges) -> Edges:
    """Without those that follow from others."""
    return {
        (above, under)
        for above, under in edges
        if not any(start == above and under in _reached(between, edges) for start, between in edges)
    }


def _reached(start: str, edges: Edges) -> set[str]:
    rooms: set[str] = set()
    while new := {under for above, under in edges if above in {start, *rooms}} - rooms:
        rooms |= new
    return rooms


def level(edges: Edges) -> dict[str, int]:
    """Returns for each room the longest chain of rooms below it."""
    levels = {room: 0 for edge in edges for room in edge}
    for _ in levels:  # as many passes as the longest path may need
        for above, under in edges:
            levels[above] = max(levels[above], levels[under] + 1)
    return levels


def _box(
    axis: Any, x: float, y: float, text: str, colour: str, width: float = 1.5, height: float = 0.5
) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner = x - width / 2, y - height / 2
    style = "round,pad=0.02,rounding_size=0.06"
    axis.add_patch(
        FancyBboxPatch(corner, width, height, boxstyle=style, facecolor=colour, edgecolor="#666666", zorder=5)
    )
    size = 9 if len(text) < 16 or "\n" in text else 8
    axis.text(x, y, text, ha="center", va="center", fontsize=size, zorder=6)  # above the arrows


def _graph(axis: Any, edges: Edges, title: str, colour_of: Mapping[str, str]) -> None:
    levels = level(edges)
    shelves: dict[int, list[str]] = {}
    for room in sorted(levels):
        shelves.setdefault(levels[room], []).append(room)
    widest = max(map(len, shelves.values()))
    place = {
        room: ((number + 0.5) * 1.85 * widest / len(shelf), y * 1.15)
        for y, shelf in shelves.items()
        for number, room in enumerate(shelf)
    }
    for above, under in sorted(reduced(edges)):
        (x, y), (to_x, to_y) = place[above], place[under]
        arrow = {"arrowstyle": "-|>", "color": "#888888", "shrinkA": 0, "shrinkB": 0, "linewidth": 0.9}
        axis.annotate("", (to_x, to_y + 0.29), (x, y - 0.27), arrowprops=arrow)
    for room, (x, y) in place.items():
        _box(axis, x, y, WORDS.get(room, room), colour_of.get(room, PALE), 1.7)
    axis.set(xlim=(0, 1.85 * widest), ylim=(-0.4, 1.15 * max(shelves) + 0.6))
    axis.set_title(title)
    axis.axis("off")


def _architecture(path: Path) -> None:
    library, python = library_edges(), python_edges()
    with drawn(path, [sorted(reduced(library)), sorted(reduced(python))]) as plt:
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(15, 6.2), layout="constrained", width_ratios=(4, 11)
        )
        families = {room for above, room in library if above in ("torch", "python")} - SHARED
        known = {room: GREY for room in ("include", "core", "device", "tools")}
        known |= {room: "#fbe3cf" for room in ("torch", "python")}
        known |= {room: "#dce6f2" for room in ("driver", "jit", "tune", "launches")}
        _graph(left, python, "python/recfuse: which package imports which", {})
        _graph(
            right,
            library,
            "librecfuse.so: which folder of csrc includes which",
            {**dict.fromkeys(families, PALE), **known},
        )
        figure.text(0.27, 0.5, "loads\n→", ha="center", fontsize=11)


def _one_call(path: Path) -> None:
    with drawn(path, [TABLES, SCHEDULES]) as plt:
        _, (left, right) = plt.subplots(1, 2, figsize=(10, 4.0), layout="constrained", width_ratios=(5, 5))
        kinds = [colour for number, colour in SCHEDULES for _ in range(number)]
        heights = [0.5 + (number * 7 % 5) * 0.32 for number in range(TABLES)]
        for axis, top in ((left, "26 calls of nn.EmbeddingBag"), (right, "1 call: a schedule a feature")):
            axis.set_title(top, fontweight="bold", fontsize=11)
            axis.set(xlim=(-0.5, TABLES + 0.5), ylim=(0, 7.3))
            axis.axis("off")
            axis.text(TABLES / 2, 0.1, "26 tables of different rows and dims", ha="center", fontsize=9)
            for number, height in enumerate(heights):
                axis.add_patch(plt.Rectangle((number + 0.1, 0.6), 0.8, height, facecolor="#cccccc"))
        for number in range(TABLES):
            launch = plt.Rectangle((number + 0.1, 4.0), 0.8, 0.9, facecolor="#9a9a9a")
            left.add_patch(launch)
            left.plot([number + 0.5] * 2, [2.5, 4.0], color="#bbbbbb", linewidth=0.8)
            left.plot([number + 0.5] * 2, [4.9, 6.3], color="#bbbbbb", linewidth=0.8)
            right.plot([number + 0.5] * 2, [2.5, 4.0], color=kinds[number], linewidth=0.9)
        left.text(
            TABLES / 2,
            5.15,
            "26 launches, one after the other, one kind of kernel",
            ha="center",
            fontsize=9,
            backgroundcolor="white",
        )
        start = 0
        for wide, colour in SCHEDULES:
            right.add_patch(plt.Rectangle((start, 4.0), wide, 0.9, facecolor=colour))
            start += wide
        right.add_patch(plt.Rectangle((0, 4.0), TABLES, 0.9, fill=False, edgecolor="black", linewidth=1.4))
        right.text(
            TABLES / 2,
            5.15,
            "one launch; colours: threads a bag, rows in flight, blocks a bag",
            ha="center",
            fontsize=9,
        )
        right.annotate(
            "", (TABLES / 2, 6.3), (TABLES / 2, 5.6), arrowprops={"arrowstyle": "-|>", "color": "#666666"}
        )
        for axis, text in ((left, "torch.cat"), (right, "written where it belongs")):
            axis.add_patch(plt.Rectangle((0, 6.3), TABLES, 0.7, facecolor="#f0f0f0", edgecolor="#666666"))
            axis.text(TABLES / 2, 6.65, f"[bags, sum of dims]: {text}", ha="center", va="center", fontsize=9)


SCHEMATICS: dict[str, Draw] = {
    "docs/pictures/one_call.svg": _one_call,
    "docs/pictures/architecture.svg": _architecture,
}
