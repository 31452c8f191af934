"""Functions that the ledger of ViT³ calls: counts around a backbone and by the text, and what the text proves."""

from fractions import Fraction

import torch

from ...bench.flops import cost
from ...models.inner import MODELS, InnerLoop, learn, read_out
from ..identities import find_error
from ..recipe import PAPER_HAS
from .recipe import PRINTED

# widths of the four stages of H-ViT³, ConvNeXt, VMamba and Swin
STAGES = {
    **dict.fromkeys(("h_vit3_t", "h_vit3_s"), (64, 128, 320, 512)),
    "h_vit3_b": (96, 192, 448, 640),
    **dict.fromkeys(("convnext_t", "convnext_s", "focalnet_t", "vmamba_t", "vmamba_s"), (96, 192, 384, 768)),
    **dict.fromkeys(("convnext_b", "swin_b", "vmamba_b"), (128, 256, 512, 1024)),
}
_CLASSES = 1000


def recipe_setting(key: str) -> float:
    """A value of the recipe of Section 5.1 as this project's recipe has it: `epochs`, `optim.lr`."""
    return PRINTED.said[PAPER_HAS][key]


def upernet_params_m(row: str) -> Fraction:
    """Millions that UPerHead (512 channels, 150 classes, no auxiliary head) and four LayerNorms add to a classifier.

    The classifier's head and its norm before it, of two values per channel, are taken off.
    """
    widths, C = STAGES[row], 512

    def conv(inputs: int, outputs: int, window: int) -> int:
        """A convolution without bias, and its BatchNorm."""
        return window * inputs * outputs + 2 * outputs

    head = 4 * conv(widths[3], C, 1) + conv(widths[3] + 4 * C, C, 9)  # pyramid pooling
    head += sum(conv(width, C, 1) for width in widths[:3]) + 3 * conv(C, C, 9) + conv(4 * C, C, 9) + (C + 1) * 150
    return Fraction(head + 2 * sum(widths) - (widths[3] + 1) * _CLASSES - 2 * widths[3], 10**6)


def upernet_aux_params_m(row: str) -> Fraction:
    """The same with the auxiliary head: the third map to 256 channels, BatchNorm, and 150 classes."""
    return upernet_params_m(row) + Fraction(9 * STAGES[row][2] * 256 + 2 * 256 + 257 * 150, 10**6)


