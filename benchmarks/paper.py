"""A report over the five papers, from committed results: python benchmarks/paper.py [--check]

Writes PAPERS.md: a row per headline figure, with the claim of the paper and the present measurement.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common.overviews import OVERVIEWS
from common.table import Table
from performance_model import recorded
from recfuse.perf.choosing import Chosen

PAGE = Path(__file__).with_name("PAPERS.md")
HEAD = """# Five papers

Claims of the papers, and measurements of this project against today's best peers. The papers used other
machines and other peers, so a claim and the measurement in its row are not directly comparable.
`python benchmarks/paper.py` writes this page from committed results; `--check` compares.

"""


def report() -> Table:
    """Return a row for each headline figure."""
    first = {row[0]: row for row in OVERVIEWS["first"]().rows if not row[0].startswith("CPU")}
    bags = {row[0]: row for row in OVERVIEWS["bag"]().rows}
    errors = recorded.errors(recorded.read(), Chosen(recorded.calibration()))
    model = "predictions of recfuse.predict, H100"
    table = Table("", ["paper", "claim", "measured", "subject", "command"])

    def row(paper: str, claim: str, measured: str, subject: str, command: str) -> None:
        table.rows.append([paper, claim, measured, subject, f"`python benchmarks/{command}`"])

    fused = first["H200: the same models"]
    row("RecFlex, SC 2024", "fused kernels 2.64x over TorchRec", fused[2], "models A to E over FBGEMM, H200",
        "fused_embedding_bag.py --device cuda")  # fmt: skip
    claim = "up to 103 % for the embedding stage, A100"
    row("Embedding prefetching, MICRO 2024", claim, f"{bags['random'][5]} to {bags['one_item'][5]}",
        "one table over torch, H200", "embedding_bag.py --device cuda")  # fmt: skip
    columns = first["H200: 1,000 feature columns"]
    row("RECom, ASPLOS 2023", "1,000 columns in 3.11 ms, TensorFlow 379 ms, T4", columns[2],
        "1,000 columns over torch, joined by hand, H200", "embedding_columns.py --device cuda")  # fmt: skip
    linear = first["H200: linear layer over candidates"]
    row("IKBO, linear", "about 4x over a matmul of broadcast inputs, H100", linear[2],
        "over torch's best form, H200", "ikbo_linear.py --device cuda")  # fmt: skip
    attention = first["H200: attention over 512 events, uneven groups"]
    row("IKBO, attention", "594 TFLOP/s at 1,024 keys, H100", attention[2],
        "512 keys over FlashAttention-3, H200", "ikbo_attention.py --device cuda")  # fmt: skip
    for claim, name in (("time of kernels: GMAE 4.61 %", "active, named"),
                        ("end to end, training: GMAE 7.96 %", "eager training")):  # fmt: skip
        _, _, geometric, mean, *_ = recorded.summary(errors[name], name)
        measured = f"GMAE {geometric} %, MAPE {mean} %"
        row("Performance model, 2022", claim, measured, f"{model}: {name}", "performance_model.py --recorded")
    return table


def main() -> None:
    """Write or check the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where the page differs")
    check = parser.parse_args().check
    text = HEAD + report().grid(words=True)
    differs = not PAGE.exists() or PAGE.read_text() != text
    if differs and not check:
        PAGE.write_text(text)
    print(f"{PAGE.name} {'differs from the results' if differs and check else 'is written'}")
    raise SystemExit(bool(check and differs))


if __name__ == "__main__":
    main()
