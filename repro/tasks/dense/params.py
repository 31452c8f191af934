"""The parameters that detection and segmentation share. Imports nothing heavy: the stages need them for `--help`."""

import dataclasses

from ...training.params import TrainParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseParams(TrainParams):
    """What cells of `detect:` and `segment:` have in common; `drop_path` also holds for the adapter's extractors.

    Args:
        freeze_backbone: train the adapter and the heads alone.
        recompute_blocks: recompute the backbone's activations in the backward pass instead of keeping them.
    """

    freeze_backbone: bool = False
    recompute_blocks: bool = False
