"""The pictures of the pages, each from committed results: `PICTURES` names every file and what draws it."""

from drawings.bags import BAGS
from drawings.candidates import CANDIDATES
from drawings.columns import COLUMNS
from drawings.fused import FUSED
from drawings.schematics import SCHEMATICS

PICTURES = {**BAGS, **FUSED, **CANDIDATES, **COLUMNS, **SCHEMATICS}
"""Path from the root of the project -> a function that takes the file to write."""
