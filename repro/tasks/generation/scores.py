"""Scores of samples: how many a classifier takes for the class they were asked to be, and the Fréchet distance of their
features.
"""

import dataclasses
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from ...core.errors import UserError
from ...core.hashing import hash_file
from ...data.classification import ToInput, eval_transform
from ...data.settings import TransformSettings
from ...models.checkpoints import open_weights
from ...models.weights import is_foreign

# NVIDIA's translation of the TensorFlow graph by which published distances are computed: inception-2015-12-05.pt
INCEPTION_SHA256 = "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4"
INCEPTION_SIDE = 299
SPATIAL_LAYER, SPATIAL_CHANNELS = "mixed_6", 7  # 7·17·17 features


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judge:
    """A classifier in eval mode, with the transform that its images need."""

    model: nn.Module
    transform: TransformSettings
    device: torch.device
    weights_hash: str

    @classmethod
    def open(cls, path: Path, classes: Sequence[str], device: torch.device) -> Self:
        """The judge of a weights file; raises UserError where it cannot be read, is no classifier, or knows other
        classes.
        """
        if is_foreign(path):
            raise UserError(
                f"{path}: not a file of this project, so it cannot judge; take the weights of a classifier that it trained"
            )
        checkpoint = open_weights(path).require_classifier()
        if checkpoint.classes != tuple(classes):
            raise UserError(
                f"{path}: cannot judge, since it was trained on other classes; train a classifier on the same data"
            )
        settings = TransformSettings.from_preprocessing(checkpoint.preprocessing)
        model = checkpoint.build().to(device).requires_grad_(False)
        return cls(model=model, transform=settings, device=device, weights_hash=checkpoint.hash)

    @torch.inference_mode()
    def count_right(self, pictures: Tensor, labels: Tensor, batch_size: int = 64) -> int:
        """How many of the uint8 pictures (N, 1 or 3, H, W) it takes for their labels (N,)."""
        resize, to_input = eval_transform(self.transform), ToInput(self.transform, self.device)
        right = 0
        for part, truth in zip(pictures.split(batch_size), labels.split(batch_size), strict=True):
            seen = torch.stack(
                [torch.as_tensor(resize(to_pil_image(picture).convert("RGB"))) for picture in part.cpu()]
            )
            right += int((self.model(to_input(seen)).argmax(1) == truth.to(self.device)).sum())
        return right


@dataclasses.dataclass
class Moments:
    """Mean and covariance of feature vectors, added up in fp64."""

    count: int = 0
    total: Tensor | float = 0.0  # (D,)
    products: Tensor | float = 0.0  # (D, D)

    def add(self, features: Tensor) -> None:
        """Add features (B, D)."""
        features = features.double().cpu()
        self.count += len(features)
        self.total = self.total + features.sum(0)
        self.products = self.products + features.mT @ features

    @property
    def mean(self) -> Tensor:
        """(D,)."""
        return self.total / self.count

    @property
    def covariance(self) -> Tensor:
        """(D, D), with count - 1."""
        return (self.products - self.count * torch.outer(self.mean, self.mean)) / (self.count - 1)


def frechet_distance(ours: Moments, theirs: Moments) -> float:
    """|m - m'|² + tr(Σ + Σ' - 2 (Σ Σ')^½) of two sets of at least two features each, in fp64.

    The trace of the root is the sum of the roots of the eigenvalues of Σ^½ Σ' Σ^½, which is symmetric.
    """
    ours_cov, theirs_cov = ours.covariance, theirs.covariance
    values, vectors = torch.linalg.eigh(ours_cov)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.mT
    middle = root @ theirs_cov @ root
    shared = torch.linalg.eigvalsh((middle + middle.mT) / 2).clamp(min=0).sqrt().sum()
    return float((ours.mean - theirs.mean).square().sum() + ours_cov.trace() + theirs_cov.trace() - 2 * shared)


