"""The training task of class-conditional generation: a denoiser's loss at random steps; held out, at fixed ones."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...data.loader import EvalLoader, TrainLoader
from ...training.loop import Task
from ...training.optim import build_optimizer
from ...training.params import OptimParams
from .diffusion import Diffusion, guide, make_generator
from .params import TIMESTEPS, GenerateParams, InputSettings, SamplingParams
from .scores import Judge

Batch = tuple[Tensor, Tensor]  # uint8 pictures (B, K, H, W) or fp32 latents, and classes (B,)
# first number of a generator's key: separates these draws from those of the loaders, which have other numbers
_HELD_OUT, _SAMPLES = 2, 3
_INNER_FACTOR = 2.0  # learning-rate factor of inner weights in DiT5's release; its other rates are those of a DiT


class Generation(Task):
    """Training of a denoiser; see `repro.models.dit.Denoiser`.

    Args:
        params: with one seed, which also determines the noise of the judged samples and of the examples.
        num_classes: number of classes of the data set, which is also the label of no class.
        judge: the judge of `params.judge`, for the evaluation of the reported split; None for no judge.
        model, train, held_out, shared: see `Task`.
    """

    def __init__(
        self,
        model: nn.Module,
        train: TrainLoader,
        held_out: Mapping[str, EvalLoader],
        *,
        params: GenerateParams,
        num_classes: int,
        judge: Judge | None = None,
        **shared: Any,
    ):
        super().__init__(model, train, held_out, **shared)
        self.params, self.num_classes, self.judge = params, num_classes, judge
        self.diffusion = Diffusion.linear(self.device)

    def build_optimizer(self, params: OptimParams) -> torch.optim.Optimizer:
        """Build the optimiser; in a DiT5 that inherits weights, inner ones have `_INNER_FACTOR` times the learning rate.

        They are found by the names that `repro.models.inner_mixer` gives them. Under other names they would train at
        the common rate, without an error.
        """
        inner = {name for name, _ in self.model.named_parameters() if re.search(r"\.attn\.w\d$", name)}
        inherits = self.model.new_parameters() and self.params.init is not None
        return build_optimizer(
            self.model, params, self.batch_size, new=inner, new_factor=_INNER_FACTOR if inherits else 1.0
        )

    def loss(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Compute the `mse` of the noise at a random step of each image, and `vb` for a learned variance.

        Each class is dropped with the probability `label_dropout`.
        """
        x_start, labels = to_inputs(batch[0], self.device), batch[1].to(self.device, non_blocking=True)
        dropped = torch.rand(len(labels), device=self.device) < self.params.label_dropout
        labels = torch.where(dropped, self.num_classes, labels)
        step, noise = torch.randint(TIMESTEPS, (len(labels),), device=self.device), torch.randn_like(x_start)
        found = {name: values.mean() for name, values in self._measure(network, x_start, labels, step, noise).items()}
        # a single loss is not logged twice
        return {"loss": sum(found.values())} | (found if len(found) > 1 else {})

    def _measure(
        self, network: nn.Module, x_start: Tensor, labels: Tensor, step: Tensor, noise: Tensor
    ) -> dict[str, Tensor]:
        """Return `Diffusion.losses` of clean inputs with this noise at these steps; `network` sees x_t alone."""
        x = self.diffusion.add_noise(x_start, step, noise)
        return self.diffusion.losses(network(x, step, labels).float(), x_start, x, step, noise)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        """Compute the losses over a split with the true classes; each image always has the same step and noise.

        The reported split also has `judged_percent`, the share of samples that the judge assigns to the requested
        class, and `real_judged_percent`, the same share of the split's own images at the size of the inputs.
        """
        sums: dict[str, float] = {}
        seen, right = 0, 0
        judge = self.judge if split == self.reported_split else None
        for pictures, labels in self.held_out[split]:
            # the image's index in the split, see `EvalOrder`: its draw depends on neither batch size nor ranks
            drawn = [self._draw_fixed(self.ranks.rank + (seen + i) * self.ranks.world_size) for i in range(len(labels))]
            step = torch.tensor([one for one, _ in drawn], device=self.device)
            noise = torch.stack([one for _, one in drawn])
            x_start, labels = to_inputs(pictures, self.device), labels.to(self.device)
            for name, values in self._measure(model, x_start, labels, step, noise.to(self.device)).items():
                sums[name] = sums.get(name, 0.0) + float(values.sum())
            if judge is not None:
                right += judge.count_right(to_pictures(x_start), labels)
            seen += len(labels)
        *totals, right, seen = self.ranks.sum([*sums.values(), right, seen])
        found = {f"held_out_{name}": total / seen for name, total in zip(sums, totals, strict=True)} | {
            "held_out_images": int(seen)
        }
        if judge is not None:
            # each rank draws its share of the samples, whose classes take turns
            mine = range(self.ranks.rank, self.params.judge.samples, self.ranks.world_size)
            labels = torch.tensor([place % self.num_classes for place in mine], device=self.device)
            judged, asked = self.ranks.sum(
                [judge.count_right(self.draw(model, labels, mine), labels) if len(labels) else 0, len(labels)]
            )
            found |= {"judged_percent": 100 * judged / asked, "real_judged_percent": 100 * right / seen}
        return found

    def draw(self, model: nn.Module, labels: Tensor, places: Sequence[int]) -> Tensor:
        """Draw samples as uint8 pictures (B, 1 or 3, H, W).

        The noise depends on seed and place alone. Not for latents.
        """
        shared = {"sampling": self.params.sampling, "seed": self.params.seeds[0], "batch_size": self.batch_size}
        drawn = draw_samples(model, self.diffusion, self.params.transform, labels, places, **shared)
        return torch.cat([to_pictures(part) for part in drawn])

    def _draw_fixed(self, index: int) -> tuple[int, Tensor]:
        """Draw the step and the noise of a held-out image from its index alone."""
        generator = make_generator(_HELD_OUT, index)
        return int(torch.randint(TIMESTEPS, (), generator=generator)), torch.randn(
            self.params.transform.shape, generator=generator
        )


