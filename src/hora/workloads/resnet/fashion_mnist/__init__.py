"""Fashion-MNIST: where it is, and the balanced subset of it that the package ships.

H. Xiao, K. Rasul, R. Vollgraf: "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
Algorithms", arXiv:1708.07747. 60,000 training and 10,000 test photos of 28x28 grey pixels, 10 classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hora.core.errors import DataError
from hora.core.plural import plural
from hora.workloads.resnet.idx import MAGIC_IMAGES, MAGIC_LABELS, read_idx

__all__ = ["CLASSES", "DEBIAN", "MEAN", "SPLITS", "STD", "load", "source"]

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the full set."""
SHIPPED = Path(__file__).parent
MEAN, STD = 0.2860, 0.3530
"""Mean and standard deviation of the pixels, scaled to 0..1, over the 60,000 training images."""
SIDE = 28

Labelled = tuple[NDArray[np.uint8], NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class SplitFiles:
    """The two files of a split and its sizes.

    Attributes:
        full: images in the full set.
        per_class: images of each class in the subset.
    """

    images: str
    labels: str
    full: int
    per_class: int


SPLITS = (
    SplitFiles(
        images="train-images-idx3-ubyte.gz", labels="train-labels-idx1-ubyte.gz", full=60_000, per_class=1_000
    ),
    SplitFiles(
        images="t10k-images-idx3-ubyte.gz", labels="t10k-labels-idx1-ubyte.gz", full=10_000, per_class=200
    ),
)


def source(path: Path | None) -> Path:
    """The directory to read: ``path`` if given, else the Debian package's, else the shipped subset."""
    if path is not None:
        return path
    return (
        DEBIAN if all((DEBIAN / name).is_file() for s in SPLITS for name in (s.images, s.labels)) else SHIPPED
    )


def load(path: Path | None, *, subset: bool) -> tuple[Labelled, Labelled]:
    """The training and the test split, each as images (uint8, [n, 28, 28]) and labels (int64, [n]).

    Args:
        path: a directory with the four files; None looks where :func:`source` says.
        subset: take the first 1,000 (training) and 200 (test) images of each class, in file order. The
            pixels are the same whether they come from the full set or from the shipped subset. Without
            it all 70,000 images are needed.

    Raises:
        DataError: the directory or a file is missing, truncated, of the wrong shape, or has too few images.
    """
    directory = source(path)
    if not directory.is_dir():
        kind = "is a file" if directory.exists() else "does not exist"
        raise DataError(
            f"The data directory {directory} {kind}.",
            fix="Give the directory of Fashion-MNIST's four files with --data PATH, or leave --data out.",
        )
    train, test = (_split(directory, files, subset=subset) for files in SPLITS)
    return train, test


def balanced(labels: NDArray[np.int64], per_class: int) -> NDArray[np.int64]:
    """Positions, ascending, of the first ``per_class`` samples of each class."""
    first = [np.flatnonzero(labels == index)[:per_class] for index in range(len(CLASSES))]
    return np.sort(np.concatenate(first)).astype(np.int64)


def _split(directory: Path, files: SplitFiles, *, subset: bool) -> Labelled:
    images = read_idx(directory / files.images, MAGIC_IMAGES)
    labels = read_idx(directory / files.labels, MAGIC_LABELS).astype(np.int64)
    _check(directory, files, images, labels)
    if subset:
        chosen = balanced(labels, files.per_class)
        wanted = files.per_class * len(CLASSES)
        if len(chosen) < wanted:
            counts = np.bincount(labels, minlength=len(CLASSES))
            fewest = int(counts.min())
            raise DataError(
                f"{directory / files.labels} has only {fewest} {plural(fewest, 'image')} of class "
                f"{counts.argmin()} ({CLASSES[int(counts.argmin())]}); the quick profile needs "
                f"{files.per_class} of each.",
                fix="Leave --data out: the subset that is shipped has them.",
            )
        return images[chosen], labels[chosen]
    if len(labels) != files.full:
        raise DataError(
            f"{directory} has {len(labels)} of the {files.full} images of {files.images}; the full profile "
            "needs all 70,000.",
            fix="Run `apt-get install dataset-fashion-mnist`, or give their directory with --data PATH.",
        )
    return images, labels


def _check(directory: Path, files: SplitFiles, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
    if images.shape[1:] != (SIDE, SIDE):
        raise DataError(
            f"{directory / files.images} holds images of {images.shape[1]}x{images.shape[2]} pixels, "
            f"not {SIDE}x{SIDE}.",
            fix="Give the files of Fashion-MNIST (28x28) with --data PATH.",
        )
    if len(images) != len(labels):
        raise DataError(
            f"{directory} has {len(images)} {plural(len(images), 'image')} in {files.images}, "
            f"but {len(labels)} {plural(len(labels), 'label')} in {files.labels}.",
            fix="Take both files from the same release of the data set.",
        )
    if len(labels) and labels.max() >= len(CLASSES):
        raise DataError(
            f"{directory / files.labels} has the label {labels.max()}; the {len(CLASSES)} classes are "
            f"0 to {len(CLASSES) - 1}.",
            fix="Give the labels of Fashion-MNIST with --data PATH.",
        )
