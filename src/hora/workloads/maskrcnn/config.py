"""What a Mask R-CNN training is made of: one frozen dataclass per component, and the profiles.

Imports no framework, so that the command line can check everything before a worker starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hora.workloads.scenes.config import DataConfig, Profile, SceneConfig, Schedule

__all__ = ["PROFILES", "R50_FPN", "SMALL", "HeadsConfig", "MaskRCNNProfile", "ModelConfig", "RPNConfig"]


@dataclass(frozen=True, kw_only=True)
class RPNConfig:
    """The region proposal network (S. Ren et al., "Faster R-CNN", arXiv:1506.01497).

    Attributes:
        sizes: of the anchors of each level, the square root of their area in pixels.
        ratios: height over width of the anchors of each cell.
        positive: overlap from which an anchor is to find an object; each object's best one is, too.
        negative: overlap below which it is to find nothing. In between it is not learned from.
        sampled: anchors learned from in a picture, half of them positive if there are so many.
        before: best proposals of each level that suppression chooses from, in training and in tests.
        after: proposals of a picture, likewise.
        suppression: overlap from which the lesser of two proposals of a level goes.
    """

    sizes: tuple[float, ...] = (32, 64, 128, 256, 512)
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    positive: float = 0.7
    negative: float = 0.3
    sampled: int = 256
    before: tuple[int, int] = (2000, 1000)
    after: tuple[int, int] = (1000, 1000)
    suppression: float = 0.7


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """What is said of each region: a class, a better box, a mask.

    Attributes:
        box_cells: along each side of the features of a region, for class and box.
        mask_cells: for the mask, which is twice as fine.
        hidden: units of the two layers before class and box.
        norm: layer normalization behind each of the two; the reference has none.
        mask_channels: of each convolution before the mask.
        sampled: regions learned from in a picture.
        positive_part: of which are positive, at most.
        positive: overlap with an object from which a region is positive.
        least_score: probability below which nothing is a detection.
        suppression: overlap from which the lesser of two detections of a class goes.
        detections: in a picture, at most.
        canonical: side in pixels of the regions whose features come from level ``canonical_level``.
        canonical_level: of the pyramid; regions half as large come from the level below.
        sampling: points along each side of a cell that its features are the mean of.
        centred: see ``scenes.regions.align``; False is the reference.
    """

    box_cells: int = 7
    mask_cells: int = 14
    hidden: int = 1024
    norm: bool = False
    mask_channels: tuple[int, ...] = (256, 256, 256, 256)
    sampled: int = 512
    positive_part: float = 0.25
    positive: float = 0.5
    least_score: float = 0.05
    suppression: float = 0.5
    detections: int = 100
    canonical: int = 224
    canonical_level: int = 4
    sampling: int = 2
    centred: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A backbone, a pyramid of features, proposals and heads.

    Attributes:
        classes: of objects; there is one output more, for nothing.
        backbone: ``resnet50``: v1.5, its normalizations, stem and first stage frozen;
            ``small``: for pictures of 128 pixels.
        widths: channels of stem and stages of the small backbone.
        channels: of every level of the pyramid.
        norm: batch normalization behind the pyramid's convolutions; the reference has none.
        first_level: of the pyramid; level k has stride 2^k.
        last_level: of the pyramid, the last stage of the backbone.
        pooled_level: one level more, for proposals only, by taking every second cell of the last.
    """

    classes: int
    backbone: Literal["resnet50", "small"]
    widths: tuple[int, ...] = ()
    channels: int = 256
    norm: bool = False
    first_level: int = 2
    last_level: int = 5
    pooled_level: bool = True
    rpn: RPNConfig = field(default_factory=RPNConfig)
    heads: HeadsConfig = field(default_factory=HeadsConfig)


R50_FPN = ModelConfig(classes=80, backbone="resnet50")
"""Mask R-CNN with ResNet-50 and a feature pyramid: 44.3 million parameters, for COCO's 80 classes."""
SMALL = ModelConfig(
    classes=10,
    backbone="small",
    widths=(24, 48, 96, 128),
    channels=48,
    norm=True,
    last_level=4,
    pooled_level=False,
    rpn=RPNConfig(sizes=(18, 32, 52), sampled=64, before=(150, 100), after=(100, 40)),
    heads=HeadsConfig(
        hidden=256,
        norm=True,
        mask_channels=(48, 48),
        # Half of the regions are positive: what is hard here is to tell shirts from coats, not from stones.
        sampled=24,
        positive_part=0.5,
        detections=20,
        canonical=32,
        canonical_level=3,
        sampling=1,
        centred=True,
    ),
)
"""For scenes of 128 pixels, whose objects are 12 to 64 pixels wide and high."""


@dataclass(frozen=True, kw_only=True)
class MaskRCNNProfile(Profile):
    """One way to train Mask R-CNN.

    Attributes:
        model: the network.
        short_side: to which pictures are scaled; 0 leaves them as they are.
        long_side: that they may not exceed then.
    """

    model: ModelConfig
    short_side: int = 0
    long_side: int = 0


PROFILES: dict[str, MaskRCNNProfile] = {
    profile.name: profile
    for profile in (
        MaskRCNNProfile(
            name="quick",
            targets={"bbox": 0.377, "segm": 0.339},
            epochs=4,
            global_batch=16,
            data=DataConfig(kind="scenes", scenes=SceneConfig(test=400)),
            model=SMALL,
            schedule=Schedule(lr=0.1, weight_decay=1e-4, warmup_steps=100, decay_at=(1.6, 2.6)),
        ),
        MaskRCNNProfile(
            name="reference",
            targets={"bbox": 0.377, "segm": 0.339},
            epochs=13,
            global_batch=16,
            data=DataConfig(kind="coco"),
            model=R50_FPN,
            # The reference's: 0.02 for 16 pictures, a tenth of it after 60,000 and 80,000 steps.
            schedule=Schedule(
                lr=0.02, weight_decay=1e-4, warmup_steps=500, decay_at=(8.19, 10.92), bias_lr=2.0
            ),
            short_side=800,
            long_side=1333,
            eval_batch=16,
            log_every=20,
        ),
    )
}
