"""What an SSD training is made of: one frozen dataclass per component, and the profiles.

Imports no framework, so that the command line can check everything before a worker starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hora.workloads.scenes.config import DataConfig, Profile, Schedule

__all__ = ["PROFILES", "SMALL", "SSD300", "ModelConfig", "SSDProfile"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A backbone, maps of decreasing size behind it, and default boxes on each map.

    Attributes:
        side: height and width of the pictures in pixels.
        classes: of objects; the network has one output more, for nothing.
        backbone: ``resnet34``: up to its stage conv4, which keeps the size of conv3; ``small``: for
            pictures of 128 pixels.
        widths: channels of the stages of the small backbone.
        outputs: channels of each map.
        inner: channels between the two convolutions that make each map from the one before.
        valid: how many of the last maps come from a 3x3 convolution without padding; the others halve.
        norm: batch normalization behind the convolutions that make the maps; the reference has none.
        maps: cells along each side of each map.
        strides: pixels from cell to cell.
        scales: of the default boxes in pixels, one more than there are maps.
        ratios: aspect ratios of each map, beside the squares.
    """

    side: int
    classes: int
    backbone: Literal["resnet34", "small"]
    widths: tuple[int, ...] = ()
    outputs: tuple[int, ...]
    inner: tuple[int, ...]
    valid: int = 0
    norm: bool = False
    maps: tuple[int, ...]
    strides: tuple[int, ...]
    scales: tuple[int, ...]
    ratios: tuple[tuple[int, ...], ...]

    @property
    def per_cell(self) -> tuple[int, ...]:
        """Default boxes in each cell of each map."""
        return tuple(2 + 2 * len(ratios) for ratios in self.ratios)


SSD300 = ModelConfig(
    side=300,
    classes=80,
    backbone="resnet34",
    outputs=(256, 512, 512, 256, 256, 256),
    inner=(256, 256, 128, 128, 128),
    valid=2,
    maps=(38, 19, 10, 5, 3, 1),
    strides=(8, 16, 32, 64, 100, 300),
    scales=(21, 45, 99, 153, 207, 261, 315),
    ratios=((2,), (2, 3), (2, 3), (2, 3), (2,), (2,)),
)
"""SSD300 with ResNet-34, as in the MLPerf reference: 8,732 default boxes, 20.0 million parameters."""
SMALL = ModelConfig(
    side=128,
    classes=10,
    backbone="small",
    widths=(24, 48, 96),
    outputs=(96, 128),
    inner=(64,),
    norm=True,
    maps=(16, 8),
    strides=(8, 16),
    # Objects measure 14 to 62 pixels, the middle half of them 27 to 41: all of it lies on the two fine maps.
    scales=(22, 38, 64),
    ratios=((2,), (2,)),
)
"""For scenes of 128 pixels, whose objects are 12 to 64 pixels wide and high: 1,280 default boxes."""


@dataclass(frozen=True, kw_only=True)
class SSDProfile(Profile):
    """One way to train SSD.

    Attributes:
        model: the network.
        negatives: default boxes without an object that are learned from, for each one with an object.
        crop: probability with which a picture is cropped at all; the reference's is 6 of 7.
        suppression: overlap from which the lesser of two detections goes.
        detections: kept in a picture, at most.
    """

    model: ModelConfig
    negatives: int = 3
    crop: float = 6 / 7
    suppression: float = 0.5
    detections: int = 200
    jitter: tuple[float, float, float, float] = field(default=(0.125, 0.5, 0.5, 0.05))


PROFILES: dict[str, SSDProfile] = {
    profile.name: profile
    for profile in (
        SSDProfile(
            name="quick",
            targets={"bbox": 0.23},
            epochs=4,
            global_batch=32,
            data=DataConfig(kind="scenes"),
            model=SMALL,
            schedule=Schedule(lr=0.04, weight_decay=5e-4, warmup_steps=100, decay_at=(1.6, 2.6)),
            # Scenes vary by themselves: crops would only show sizes that no test scene has.
            crop=0.0,
            jitter=(0.125, 0.5, 0.5, 0.0),
            detections=50,
        ),
        SSDProfile(
            name="reference",
            targets={"bbox": 0.23},
            epochs=80,
            global_batch=32,
            data=DataConfig(kind="coco"),
            model=SSD300,
            # The reference's: 2.5e-3 for 32 pictures, a tenth of it after 160,000 and 200,000 steps.
            schedule=Schedule(lr=2.5e-3, weight_decay=5e-4, warmup_steps=300, decay_at=(43.7, 54.6)),
            log_every=20,
        ),
    )
}