def upernet_macs_g(row: str, height: int, width: int) -> Fraction:
    """Multiply-adds (1e9) of UPerHead as fvcore counts them: 2 per value of BatchNorm, 4 of an interpolation."""
    widths, C = STAGES[row], 512
    grids = [height * width // side**2 for side in (4, 8, 16, 32)]
    pooled = 1 + 4 + 9 + 36
    macs = pooled * widths[3] * C + grids[3] * 9 * (widths[3] + 4 * C) * C
    macs += sum(grid * channels * C for grid, channels in zip(grids[:3], widths[:3], strict=True))
    macs += sum(grids[:3]) * 9 * C * C + grids[0] * 9 * 4 * C * C + grids[0] * C * 150
    normed = C * (pooled + grids[3] + 2 * sum(grids[:3]) + grids[0])
    interpolated = C * (4 * grids[3] + sum(grids[:3]) + 3 * grids[0])
    return Fraction(macs + 2 * normed + 4 * interpolated + _norms(widths, grids) - widths[3] * _CLASSES, 10**9)


def mask_rcnn_macs_g(row: str, height: int, width: int) -> Fraction:
    """Multiply-adds (1e9) of FPN, RPN and Mask R-CNN's heads for 1,000 proposals and 100 masks, as fvcore counts them.

    256 channels, 3 anchors, 80 classes; four convolutions before the masks; interpolations of the FPN are nearest, 1
    per output.
    """
    widths, C = STAGES[row], 256
    grids = [height * width // side**2 for side in (4, 8, 16, 32)]
    coarsest = -(-height // 64) * -(-width // 64)
    fpn = sum(grid * (channels + 9 * C) * C for grid, channels in zip(grids, widths, strict=True)) + sum(grids[:3]) * C
    rpn = (sum(grids) + coarsest) * (9 * C * C + C * 3 + C * 12)
    box = 1000 * (7 * 7 * C * 1024 + 1024 * 1024 + 1024 * (81 + 320))
    mask = 100 * (4 * 14 * 14 * 9 * C * C + 28 * 28 * (C * C + C * 80))
    return Fraction(fpn + rpn + box + mask + _norms(widths, grids) - widths[3] * _CLASSES, 10**9)


def vit3_params_m(width: int, heads: int) -> Fraction:
    """Millions of parameters of a ViT³ of 12 layers, of whose heads one is the convolution, as Section 5 says."""
    d = width // heads
    block = 4 * width * (width + 1) + (heads - 1) * 2 * d * d + 9 * d  # q, k, v and the projection; inner weights
    block += 10 * width + 4 * width + 8 * width**2 + 5 * width  # CPE, LayerNorms, MLP
    return Fraction(12 * block + 769 * width + 2 * width + (width + 1) * _CLASSES, 10**6)


def vmamba_s2l5(what: str) -> Fraction:
    """`params_m`, or its authors' `macs_g` at 224, of VMamba-T as first released: stages of 2, 2, 5 and 2 blocks."""
    counted = cost("vmamba_tiny_224", {"depths": (2, 2, 5, 2), "expand": 2}, (224, 224))
    return {
        "params_m": Fraction(counted.num_params, 10**6),
        "macs_g": Fraction(sum(counted.paper_terms.values()), 10**9),
    }[what]


def inner_over_outer(model: str, loss: str) -> Fraction:
    """Multiply-adds of an inner module of a head, over those of one forward pass of it; see `repro.models.inner`."""
    tokens, d = 196, 64
    loop = InnerLoop(model=model, loss=loss)
    twice = InnerLoop(model=model, loss=loss, epochs=2)
    forward = 2 * loop.count_macs(tokens, d) - twice.count_macs(tokens, d)
    return Fraction(loop.count_macs(tokens, d), forward)


def largest_value_gradient(loss: str) -> float:
    """The largest gradient of an outer loss with respect to any value v, of all inner models, in fp64.

    `smooth_l1, far` asks only for the elements of v further than 1 from their prediction.
    """
    return max(_value_gradients(loss))


def least_value_gradient(loss: str) -> float:
    """The same of the inner model that has the smallest largest gradient."""
    return min(_value_gradients(loss))


def identity_error(name: str) -> float:
    """The error of an equation of the text against our inner learner in fp64, as a share of its largest value.

    `linear_attention`: Eq. 4, q(KᵀV) by a linear layer that starts at 0, the dot product and rate N√d, which cancels
    1/N and d^-½. `rate_in_keys`: Eq. 7, √η k and √η v in place of the rate η, for a linear layer and MSE.
    """
    generator = torch.Generator().manual_seed(0)
    tokens, d = 12, 4
    q, k, v = (torch.randn(2, 2, tokens, d, generator=generator, dtype=torch.float64) for _ in range(3))
    W = torch.randn(2, d, d, generator=generator, dtype=torch.float64)
    if name == "linear_attention":
        found = learn(InnerLoop(model="fc", lr=tokens * d**0.5), [torch.zeros_like(W)], q, k, v, (3, 4))
        stated = q @ (k.mT @ v)
    elif name == "rate_in_keys":
        eta = 0.3
        found = learn(InnerLoop(model="fc", loss="mse", lr=eta), [W], q, k, v, (3, 4))
        stated = learn(InnerLoop(model="fc", loss="mse"), [W], q, eta**0.5 * k, eta**0.5 * v, (3, 4))
    else:
        raise ValueError(f"{name!r}: no identity of the text; they are linear_attention and rate_in_keys")
    return find_error(found, stated)


def _value_gradients(loss: str) -> list[float]:
    """For each inner model, with one full batch of random keys and values, the largest |∂ outer loss / ∂v|."""
    name, _, asked = loss.partition(", ")
    generator, found = torch.Generator().manual_seed(0), []
    for model in MODELS:
        loop, grid = InnerLoop(model=model, loss=name), (3, 4)
        W = [torch.randn(2, *shape, generator=generator, dtype=torch.float64) / 2 for shape in loop.shapes(4)]
        q, k, v = torch.randn(3, 2, 2, 12, 4, generator=generator, dtype=torch.float64)
        v = (3 * v).requires_grad_()
        learn(loop, W, q, k, v, grid).square().sum().backward()
        far = (read_out(loop, W, k, grid) - v).abs() > 1
        found.append((v.grad[far] if asked == "far" else v.grad).abs().max().item())
    return found


def _norms(widths: tuple[int, ...], grids: list[int]) -> int:
    """A LayerNorm on each of four maps, 5 per value."""
    return 5 * sum(grid * width for grid, width in zip(grids, widths, strict=True))
