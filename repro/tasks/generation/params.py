"""Parameters of a denoiser's training. Imports nothing heavy: the stages need them for `--help`."""

import dataclasses
from typing import Any, Literal

from ...core.config import bounded
from ...training.params import TrainParams

TIMESTEPS = 1000  # diffusion steps in training


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSettings:
    """Inputs that are latents of a VAE; the defaults are those of Stable Diffusion's.

    Args:
        channels: channels of a latent.
        stride: side of the image region of one latent value, in pixels.
        scale: factor on the latents that makes their standard deviation about 1.
    """

    channels: int = bounded(4, ge=1)
    stride: int = bounded(8, ge=1)
    scale: float = bounded(0.18215, gt=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputSettings:
    """The conversion of a picture to an input of a denoiser.

    Args:
        image_size: side of the square pictures in pixels; the short side is resized to it, and the centre is cropped.
        channels: 1 for grey and 3 for colour; values in [-1, 1].
        hflip: probability of a horizontal flip; 0 where left and right differ, as for digits.
        latents: for a data set of kind `latents`; null for pixels.
    """

    image_size: int = bounded(ge=1)
    channels: int = 3
    hflip: float = bounded(0.5, ge=0, le=1)
    latents: LatentSettings | None = None

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise ValueError(f"channels: expected 1 or 3, got {self.channels}")
        if self.latents is not None and (self.image_size % self.latents.stride or self.channels != 3):
            raise ValueError(
                f"latents: need channels 3 and an image_size that is a multiple of their stride, {self.latents.stride}"
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an input; `runs.cells.describe_speed` also reads it, by this name."""
        if self.latents is None:
            return self.channels, self.image_size, self.image_size
        side = self.image_size // self.latents.stride
        return self.latents.channels, side, side

    @property
    def guided_channels(self) -> int:
        """Number of channels with guidance: all of pixels, and the first three of latents, as in DiT's release."""
        return min(3, self.shape[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of a denoiser.

    Args:
        sampler: `ddpm`, or `ddim` without noise.
        steps: number of steps, evenly spaced among the 1,000 of training.
        guidance: scale of classifier-free guidance; 1 is no guidance.
    """

    sampler: Literal["ddpm", "ddim"] = "ddpm"
    steps: int = bounded(250, ge=2, le=TIMESTEPS)
    guidance: float = bounded(1.0, ge=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeParams:
    """The classifier that judges samples at the end of a training.

    Args:
        weights: a classifier of this project of the same classes; a path from the checkout's root.
        samples: number of samples, equally many of each class.
    """

    weights: str
    samples: int = bounded(200, ge=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateParams(TrainParams):
    """A cell of `generate:`; a denoiser has no stochastic depth.

    Args:
        label_dropout: share of the training images whose class is dropped, for guidance.
        max_unreadable: training images that may be unreadable before the run stops.
        sampling: sampling of the judged samples and the examples.
        judge: a classifier that predicts the samples' classes; null for none.
    """

    drop_path: float = bounded(0.0, ge=0, le=0)
    ema_decay: float | None = bounded(0.9999, gt=0, le=1)
    label_dropout: float = bounded(0.1, ge=0, le=1)
    max_unreadable: int = bounded(0, ge=0)
    transform: InputSettings
    sampling: SamplingParams = SamplingParams()
    judge: JudgeParams | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if "in_channels" in self.options:
            raise ValueError("options: in_channels follows from transform; leave it out")

    @property
    def model_options(self) -> dict[str, Any]:
        """The arguments that build the denoiser, except for the number of classes."""
        return {**self.options, "in_channels": self.transform.shape[0]}
