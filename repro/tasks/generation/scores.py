"""Scores of samples: the share that a classifier assigns to the requested class, and the metrics of ADM's evaluator.

From the features of an Inception file these are Fréchet distances, Inception Score, precision and recall, as defined by
the evaluator of ADM (guided-diffusion).
"""

import dataclasses
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from ...core.errors import UserError
from ...core.hashing import hash_file
from ...data.classification import ToInput, eval_transform
from ...data.settings import TransformSettings
from ...models.checkpoints import open_own

# NVIDIA's inception-2015-12-05.pt, a translation of the TensorFlow graph behind published distances
INCEPTION_SHA256 = "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4"
INCEPTION_SIDE = 299
SPATIAL_LAYER, SPATIAL_CHANNELS = "mixed_6", 7  # 17·17·7 features
OUTPUT_LAYER = "output"
SCORE_PART = 5000  # samples that share one marginal distribution p(y)
NEIGHBOURS = 3
MOST_REAL = 10_000  # most real pictures in precision and recall
_ROWS = 512  # rows of a block of distances


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judge:
    """A classifier in eval mode, with the transform of its images."""

    model: nn.Module
    transform: TransformSettings
    device: torch.device
    weights_hash: str

    @classmethod
    def open(cls, path: Path, classes: Sequence[str], device: torch.device) -> Self:
        """Open the judge in a weights file.

        Raises:
            UserError: the file is unreadable, holds no classifier, or one of other classes.
        """
        checkpoint = open_own(path, "take a classifier that it trained as the judge").require_classifier()
        if checkpoint.classes != tuple(classes):
            raise UserError(
                f"{path}: cannot judge, since it was trained on other classes; train a classifier on the same data"
            )
        settings = TransformSettings.from_preprocessing(checkpoint.preprocessing)
        model = checkpoint.build().to(device).requires_grad_(False)
        return cls(model=model, transform=settings, device=device, weights_hash=checkpoint.hash)

    @torch.inference_mode()
    def count_right(self, pictures: Tensor, labels: Tensor, batch_size: int = 64) -> int:
        """Count the uint8 pictures (N, 1 or 3, H, W) that are classified as their labels (N,)."""
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
    """Mean and covariance of feature vectors, accumulated in fp64."""

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
        """(D, D), unbiased: divided by count - 1."""
        return (self.products - self.count * torch.outer(self.mean, self.mean)) / (self.count - 1)


class Gaussian(NamedTuple):
    """A published mean (D,) and covariance (D, D), in fp64."""

    mean: Tensor
    covariance: Tensor


def frechet_distance(ours: Moments | Gaussian, theirs: Moments | Gaussian) -> float:
    """Compute |m - m'|² + tr(Σ + Σ' - 2 (Σ Σ')^½) of two sets of at least two features each, in fp64.

    The trace of the root is computed as the sum of the roots of the eigenvalues of Σ^½ Σ' Σ^½, which is symmetric.
    """
    ours_cov, theirs_cov = ours.covariance, theirs.covariance
    values, vectors = torch.linalg.eigh(ours_cov)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.mT
    middle = root @ theirs_cov @ root
    # rounding leaves the matrix slightly asymmetric, and eigenvalues slightly negative
    shared = torch.linalg.eigvalsh((middle + middle.mT) / 2).clamp(min=0).sqrt().sum()
    return float((ours.mean - theirs.mean).square().sum() + ours_cov.trace() + theirs_cov.trace() - 2 * shared)


def inception_score(logits: Tensor) -> float:
    """Compute exp E KL(p(y|x) || p(y)) of logits (N, K) (Salimans et al. 2016), in fp64.

    As in ADM, it is the mean over consecutive parts of 5,000 samples, each with its own p(y); the last may be smaller.
    """
    scores = []
    for part in logits.split(SCORE_PART):
        p = part.double().softmax(1)
        scores.append((torch.xlogy(p, p) - torch.xlogy(p, p.mean(0))).sum(1).mean().exp())
    return float(torch.stack(scores).mean())


def precision_recall(real: Tensor, drawn: Tensor) -> tuple[float, float]:
    """Compute improved precision and recall of features (N, D) and (M, D), at least four of each.

    They are those of Kynkäänniemi et al. (2019). Precision is the share of the drawn features inside a ball around any
    real one, whose radius is the distance to that one's third neighbour. Recall swaps the roles. Distances are fp64, in
    blocks; ADM rounds squares to fp16.
    """
    real, drawn = real.double(), drawn.double()
    return _share_within(drawn, real), _share_within(real, drawn)


