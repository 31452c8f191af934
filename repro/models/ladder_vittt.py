"""Vittt with other inner learners: what paper 004 does to LaCT and ViT3, where it carries over.

Vittt's learner does not reduce to linear attention, for its LayerNorm. `plain` leaves the LayerNorm and the bias out, `dot` takes the dot
product for its loss, too; both have a parallel form (`kernels.ttt_linear.plain`). `ascent` learns up the loss, `q_is_k` reads out keys.
`import repro.models` registers the models with timm.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.dispatch import no_autocast
from kernels.ttt_linear.plain import ttt_linear_plain
from kernels.ttt_linear.reference import Arguments

from ..core.errors import did_you_mean
from .backbone import Grid, register_sizes
from .ttt_mixer import TTTMixer, conv1d_names, rate_of, ttt_linear_macs
from .vittt import EPS, Vittt

STEPS = ("own", "ascent", "q_is_k", "plain", "dot")
REDUCIBLE = ("plain", "dot")
_NORM = "backend parallel: the LayerNorm of the inner learner stands between a step and the state; use step plain or dot"


class LadderMixer(TTTMixer):
    """The TTT mixer with the inner learner of a step; see `TTTMixer` for the other arguments."""

    def __init__(self, *sizes: int, step: str, **options: Any):
        super().__init__(*sizes, **options)
        self.step = step
        if step == "q_is_k" and hasattr(self, "conv_q"):
            del self.conv_q
        if step in REDUCIBLE:
            for name in ("b0", "ln_weight", "ln_bias"):  # what nothing reads is neither learned nor saved
                unused = getattr(self, name).detach()
                delattr(self, name)
                self.register_buffer(name, unused, persistent=False)

    def selected_backend(self, dtype: torch.dtype) -> str:
        """The implementation of the learner: for `plain` and `dot` `recurrent` or `parallel`, which `auto` takes on a GPU."""
        if self.step not in REDUCIBLE:
            if self.backend == "parallel":
                raise ValueError(_NORM)
            return super().selected_backend(dtype)
        on_gpu = self.out_proj.weight.is_cuda
        return "parallel" if self.backend == "parallel" or (self.backend == "auto" and on_gpu) else "recurrent"

    def learning_rate(self, x_BTD: Tensor) -> Tensor:
        """As of `TTTMixer`; below 0 for steps up the loss."""
        rates = super().learning_rate(x_BTD)
        return -rates if self.step == "ascent" else rates

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Normalised tokens (B, T, D), T >= 1 -> (B, T, D) in their dtype (under autocast in that of the mode)."""
        if self.step not in REDUCIBLE:
            if self.backend == "parallel":
                raise ValueError(_NORM)
            return super().forward(x_BTD)
        gate, o = self._project(x_BTD)
        target = o.v.to(torch.promote_types(o.v.dtype, torch.float32)) - o.k
        options = {"loss": "mse" if self.step == "plain" else "dot", "chunk_size": o.chunk_size, "form": self.selected_backend(o.q.dtype)}
        with no_autocast(x_BTD.device.type):
            scans = [
                ttt_linear_plain(
                    *(x[:, :, r] for x in (o.q, o.k, target)), rate_of(o, r), o.token_scale[r], o.W0[r], reverse=flag, **options
                )
                for r, flag in enumerate(o.reverse)
            ]
        z = torch.stack(scans, 2)
        if self.reading.inner_residual:
            z = z + o.q
        return self.out_proj(self._merge(z.flatten(3), gate))

    def _project(self, x_BTD: Tensor) -> tuple[Tensor | None, Arguments]:
        gate, arguments = super()._project(x_BTD)
        return gate, arguments._replace(q=arguments.k) if self.step == "q_is_k" else arguments


class VitttLadder(Vittt):
    """Vittt with the inner learner of a step.

    Args:
        step: `own`, `ascent`, `q_is_k`, `plain` or `dot`.
        kwargs: see `Vittt`.

    An unknown step is a ValueError.
    """

    def __init__(self, *, step: str = "own", **kwargs: Any):
        if step not in STEPS:
            raise ValueError(f"step {step!r}: not known{did_you_mean(step, STEPS)}")
        super().__init__(**kwargs)
        self.step = step
        options = {"design": self.design, "chunk_size": self.chunk_size, "w0": self.w0, "eps": EPS, "reading": self.reading}
        tokens = self.grid_size[0] * self.grid_size[1]
        tokens += len(self.prefix_positions(tokens))
        for block in self.blocks:
            block.mixer = LadderMixer(self.embed_dim, self.num_heads, tokens, step=step, **options)

    def param_terms(self) -> dict[str, int]:
        """Named counts of parameters that add up to the model's own."""
        return super().param_terms() | ({"inner_bias_and_norm": 0} if self.step in REDUCIBLE else {})

    @property
    def num_conv1d(self) -> int:
        """Conv1d of a direction; there is none of queries that nobody reads."""
        return super().num_conv1d - (self.step == "q_is_k" and "conv_q" in conv1d_names(self.design, self.reading))

    def mac_terms(self, image_size: Grid) -> dict[str, int]:
        """Named counts of multiply-adds for one image of (H, W) pixels, of the recurrent form; see `Vittt`."""
        terms = super().mac_terms(image_size)
        if self.step not in REDUCIBLE:
            return terms
        h, w = self.grid_of(*image_size)
        T, H = h * w + len(self.prefix_positions(h * w)), self.num_heads
        d, b = self.embed_dim // H, self.chunk_size or T
        last = (T - 1) % b + 1  # its state is not moved on, and with the dot product no prediction is formed
        saved = last + (T if self.step == "dot" else 0)
        return terms | {"inner_learner": self.depth * self.directions * (ttt_linear_macs(T, H, d, b) - H * saved * d * d)}


register_sizes(
    VitttLadder,
    {
        "ladder_vittt_tiny_patch16_224": {"embed_dim": 192, "num_heads": 3},
        "ladder_vittt_small_patch16_224": {"embed_dim": 384, "num_heads": 6},
        "ladder_vittt_base_patch16_224": {"embed_dim": 768, "num_heads": 12},
        # for tests and the embedded data sets
        "ladder_vittt_nano_patch16_144": {"img_size": 144, "embed_dim": 64, "depth": 4, "num_heads": 1},
    },
)
