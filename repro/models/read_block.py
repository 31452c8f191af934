"""A block of Vittt in the alternative interpretations of the paper: each switch of `Reading` changes the default block.

Every interpretation runs on every backend. The operator's target is v − k, so v + k in place of v makes v the target.
The operator adds q to its output, so q is subtracted again if the output has no residual.

Shape suffixes: B batch, T tokens, D width, H heads, d head dimension, R directions (1 or 2).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.dispatch import compute_dtype

from .backbone import insert_tokens
from .image_model import Grid
from .reading import Reading
from .ttt_mixer import REDUCIBLE, Arguments, TTTMixer, W0Mode, name_conv1d
from .vittt_block import VitttBlock, class_positions

# switches that change neither a block's operations nor its weights' shapes; `fused_block` reads their values from the
# mixer, by `eta_base` and `scale_per_token`
_OF_VALUES = ("positions", "w0_std", "token_scale_start", "eta_base")


def choose_block(reading: Reading) -> Callable[..., VitttBlock]:
    """Return the constructor of the blocks in an interpretation."""
    return VitttBlock if reading == Reading() else functools.partial(ReadBlock, reading=reading)


class ReadMixer(TTTMixer):
    """`TTTMixer` in an alternative interpretation of the paper."""

    def __init__(self, *sizes: int, reading: Reading, **options: Any):
        self.reading = reading  # before super().__init__, which calls `build`
        super().__init__(*sizes, **options)
        self.eta_base = reading.eta_base

    def build(self, w0: W0Mode) -> None:
        """Build the layers; their order decides which random numbers of a seed each gets."""
        reading, dim, R = self.reading, self.dim, self.directions
        names = name_conv1d(self.design, reading)
        # Eq. 11 and 12 compute the gate from the output of Conv1d, Algorithm 1 from the output of the norm
        self.gate_on_conv1d = reading.gate_input == "conv1d" and bool(names)
        own_gate = self.has_gate and (self.gate_on_conv1d or reading.gate_bias)
        self.split_sizes = [dim] * (self.has_gate and not own_gate) + [R * dim] * (2 + self.separate_q)
        self.in_proj = nn.Linear(dim, sum(self.split_sizes), bias=False)
        self.gate_proj = nn.Linear(dim, dim, bias=reading.gate_bias) if own_gate else None
        self.lr_proj = nn.Linear(dim, self.num_heads * (R if reading.learning_rate == "per_direction" else 1))
        self.build_convs(names, reading.conv1d_kernel, bias=reading.conv1d_bias)
        self.build_start(w0, norms=1 if reading.inner_norm == "shared" else R)
        scales = {"per_direction": R, "shared": 1, "fixed": 0}[reading.token_scale]
        self.token_scale = nn.Parameter(torch.zeros(scales, self.built_chunk)) if scales else None
        self.post_norm = {
            "merged": lambda: nn.LayerNorm(dim, eps=self.eps),
            "per_direction": lambda: nn.ModuleList(nn.LayerNorm(dim, eps=self.eps) for _ in range(R)),
            "none": lambda: None,
        }[reading.post_norm]()
        self.out_proj = nn.Linear(dim, dim, bias=reading.out_bias)

    def reset_parameters(self) -> None:
        """Initialise this module's own parameters; convolutions keep PyTorch's default."""
        super().reset_parameters(self.reading.w0_std)

    def _read(self, arguments: Arguments) -> Tensor:
        """Return the outputs of the inner learners (B, T, R, H, d), plus the queries if the output has a residual."""
        # `_learn` adds the queries to the outputs, `_learn_plainly` does not
        if self.reading.inner_residual:
            return super()._read(arguments)
        if self.step in REDUCIBLE:
            return self._learn_plainly(arguments)
        return self._learn(arguments) - arguments.q

    def _merge(self, z_BTRD: Tensor, gate: Tensor | None) -> Tensor:
        """Sum the directions to (B, T, D), with norm and gate at the places of the interpretation."""
        gate_first = gate is not None and self.reading.post_norm_place == "after_gate"
        if gate_first:
            z_BTRD = z_BTRD * gate.unsqueeze(2)
        if self.reading.post_norm == "per_direction":
            z_BTRD = torch.stack([norm(z) for norm, z in zip(self.post_norm, z_BTRD.unbind(2), strict=True)], 2)
        z = z_BTRD.sum(2)
        if self.reading.post_norm == "merged":
            z = self.post_norm(z)
        return z if gate is None or gate_first else gate * z

    def _convolve(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve queries and keys; a single Conv1d, which is always `conv_k`, gives both."""
        q, k = super()._convolve(q, k)
        return (k if self.reading.conv1d_count == 1 and hasattr(self, "conv_k") else q), k

    def _find_gate(self, parts: list[Tensor], x_BTD: Tensor, q: Tensor, k: Tensor) -> Tensor | None:
        """Return the gate (B, T, D): from the projection, or of a layer of its own on x or on the forward keys."""
        gate = parts[0] if parts else None
        if self.gate_proj is not None:
            of_conv1d = k if hasattr(self, "conv_k") else q
            gate = self.gate_proj(of_conv1d[..., : self.dim] if self.gate_on_conv1d else x_BTD)
        if gate is None:
            return None
        return F.gelu(gate, approximate="tanh") if self.reading.gate_activation == "gelu" else torch.sigmoid(gate)

    def _arrange(self, x_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Arguments:
        """Collect the arguments of the inner learners, with positions in queries and keys and with the chosen target."""
        if self.reading.rotary == "chunk":
            shape = self.directions, self.num_heads, self.head_dim
            q, k = (rotate_in_chunks(t.unflatten(-1, shape), self.chunk_size or t.shape[1]) for t in (q, k))
        if self.reading.inner_target == "v":  # the learner subtracts k again
            v = v + k.flatten(2)
        return super()._arrange(x_BTD, q, k, v)

    def learning_rate(self, x_BTD: Tensor) -> Tensor:
        """Compute the inner rates eta_base · sigmoid(x_t · w_h + a_h) / d: (B, T, H), or (B, T, R, H) per direction."""
        rates = super().learning_rate(x_BTD)
        return rates.unflatten(-1, (-1, self.num_heads)) if self.reading.learning_rate == "per_direction" else rates

    def _start_scale(self, places: Tensor) -> Tensor:
        """Return the scale before training, 1/place or 1."""
        is_reciprocal = self.reading.token_scale_start == "reciprocal"
        return super()._start_scale(places) if is_reciprocal else torch.ones_like(places)


class ReadBlock(VitttBlock):
    """`VitttBlock` in an alternative interpretation of the paper."""

    mixer_class = ReadMixer

    def __init__(self, *sizes: int, reading: Reading, **options: Any):
        biases = {"dwconv_bias": reading.dwconv_bias, "swiglu_bias": reading.swiglu_bias}
        super().__init__(*sizes, reading=reading, **biases, **options)
        self.reading = reading
        self.is_fusible = reading == Reading(**{name: getattr(reading, name) for name in _OF_VALUES})

    def forward_plainly(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Compute the block as `VitttBlock.forward_plainly` does."""
        tokens, x = self._normalise(tokens, grid)
        tokens = (tokens if self.reading.residual == "stream" else x) + self.drop_path(self.mixer(x))
        return tokens + self.drop_path(self.mlp(self.norm2(tokens)))

    def _normalise(self, tokens: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the mixer's input; the convolution enters both, or the latter alone."""
        if self.dwconv is None:
            return tokens, self.norm1(tokens)
        if self.reading.dwconv_place == "after_norm":
            return tokens, self._convolve(self.norm1(tokens), grid)
        convolved = self._convolve(tokens, grid)
        return (convolved if self.reading.dwconv_residual else tokens), self.norm1(convolved)

    def _convolve(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Convolve the tokens on the grid, with a residual unless the interpretation leaves it out."""
        positions = class_positions(self.pool, grid[0] * grid[1])
        out = self._convolve_patches(tokens, grid, positions)
        extra = tokens[:, list(positions)]
        if positions and self.reading.dwconv_class_tokens == "one_pixel":
            extra = self.dwconv(extra.flatten(0, 1)[..., None, None]).view_as(extra)
        elif self.reading.dwconv_residual:
            extra = torch.zeros_like(extra)
        out = insert_tokens(out, extra, positions)
        return tokens + out if self.reading.dwconv_residual else out


def rotate_in_chunks(t: Tensor, chunk_size: int) -> Tensor:
    """Apply RoPE to queries or keys (B, T, R, H, d) by each token's index in its chunk, in scan order.

    Channels i and i + d/2 are turned by index · 10000^(−2i/d) radians.
    """
    T, R, d = t.shape[1], t.shape[2], t.shape[-1]
    precise = {"device": t.device, "dtype": compute_dtype(t.dtype)}
    place = torch.arange(T, **precise) % chunk_size
    frequency = 10000 ** (-torch.arange(0, d, 2, **precise) / d)
    forward = place[:, None] * frequency
    angle = torch.stack([forward, forward.flip(0)][:R], 1).unsqueeze(2)  # (T, R, 1, d/2)
    cos, sin = angle.cos().to(t.dtype), angle.sin().to(t.dtype)
    a, b = t.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def count_class_rows(reading: Reading, num_class_tokens: int) -> int:
    """Return how many rows the position embedding has besides those of the patches.

    That is one row per class token. With `patches_and_class` there is also one if the model has no class token.
    """
    if reading.positions == "none":
        return 0
    return max(num_class_tokens, int(reading.positions == "patches_and_class"))
