"""Make the Fashion-MNIST subset that the package ships, from the full set.

Usage: python tools/make_fashion_mnist_subset.py [--full DIRECTORY] [--to DIRECTORY]

The subset holds the first 1,000 training and the first 200 test images of each class, in the order of
the full set's files. The gzip headers carry no time and no name, so the files depend on the pixels only.
"""

from __future__ import annotations

import argparse
import gzip
import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hora.workloads.resnet import fashion_mnist
from hora.workloads.resnet.idx import MAGIC_IMAGES, MAGIC_LABELS


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the shipped Fashion-MNIST subset from the full set.")
    parser.add_argument("--full", type=Path, default=fashion_mnist.DEBIAN, help="where the full set is")
    parser.add_argument("--to", type=Path, default=fashion_mnist.SHIPPED, help="where the subset goes")
    arguments = parser.parse_args()
    write_subset(arguments.full, arguments.to)
    return 0


def write_subset(full: Path, to: Path) -> None:
    """Read the full set in ``full`` and write the four files of the subset into ``to``."""
    to.mkdir(parents=True, exist_ok=True)
    for split, (images, labels) in zip(
        fashion_mnist.SPLITS, fashion_mnist.load(full, subset=True), strict=True
    ):
        (to / split.images).write_bytes(_idx(MAGIC_IMAGES, images))
        (to / split.labels).write_bytes(_idx(MAGIC_LABELS, labels.astype(np.uint8)))


def _idx(magic: int, values: NDArray[np.uint8]) -> bytes:
    header = np.array([magic, *values.shape], dtype=">u4").tobytes()
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, compresslevel=9, mtime=0) as file:
        file.write(header + values.tobytes())
    return buffer.getvalue()


if __name__ == "__main__":
    raise SystemExit(main())
