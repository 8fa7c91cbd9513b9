"""The pictures of the pages, drawn from committed results: `PICTURES` maps every file to its function."""

from drawings.bags import BAGS
from drawings.candidates import CANDIDATES
from drawings.columns import COLUMNS
from drawings.fused import FUSED
from drawings.quantised import QUANTISED
from drawings.schematics import SCHEMATICS

PICTURES = {**BAGS, **FUSED, **CANDIDATES, **COLUMNS, **QUANTISED, **SCHEMATICS}
"""Path from the root of the project -> a function that writes the file."""
