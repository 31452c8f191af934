"""Gaussian diffusion with a linear schedule: a denoiser's loss, and sampling by DDPM or DDIM with guidance.

A clean input x_0 becomes x_t = √ᾱ_t x_0 + √(1 - ᾱ_t) ε, where ᾱ_t = Π_{s≤t} (1 - β_s), and ε is standard normal noise
that the denoiser predicts (Ho et al. 2020). With twice the channels it also interpolates, in log space, between the two
bounds of the variance of the reverse step (Nichol and Dhariwal 2021). Tables are fp64; their values are cast to the
dtype of a batch.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .params import TIMESTEPS

BETAS = (1e-4, 0.02)  # β of the first and the last step
LEVEL = 1 / 127.5  # distance of two neighbouring 8-bit grey levels in [-1, 1]
# inputs (B, K, H, W), timesteps (B,), labels (B,) -> (B, K or 2K, H, W)
Denoise = Callable[[Tensor, Tensor, Tensor], Tensor]


class Reverse(NamedTuple):
    """The distribution of x_{t-1} given x_t and the denoiser's output, and the predicted x_0; all (B, K, H, W)."""

    mean: Tensor
    log_variance: Tensor
    x_start: Tensor


class Diffusion:
    """A chain of n steps.

    Args:
        betas: (n,) fp64, on the device of the inputs.
        timesteps: (n,) int64, the denoiser's timestep for each step; on the same device.
    """

    def __init__(self, betas: Tensor, timesteps: Tensor):
        self.betas, self.timesteps = betas, timesteps
        self.alphas_bar = torch.cumprod(1 - betas, dim=0)
        self.alphas_bar_before = F.pad(self.alphas_bar[:-1], (1, 0), value=1.0)
        rest = 1 - self.alphas_bar
        # q(x_{t-1} | x_t, x_0) has the mean of_start · x_0 + of_x · x_t; its variance is 0 at the first step
        self._of_start = betas * self.alphas_bar_before.sqrt() / rest
        self._of_x = (1 - self.alphas_bar_before) * (1 - betas).sqrt() / rest
        variance = betas * (1 - self.alphas_bar_before) / rest
        # the second step's variance replaces that 0, which has no logarithm
        self._least_log_variance = torch.cat((variance[1:2], variance[1:])).log()
        # variance where the denoiser predicts none: β, and at the first step the same as the lower bound
        self._fixed_log_variance = torch.cat((variance[1:2], betas[1:])).log()

    @classmethod
    def linear(cls, device: torch.device | str = "cpu") -> Self:
        """Make the chain of training: 1,000 steps whose β rises linearly from 1e-4 to 0.02."""
        return cls(
            torch.linspace(*BETAS, TIMESTEPS, dtype=torch.float64, device=device),
            torch.arange(TIMESTEPS, device=device),
        )

    def respaced(self, steps: int) -> Self:
        """Make a chain of fewer steps with the same ᾱ: step i is step round(i·(n - 1) / (steps - 1)) of this one.

        Raises:
            ValueError: fewer than 2 steps or more than n.
        """
        n = len(self.betas)
        if not 2 <= steps <= n:
            raise ValueError(f"{steps} steps: expected 2 to {n}, the steps of the training")
        kept = torch.tensor([round(i * (n - 1) / (steps - 1)) for i in range(steps)], device=self.betas.device)
        alphas_bar = self.alphas_bar[kept]
        # β follows from two neighbouring ᾱ, and the denoiser still gets its timesteps of the training
        return type(self)(1 - alphas_bar / F.pad(alphas_bar[:-1], (1, 0), value=1.0), self.timesteps[kept])

    def _at(self, table: Tensor, step: Tensor, like: Tensor) -> Tensor:
        """Look up a table (n,) at the steps (B,), in the dtype of `like` (B, ...), to whose shape it broadcasts."""
        return table[step].to(like.dtype).view(-1, *[1] * (like.ndim - 1))

    def add_noise(self, x_start: Tensor, step: Tensor, noise: Tensor) -> Tensor:
        """Compute x_t from clean inputs (B, K, H, W), steps (B,) and noise."""
        signal, rest = self.alphas_bar.sqrt(), (1 - self.alphas_bar).sqrt()
        return self._at(signal, step, x_start) * x_start + self._at(rest, step, x_start) * noise

    def reverse(self, output: Tensor, x: Tensor, step: Tensor, *, clip: bool = False) -> Reverse:
        """Compute the reverse step from x = x_t (B, K, H, W), given the denoiser's output (B, K or 2K, H, W).

        `clip` clamps the predicted x_0 to [-1, 1].
        """
        noise, range_values = (output, None) if output.shape[1] == x.shape[1] else output.chunk(2, dim=1)
        alpha_bar = self.alphas_bar
        x_start = self._at((1 / alpha_bar).sqrt(), step, x) * x - self._at((1 / alpha_bar - 1).sqrt(), step, x) * noise
        if clip:
            x_start = x_start.clamp(-1, 1)
        if range_values is None:
            log_variance = self._at(self._fixed_log_variance, step, x).expand_as(x)
        else:
            share = (range_values + 1) / 2  # an output of -1 is the lower bound, and 1 the upper one
            least, most = self._at(self._least_log_variance, step, x), self._at(self.betas.log(), step, x)
            log_variance = share * most + (1 - share) * least
        return Reverse(self._posterior_mean(x_start, x, step), log_variance, x_start)

    def _posterior_mean(self, x_start: Tensor, x: Tensor, step: Tensor) -> Tensor:
        """Compute the mean of q(x_{t-1} | x_t, x_0)."""
        return self._at(self._of_start, step, x) * x_start + self._at(self._of_x, step, x) * x

    def losses(self, output: Tensor, x_start: Tensor, x: Tensor, step: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """Compute `mse` (B,) of the predicted noise, and with a learned variance `vb` (B,) in bits per value.

        `vb` is the term of the variational bound. It trains only the variance: the predicted noise in it is detached.
        Both are means over the values of each image.
        """
        predicted = output[:, : x.shape[1]]
        found = {"mse": (predicted - noise).square().flatten(1).mean(1)}
        if output.shape[1] > x.shape[1]:
            frozen = torch.cat((predicted.detach(), output[:, x.shape[1] :]), dim=1)
            found["vb"] = self._bound(frozen, x_start, x, step)
        return found

    def _bound(self, output: Tensor, x_start: Tensor, x: Tensor, step: Tensor) -> Tensor:
        """Compute a term of the variational bound (B,), in bits per value.

        It is KL(q(x_{t-1} | x_t, x_0) || p(x_{t-1} | x_t)), and -log p(x_0 | x_1) of 8-bit values at the first step.
        """
        mean, log_variance, _ = self.reverse(output, x, step)
        true_mean = self._posterior_mean(x_start, x, step)
        true_log_variance = self._at(self._least_log_variance, step, x)
        difference = (true_mean - mean).square() * torch.exp(-log_variance)
        divergence = 0.5 * (
            log_variance - true_log_variance - 1 + torch.exp(true_log_variance - log_variance) + difference
        )
        surprise = -_log_likelihood(x_start, mean, 0.5 * log_variance)
        return torch.where(step == 0, surprise.flatten(1).mean(1), divergence.flatten(1).mean(1)) / math.log(2)

    @torch.no_grad()
    def sample(
        self,
        denoise: Denoise,
        labels: Tensor,
        shape: Sequence[int],
        generators: Sequence[torch.Generator],
        *,
        sampler: Literal["ddpm", "ddim"] = "ddpm",
        clip: bool = False,
        progress: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Draw samples (B, *shape) of the classes `labels` (B,), from pure noise through all steps of this chain.

        Args:
            denoise: predicts the noise, with guidance if so wanted; see `guide`.
            generators: one CPU generator for the noise of each sample, which makes a sample independent of the batch
                and of the device.
            sampler: `ddpm` draws from the reverse distribution, `ddim` (η = 0) adds no noise.
            clip: clamp the predicted x_0 to [-1, 1], for pixels; latents are not bounded.
            progress: called after each step.
        """

        def draw() -> Tensor:
            """Draw standard normal noise (B, *shape), each sample's from its own generator."""
            drawn = torch.stack([torch.randn(*shape, generator=generator) for generator in generators])
            return drawn.to(labels.device)

        x = draw()
        for number in range(len(self.betas) - 1, -1, -1):
            step = torch.full((len(labels),), number, device=labels.device)
            output = denoise(x, self.timesteps[step], labels).float()
            found = self.reverse(output, x, step, clip=clip)
            if sampler == "ddim":
                x = self.ddim_step(found, x, step)
            else:
                x = found.mean + (0.5 * found.log_variance).exp() * draw() if number else found.mean
            progress()
        return x

    def ddim_step(self, found: Reverse, x: Tensor, step: Tensor) -> Tensor:
        """Compute x_{t-1} = √ᾱ_{t-1} x_0 + √(1 - ᾱ_{t-1}) ε, where ε leads from the predicted x_0 to x_t.

        This is DDIM with η = 0 (Song et al. 2020).
        """
        alpha_bar, before = (self._at(table, step, x) for table in (self.alphas_bar, self.alphas_bar_before))
        noise = (x - alpha_bar.sqrt() * found.x_start) / (1 - alpha_bar).sqrt()
        return before.sqrt() * found.x_start + (1 - before).sqrt() * noise


def guide(model: Denoise, null: int, scale: float, channels: int) -> Denoise:
    """Apply classifier-free guidance to the first `channels`: ε = ε_null + scale · (ε_class - ε_null).

    Other channels are ε_class: DiT guides three of a latent's four channels, and neither the fourth nor the variances.
    A scale of 1 is no guidance, and runs the model once instead of twice; 0 ignores the class.
    """

    def denoise(x: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        """Run the model once on the batch and its copy without classes; at a scale of 1, on the batch alone."""
        if scale == 1:
            return model(x, timesteps, labels)
        both = torch.cat((labels, torch.full_like(labels, null)))
        with_class, without = model(x.repeat(2, 1, 1, 1), timesteps.repeat(2), both).chunk(2)
        guided = without[:, :channels] + scale * (with_class[:, :channels] - without[:, :channels])
        return torch.cat((guided, with_class[:, channels:]), dim=1)

    return denoise


def make_generator(*key: int) -> torch.Generator:
    """Make a CPU generator whose numbers are a function of all numbers of the key, none of them negative."""
    # 63 bits: the seeds of all results so far are made so
    return torch.Generator().manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 1)


def _log_likelihood(x: Tensor, mean: Tensor, log_deviation: Tensor) -> Tensor:
    """Compute log P of 8-bit values in [-1, 1]: the normal's mass within half a level of each.

    The first and the last level also get the mass beyond them.
    """
    centred, inverse = x - mean, torch.exp(-log_deviation)
    above, below = (_cumulate(inverse * (centred + sign * LEVEL / 2)) for sign in (1, -1))
    # -0.999 and 0.999 tell the first and the last level from their neighbours, which are 1 / 127.5 away
    mass = torch.where(x < -0.999, above, torch.where(x > 0.999, 1 - below, above - below))
    return mass.clamp(min=1e-12).log()


def _cumulate(x: Tensor) -> Tensor:
    """Approximate the standard normal's distribution function with tanh, as the releases do."""
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