def _share_within(points: Tensor, centres: Tensor) -> float:
    """Compute the share of points (N, D) inside the ball of any centre (M, D)."""
    # one more neighbour, since each centre is its own nearest
    nearest = [torch.cdist(rows, centres).topk(NEIGHBOURS + 1, largest=False).values for rows in centres.split(_ROWS)]
    radii = torch.cat(nearest)[:, -1]
    inside = [(torch.cdist(rows, centres) <= radii).any(1) for rows in points.split(_ROWS)]
    return float(torch.cat(inside).double().mean())


class Inception:
    """Features of uint8 pictures (B, 3, H, W) from a TorchScript file.

    `pooled` (B, 2048) are for FID, precision and recall, `spatial` (B, 2023) for sFID, and `logits` (B, 1008) for the
    Inception Score. The file is NVIDIA's inception-2015-12-05.pt, or one with its interface whose hash is given. The
    spatial features are the first seven channels of the first convolution in the layer mixed_6 (Nash et al. 2021).

    Raises:
        UserError: the file is missing, has another hash, or is not TorchScript.
    """

    def __init__(self, path: Path, device: torch.device, sha256: str | None = None):
        if not path.is_file():
            raise UserError(f"{path}: no such Inception file")
        found, wanted = hash_file(path, digits=64), (sha256 or INCEPTION_SHA256).lower()
        if len(wanted) < 16 or not found.startswith(wanted):  # a stated hash may be cut to 16 digits
            advice = f"take NVIDIA's inception-2015-12-05.pt, or state --inception-sha256 {found[:16]} if this is the right file"
            raise UserError(f"{path}: has SHA-256 {found[:16]}..., expected {wanted[:16]}...; {advice}")
        self.module, self.device, self.hash = load_script(path, device), device, found[:16]

    @torch.inference_mode()
    def pooled(self, pictures: Tensor) -> Tensor:
        """Compute the pooled features (B, 2048)."""
        return self.module(pictures.to(self.device), return_features=True)

    @torch.inference_mode()
    def spatial(self, pictures: Tensor) -> Tensor | None:
        """Compute the spatial features (B, 17·17·7), channel last as in TensorFlow.

        Returns None for a file without the layer.
        """
        # the layers in their order, each of which takes the output of the one before
        layers = dict(getattr(self.module, "layers", nn.Module()).named_children())
        if SPATIAL_LAYER not in layers:
            return None
        x = (_resize_as_tensorflow(pictures.to(self.device).float()) - 128) / 128
        for name, layer in layers.items():
            if name == SPATIAL_LAYER:
                break
            x = layer(x)
        return layers[SPATIAL_LAYER].conv(x)[:, :SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1)

    @torch.inference_mode()
    def logits(self, pooled: Tensor) -> Tensor | None:
        """Compute logits (B, 1008) from pooled features (B, 2048); None for a file without the last layer.

        As in ADM, the layer's bias is left out.
        """
        weight = getattr(getattr(self.module, OUTPUT_LAYER, None), "weight", None)
        if not isinstance(weight, Tensor) or weight.shape[1:] != pooled.shape[1:]:
            return None
        return pooled @ weight.mT.to(pooled)


class Tally:
    """Accumulated results of a judge and an Inception file on pictures; either of the two may be None.

    `moments` are those of the features `fid` and `sfid`; `pooled` has the features for `fid`, fp32 on the CPU.
    """

    def __init__(self, judge: Judge | None, inception: Inception | None):
        self.judge, self.inception = judge, inception
        self.moments: dict[str, Moments | Gaussian] = {}
        self.pooled: list[Tensor] = []
        self.right = self.seen = 0

    def add(self, pictures: Tensor, labels: Tensor) -> None:
        """Add uint8 pictures (B, 1 or 3, H, W) of the classes `labels` (B,)."""
        self.seen += len(labels)
        if self.judge is not None:
            self.right += self.judge.count_right(pictures, labels)
        if self.inception is not None:
            colour = pictures.expand(-1, 3, -1, -1)
            pooled = self.inception.pooled(colour)
            self.pooled.append(pooled.float().cpu())
            for name, features in (("fid", pooled), ("sfid", self.inception.spatial(colour))):
                if features is not None:
                    self.moments.setdefault(name, Moments()).add(features)

    @property
    def judged_percent(self) -> float:
        """Percentage of the pictures that the judge classifies as their class."""
        return 100 * self.right / self.seen


