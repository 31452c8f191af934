"""Reference batches for published scores of generated pictures: statistics of a whole data set, and some pictures."""

import dataclasses
from pathlib import Path
from typing import Self

import numpy as np
import torch

from ...core.errors import UserError
from ...core.hashing import hash_file
from .scores import Gaussian, Inception, Tally

# SHA-256 -> file of guided-diffusion's release; several projects that use it state the same hash
KNOWN = {"b32732719497e42660a9affb4a966068cba0855ac449b82015e34ec376d20758": "VIRTUAL_imagenet256_labeled.npz"}
SUFFIX = ".npz"
_PICTURES = "arr_0"
# features -> keys of their mean (D,) and covariance (D, D); as in ADM, spatial features are ordered (h, w, channel)
STATISTICS = {"fid": ("mu", "sigma"), "sfid": ("mu_s", "sigma_s")}
_BATCH = 64  # pictures per batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceBatch:
    """A file in the layout of ADM's reference batches.

    Args:
        path: the file.
        statistics: of the features `fid` and `sfid` over the whole data set.
        hash: first 16 digits of the file's SHA-256.
        known: the name of the published file with this hash; None for any other.
    """

    path: Path
    statistics: dict[str, Gaussian]
    hash: str
    known: str | None

    @classmethod
    def open(cls, path: Path, side: int) -> Self:
        """Open a batch, whose pictures are `arr_0`, uint8 (N, side, side, 3).

        Raises:
            UserError: the file is missing, damaged, or has the name but not the hash of a published batch; or a key is
                missing, or an array has another shape or type.
        """
        if not path.is_file():
            raise UserError(f"{path}: no such reference batch")
        found = hash_file(path, digits=64)
        # only a file with the name of a published batch must have its hash
        if wanted := next((sha256 for sha256, name in KNOWN.items() if name == path.name and sha256 != found), None):
            advice = "get it again, or give another batch another name"
            raise UserError(f"{path}: has SHA-256 {found[:16]}..., expected {wanted[:16]}...; {advice}")
        keys = (*(key for pair in STATISTICS.values() for key in pair), _PICTURES)
        try:
            with np.load(path) as file:
                arrays = {key: file[key] for key in keys if key in file.files}
        except Exception:  # the reader raises all sorts of errors on damaged bytes
            raise UserError(f"{path}: not a readable {SUFFIX} file; get it again") from None
        if missing := [key for key in keys if key not in arrays]:
            raise UserError(f"{path}: has no {missing[0]}; a reference batch has {', '.join(keys)}")
        for mean, covariance in STATISTICS.values():
            width = arrays[mean].size
            _require(path, mean, arrays[mean], (width,), np.floating)
            _require(path, covariance, arrays[covariance], (width, width), np.floating)
        _require(path, _PICTURES, arrays[_PICTURES], (*arrays[_PICTURES].shape[:1], side, side, 3), np.uint8)
        statistics = {
            name: Gaussian(*(torch.from_numpy(arrays[key]).double() for key in pair))
            for name, pair in STATISTICS.items()
        }
        return cls(path=path, statistics=statistics, hash=found[:16], known=KNOWN.get(found))

    def read(self, inception: Inception) -> Tally:
        """Compute an Inception file's outputs for the pictures, with the statistics of the whole data set.

        Raises:
            UserError: the file's features have another width than the statistics.
        """
        tally = Tally(None, inception)  # no judge: the pictures have no classes, so their labels below are made up
        with np.load(self.path) as file:
            pictures = torch.from_numpy(file[_PICTURES])
        for part in pictures.split(_BATCH):
            tally.add(part.permute(0, 3, 1, 2), torch.zeros(len(part)))
        for name, moments in tally.moments.items():
            if len(moments.mean) != len(self.statistics[name].mean):
                widths = f"{len(self.statistics[name].mean)}, and the Inception file gives {len(moments.mean)} features"
                raise UserError(
                    f"{self.path}: {STATISTICS[name][0]} has length {widths}; take those that belong together"
                )
            tally.moments[name] = self.statistics[name]
        return tally


def _require(path: Path, key: str, array: np.ndarray, shape: tuple[int, ...], kind: type) -> None:
    """Raise UserError about an array that is empty, has another shape or type, or holds values that are not finite."""
    if array.shape != shape or not array.size:
        raise UserError(f"{path}: {key} has shape {array.shape}, expected {shape}; take another batch")
    # only floats: a check of the pictures would need as much memory again
    if not np.issubdtype(array.dtype, kind) or (kind is np.floating and not np.isfinite(array).all()):
        raise UserError(
            f"{path}: {key} has values of {array.dtype}, expected finite ones of {kind.__name__}; get it again"
        )
