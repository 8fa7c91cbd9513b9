"""Writes a generated sample in the form of Criteo's click logs, with a signal that a model can learn.

    python sample.py FOLDER --form tsv

writes FOLDER/train.tsv and FOLDER/test.tsv, `--form npy` the six files of the NumPy form. The labels depend
on hidden effects of categories and integers, so that a trained model has an AUC clearly above 0.5.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from read import DENSE, TABLES

Array = NDArray[Any]
# The number of categories of each feature, as uneven as Criteo's, but small enough for a laptop.
CATEGORIES = (
    *(1460, 580, 20_000, 15_000, 305, 24, 5200, 630, 3, 9300, 3100, 20_000, 3190),
    *(27, 4990, 20_000, 10, 2650, 1170, 4, 20_000, 18, 15, 8600, 105, 6500),
)
MISSING_INTEGERS, MISSING_CATEGORIES = 0.2, 0.05
CLICKS = -1.1  # the logit of the mean rate of clicks, about a quarter as in Criteo's sample


class Sample(NamedTuple):
    """Raw values. A missing value is False in its mask."""

    labels: Array  # [samples] int32
    integers: Array  # [samples, 13] int64
    has_integer: Array  # [samples, 13] bool
    categories: Array  # [samples, 26] uint32
    has_category: Array  # [samples, 26] bool


def generate(samples: int, seed: int, effects_seed: int = 0) -> Sample:
    """Returns random samples. Samples with one `effects_seed` follow one law, whatever their `seed` is."""
    hidden = np.random.default_rng(effects_seed)
    weights = hidden.normal(0, 0.3, DENSE)
    effects = [hidden.normal(0, 0.35, count) for count in CATEGORIES]
    names = [hidden.integers(0, 1 << 32, count, np.uint32) for count in CATEGORIES]

    random = np.random.default_rng(seed)
    integers = np.floor(random.lognormal(1.5, 1.5, (samples, DENSE))).astype(np.int64) - 1
    has_integer = random.random((samples, DENSE)) >= MISSING_INTEGERS
    has_category = random.random((samples, TABLES)) >= MISSING_CATEGORIES
    categories = np.empty((samples, TABLES), np.uint32)
    logged = np.log1p(np.maximum(integers, 0)) * has_integer
    logits = CLICKS + (logged - logged.mean(0)) @ weights
    for feature, count in enumerate(CATEGORIES):
        # Log-uniform ranks: a power law in which rank r has a share of about 1 / r.
        ranks = np.minimum(np.exp(random.random(samples) * np.log(count)), count - 1).astype(np.int64)
        categories[:, feature] = names[feature][ranks]
        logits += effects[feature][ranks] * has_category[:, feature]
    labels = random.random(samples) < 1 / (1 + np.exp(-logits))
    return Sample(labels.astype(np.int32), integers, has_integer, categories, has_category)


def write_text(sample: Sample, path: Path) -> None:
    """Writes a line a sample, with an empty field for each missing value."""
    integers = np.where(sample.has_integer, sample.integers.astype(str), "")
    categories = [[f"{value:08x}" for value in line] for line in sample.categories.tolist()]
    texts = np.where(sample.has_category, categories, "") if categories else np.empty((0, TABLES), str)
    lines = zip(sample.labels.tolist(), integers.tolist(), texts.tolist(), strict=True)
    with path.open("w", newline="\n") as file:
        file.writelines("\t".join((str(label), *first, *second)) + "\n" for label, first, second in lines)


def write_arrays(sample: Sample, prefix: Path) -> None:
    """Writes `PREFIX_dense.npy` (float32, log(1 + x)), `PREFIX_sparse.npy` and `_labels.npy` (int32)."""
    dense = np.log1p(np.maximum(sample.integers, 0) * sample.has_integer).astype(np.float32)
    sparse = (sample.categories * sample.has_category).astype(np.uint32).view(np.int32)
    for part, array in (("dense", dense), ("sparse", sparse), ("labels", sample.labels[:, None])):
        np.save(prefix.with_name(f"{prefix.name}_{part}.npy"), array)


def write(folder: Path, form: str, train: int, test: int, seed: int = 0) -> tuple[Path, Path]:
    """Writes both parts of a sample into a folder; returns the paths for `read.read`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, samples, part in (("train", train, 1), ("test", test, 2)):
        sample = generate(samples, 2 * seed + part)
        if form == "npy":
            write_arrays(sample, folder / name)
            paths.append(folder / f"{name}_dense.npy")
        else:
            write_text(sample, folder / f"{name}.tsv")
            paths.append(folder / f"{name}.tsv")
    return paths[0], paths[1]


def main() -> None:
    """Writes the sample that the command line describes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--form", choices=["tsv", "npy"], default="tsv")
    parser.add_argument("--samples", type=int, default=100_000, help="samples to train on")
    parser.add_argument("--test-samples", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for path in write(
        arguments.folder, arguments.form, arguments.samples, arguments.test_samples, arguments.seed
    ):
        print(path)


if __name__ == "__main__":
    main()