def draw_samples(
    model: nn.Module,
    diffusion: Diffusion,
    settings: InputSettings,
    labels: Tensor,
    places: Sequence[int],
    *,
    sampling: SamplingParams,
    seed: int,
    batch_size: int,
    progress: Any = lambda samples: None,
) -> Iterator[Tensor]:
    """Yield samples of a denoiser in eval mode in batches (B, K, H, W): pixels in [-1, 1], or latents with their scale.

    Args:
        diffusion: the chain of training; `sampling` chooses how many of its steps are taken.
        labels, places: class and number of each sample; with the seed, the number determines its noise.
        progress: called after each step with the number of samples in it.
    """
    chain = diffusion.respaced(sampling.steps)
    denoise = guide(model, model.num_classes, sampling.guidance, settings.guided_channels)
    for start in range(0, len(labels), batch_size):
        part = labels[start : start + batch_size]
        generators = [make_generator(_SAMPLES, seed, place) for place in places[start : start + batch_size]]
        how = {
            "sampler": sampling.sampler,
            "clip": settings.latents is None,
            "progress": lambda count=len(part): progress(count),
        }
        yield chain.sample(denoise, part, settings.shape, generators, **how)


def to_inputs(pictures: Tensor, device: torch.device) -> Tensor:
    """Convert uint8 pictures (B, K, H, W) to fp32 in [-1, 1] on a device; fp32 latents keep their values."""
    moved = pictures.to(device, non_blocking=True)
    return moved.float() / 127.5 - 1 if moved.dtype == torch.uint8 else moved.contiguous()


def to_pictures(x: Tensor) -> Tensor:
    """Convert values in [-1, 1] to uint8, rounded; values outside are clipped."""
    return ((x.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