class Inception:
    """Features of uint8 pictures (B, 3, H, W) by a TorchScript file: `pooled` (B, 2048) for FID, and `spatial` (B,
    2023) for sFID.

    The file is NVIDIA's inception-2015-12-05.pt, or one with its interface, whose hash is then stated. The spatial
    features are the first seven channels of the first convolution in the layer mixed_6 (Nash et al. 2021); None where
    the file has no such layer.

    Raises:
        UserError: no such file, another hash, or no TorchScript.
    """

    def __init__(self, path: Path, device: torch.device, sha256: str | None = None):
        if not path.is_file():
            raise UserError(f"{path}: no such Inception file")
        found, wanted = hash_file(path, digits=64), (sha256 or INCEPTION_SHA256).lower()
        if len(wanted) < 16 or not found.startswith(wanted):
            advice = f"take NVIDIA's inception-2015-12-05.pt, or state --inception-sha256 {found[:16]} if this is the right file"
            raise UserError(f"{path}: has SHA-256 {found[:16]}..., expected {wanted[:16]}...; {advice}")
        self.module, self.device, self.hash = load_script(path, device), device, found[:16]

    @torch.inference_mode()
    def pooled(self, pictures: Tensor) -> Tensor:
        """(B, 2048)."""
        return self.module(pictures.to(self.device), return_features=True)

    @torch.inference_mode()
    def spatial(self, pictures: Tensor) -> Tensor | None:
        """(B, 7·17·17); None for a file without the layer."""
        layers = dict(getattr(self.module, "layers", nn.Module()).named_children())
        if SPATIAL_LAYER not in layers:
            return None
        x = (_resize_as_tensorflow(pictures.to(self.device).float()) - 128) / 128
        for name, layer in layers.items():
            if name == SPATIAL_LAYER:
                return layer.conv(x)[:, :SPATIAL_CHANNELS].flatten(1)
            x = layer(x)
        return None


class Tally:
    """What a judge and an Inception file, either of which may be None, say of pictures; `moments` are of the features
    `fid` and `sfid`.
    """

    def __init__(self, judge: Judge | None, inception: Inception | None):
        self.judge, self.inception = judge, inception
        self.moments: dict[str, Moments] = {}
        self.right = self.seen = 0

    def add(self, pictures: Tensor, labels: Tensor) -> None:
        """Add uint8 pictures (B, 1 or 3, H, W) of the classes `labels` (B,)."""
        self.seen += len(labels)
        if self.judge is not None:
            self.right += self.judge.count_right(pictures, labels)
        if self.inception is not None:
            colour = pictures.expand(-1, 3, -1, -1)
            for name, features in (("fid", self.inception.pooled(colour)), ("sfid", self.inception.spatial(colour))):
                if features is not None:
                    self.moments.setdefault(name, Moments()).add(features)

    @property
    def judged_percent(self) -> float:
        """The share that the judge takes for their classes."""
        return 100 * self.right / self.seen


def compare(drawn: Tally, real: Tally | None) -> dict[str, Any]:
    """`judged_percent` of the drawn pictures, `real_judged_percent`, and `fid` and `sfid` between the two; null with a
    reason without.
    """
    found: dict[str, Any] = {}
    for name, tally in (("judged_percent", drawn), ("real_judged_percent", real)):
        known = tally is not None and tally.judge is not None
        found |= (
            {name: tally.judged_percent}
            if known
            else {name: None, f"{name}_reason": "no judge" if tally else "no real pictures"}
        )
    for name in ("fid", "sfid"):
        if real is not None and name in drawn.moments:
            found[name] = frechet_distance(drawn.moments[name], real.moments[name])
        else:
            reason = (
                "no Inception file" if drawn.inception is None else f"the Inception file has no layer {SPATIAL_LAYER}"
            )
            found |= {name: None, f"{name}_reason": reason}
    return found


def load_script(path: Path, device: torch.device) -> Any:
    """The module of a TorchScript file, in eval mode; raises UserError where it is none."""
    try:
        # scripting is deprecated, and the files remain
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            return torch.jit.load(str(path), map_location=device).eval()
    except Exception:  # whatever the bytes of another file make the reader raise
        raise UserError(f"{path}: not a readable TorchScript file; get it again") from None


def load_exported(path: Path, device: torch.device) -> Any:
    """The module of a file of torch.export; raises UserError where it is none."""
    log = logging.getLogger("torch.export")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it would write the traceback too
    try:
        return torch.export.load(path).module().to(device)
    except Exception:  # as above
        raise UserError(f"{path}: not a readable file of torch.export; get it again") from None
    finally:
        log.setLevel(level)


def _resize_as_tensorflow(pictures: Tensor) -> Tensor:
    """(B, 3, H, W) -> (B, 3, 299, 299), bilinearly, where pixel i of the result lies at i·H/299: TensorFlow 1's rule,
    without half pixels.
    """
    height, width = pictures.shape[-2:]
    places = [
        torch.arange(INCEPTION_SIDE, device=pictures.device) * (side / INCEPTION_SIDE) for side in (width, height)
    ]
    x, y = (2 * place / max(1, side - 1) - 1 for place, side in zip(places, (width, height), strict=True))
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).expand(len(pictures), -1, -1, -1)
    return F.grid_sample(pictures, grid, mode="bilinear", padding_mode="border", align_corners=True)
