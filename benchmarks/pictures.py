"""Draw the pictures of the pages from the committed results: python benchmarks/pictures.py [NAME...]"""

from __future__ import annotations

import argparse
from pathlib import Path

from tqdm import tqdm

from drawings import PICTURES

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Draws all pictures, or the named ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="part of a path, such as fused_us (default: all)"
    )
    names = parser.parse_args().names
    chosen = {
        path: draw for path, draw in PICTURES.items() if not names or any(name in path for name in names)
    }
    if not chosen:
        parser.error(f"names are {' '.join(names)}; expected a part of {', '.join(PICTURES)}")
    for path, draw in tqdm(chosen.items(), desc="pictures", leave=False):
        draw(ROOT / path)
    print(f"drawn: {', '.join(chosen)}")


if __name__ == "__main__":
    main()