def compare_tallies(drawn: Tally, real: Tally | None) -> dict[str, Any]:
    """Compute the scores of drawn pictures, and those that compare them with real ones, for a record of `generate`.

    Returns:
        `judged_percent` and `inception_score` of the drawn pictures, `real_judged_percent` of the real ones, and
        between the two `fid`, `sfid`, and the shares `precision` and `recall`, which use at most 10,000 evenly spaced
        real pictures. A score that cannot be computed is None, with the reason in `<name>_reason`.
    """
    # each is the reason why some scores cannot be computed, or None
    no_judge = None if drawn.judge else "no judge"
    no_real = None if real else "no real pictures"
    no_file = None if drawn.inception else "no Inception file"
    features = torch.cat(drawn.pooled) if drawn.pooled else torch.empty(0, 0)
    logits = drawn.inception.logits(features) if drawn.inception else None
    unjudged = no_real or no_judge or (None if real.judge else "the real pictures have no classes")
    no_pair = no_file or no_real
    # a published Gaussian is of a whole data set, however few pictures come with it
    counts = [tally.seen for tally in (drawn, real) if not no_pair and isinstance(tally.moments["fid"], Moments)]
    single = no_pair or (None if min(counts) > 1 else "needs 2 pictures of each")
    few = no_pair or (None if min(drawn.seen, real.seen) > NEIGHBOURS else f"needs {NEIGHBOURS + 1} pictures of each")
    reasons = {
        "judged_percent": no_judge,
        "real_judged_percent": unjudged,
        "fid": single,
        "sfid": single or (None if "sfid" in drawn.moments else f"the Inception file has no layer {SPATIAL_LAYER}"),
        "inception_score": no_file
        or (None if logits is not None else f"the Inception file has no linear layer {OUTPUT_LAYER}"),
        "precision": few,
        "recall": few,
    }
    found: dict[str, Any] = {}
    if no_judge is None:
        found["judged_percent"] = drawn.judged_percent
    if unjudged is None:
        found["real_judged_percent"] = real.judged_percent
    for name in ("fid", "sfid"):
        if reasons[name] is None:
            found[name] = frechet_distance(drawn.moments[name], real.moments[name])
    if logits is not None:
        found["inception_score"] = inception_score(logits)
    if few is None:
        known = torch.cat(real.pooled)
        kept = torch.arange(min(len(known), MOST_REAL)) * len(known) // min(len(known), MOST_REAL)
        found["precision"], found["recall"] = precision_recall(known[kept], features)
    for name, reason in reasons.items():
        if reason is not None:
            found |= {name: None, f"{name}_reason": reason}
    return found


def load_script(path: Path, device: torch.device) -> Any:
    """Load an Inception or a VAE's decoder from a TorchScript file, in eval mode; raises UserError for another file."""
    try:
        # TorchScript is deprecated, but the published files use it
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            return torch.jit.load(str(path), map_location=device).eval()
    except Exception:  # damaged bytes may raise anything
        raise UserError(f"{path}: not a readable TorchScript file; get it again") from None


def load_exported(path: Path, device: torch.device) -> Any:
    """Load a VAE's decoder from a torch.export file; raises UserError for another file."""
    log = logging.getLogger("torch.export")
    level = log.level
    log.setLevel(logging.CRITICAL)  # else it also logs the traceback
    try:
        return torch.export.load(path).module().to(device)
    except Exception:  # as above
        raise UserError(f"{path}: not a readable file of torch.export; get it again") from None
    finally:
        log.setLevel(level)


def _resize_as_tensorflow(pictures: Tensor) -> Tensor:
    """Resize (B, 3, H, W) bilinearly to (B, 3, 299, 299) by TensorFlow 1's rule: output pixel i samples i·H/299."""
    height, width = pictures.shape[-2:]
    places = [
        torch.arange(INCEPTION_SIDE, device=pictures.device) * (side / INCEPTION_SIDE) for side in (width, height)
    ]
    # with align_corners=True, -1 and 1 are the centres of the first and the last pixel
    x, y = (2 * place / max(1, side - 1) - 1 for place, side in zip(places, (width, height), strict=True))
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).expand(len(pictures), -1, -1, -1)
    return F.grid_sample(pictures, grid, mode="bilinear", padding_mode="border", align_corners=True)
