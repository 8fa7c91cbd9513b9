"""Executes the notebooks and keeps their outputs: python benchmarks/notebooks/render.py

A notebook that reports a disturbance by other processes is executed again, up to --tries times. If it still
reports one, its file stays unchanged, or with --anyway is written nevertheless.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

FOLDER = Path(__file__).resolve().parent
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
DISTURBED = "Not a quiet machine"


def executed(path: Path, folder: Path) -> Any:
    """Executes a notebook in `folder`, from which nothing can be imported."""
    notebook = nbformat.read(path, as_version=4)
    os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=300, record_timing=False, resources=resources).execute()
    # Metadata that depend on the machine only.
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def printed(notebook: Any) -> str:
    """All text that its cells print."""
    return "".join(output.get("text", "") for output in outputs(notebook))


def outputs(notebook: Any) -> list[Any]:
    """The outputs of all cells, in order."""
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def main() -> None:
    """Execute the notebooks that are named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(path.stem for path in NOTEBOOKS)}")
    parser.add_argument("--tries", type=int, default=5, help="default: 5")
    parser.add_argument("--anyway", action="store_true", help="keep the outputs of a disturbed one too")
    arguments = parser.parse_args()
    disturbed = []
    for path in NOTEBOOKS:
        if arguments.names and path.stem not in arguments.names:
            continue
        for left in reversed(range(arguments.tries)):
            with tempfile.TemporaryDirectory() as folder:
                notebook = executed(path, Path(folder))
            quiet = DISTURBED not in printed(notebook)
            if quiet or (arguments.anyway and left == 0):
                nbformat.write(notebook, path)
                print(f"{path.name}: written" + ("" if quiet else ", and says that it was disturbed"))
                break
        else:
            disturbed.append(path.name)
    if disturbed:
        print(f"not written, other processes disturbed them: {', '.join(disturbed)}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
