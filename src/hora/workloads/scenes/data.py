"""Both splits of the pictures that a profile names."""

from __future__ import annotations

from hora.core.errors import DataError
from hora.workloads.scenes import compose
from hora.workloads.scenes.config import DataConfig
from hora.workloads.scenes.sample import Pictures

__all__ = ["load"]


def load(config: DataConfig) -> tuple[Pictures, Pictures]:
    """Training and test pictures.

    Raises:
        DataError: they are missing or damaged, or no path was given.
        MissingExtraError: a package is missing that they are read with.
    """
    if config.kind == "scenes":
        return compose.load(config.scenes)
    from hora.workloads.scenes.coco import CocoPictures

    if config.path is None:
        raise DataError(
            "The reference profile has no pictures of its own.",
            fix="Give COCO 2017's folder with --data PATH: annotations/, train2017/ and val2017/.",
        )
    train = CocoPictures(config.path, "train2017", only_annotated=True)
    return train, CocoPictures(config.path, "val2017", only_annotated=False)
