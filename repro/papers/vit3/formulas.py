"""Functions that the ledger of ViT³ calls: counts of heads and models, and numerical checks of the text's equations."""

from fractions import Fraction

import torch

from ...bench.flops import cost
from ...models.inner import MODELS, InnerLoop, learn, read_out
from ..identities import choose, find_error
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
_GRID = (3, 4)  # of 12 tokens


def recipe_setting(key: str) -> float:
    """Return a value of the recipe of Section 5.1 by its key path, e.g. `epochs` or `optim.lr`."""
    return PRINTED.said[PAPER_HAS][key]


def upernet_params_m(row: str) -> Fraction:
    """Return the parameters (1e6) that UPerHead and four LayerNorms add to a classifier.

    The head has 512 channels, 150 classes and no auxiliary head. The classifier's own head and the LayerNorm before it
    (two values per channel) are subtracted.
    """
    widths, C = STAGES[row], 512

    def conv(inputs: int, outputs: int, window: int) -> int:
        """Count a convolution without bias and its BatchNorm; `window` is the number of taps."""
        return window * inputs * outputs + 2 * outputs

    head = 4 * conv(widths[3], C, 1) + conv(widths[3] + 4 * C, C, 9)  # pyramid pooling
    head += sum(conv(width, C, 1) for width in widths[:3]) + 3 * conv(C, C, 9) + conv(4 * C, C, 9) + (C + 1) * 150
    return Fraction(head + 2 * sum(widths) - (widths[3] + 1) * _CLASSES - 2 * widths[3], 10**6)


def upernet_aux_params_m(row: str) -> Fraction:
    """Return `upernet_params_m` with the auxiliary head: a 3×3 convolution of the third map to 256 channels, BatchNorm,
    and 150 classes.
    """
    return upernet_params_m(row) + Fraction(9 * STAGES[row][2] * 256 + 2 * 256 + 257 * 150, 10**6)


def upernet_macs_g(row: str, height: int, width: int) -> Fraction:
    """Return the multiply-adds (1e9) that UPerHead and four LayerNorms add to a classifier, as fvcore counts them.

    The classifier's own head is subtracted. fvcore adds 2 per value of a BatchNorm and 4 per output of a bilinear
    interpolation.
    """
    widths, C = STAGES[row], 512
    grids = [height * width // side**2 for side in (4, 8, 16, 32)]
    pooled = 1 + 4 + 9 + 36  # pyramid pooling to 1×1, 2×2, 3×3 and 6×6
    macs = pooled * widths[3] * C + grids[3] * 9 * (widths[3] + 4 * C) * C
    macs += sum(grid * channels * C for grid, channels in zip(grids[:3], widths[:3], strict=True))
    macs += sum(grids[:3]) * 9 * C * C + grids[0] * 9 * 4 * C * C + grids[0] * C * 150
    normed = C * (pooled + grids[3] + 2 * sum(grids[:3]) + grids[0])
    interpolated = C * (4 * grids[3] + sum(grids[:3]) + 3 * grids[0])
    return Fraction(macs + 2 * normed + 4 * interpolated + _norms(widths, grids) - widths[3] * _CLASSES, 10**9)


def mask_rcnn_macs_g(row: str, height: int, width: int) -> Fraction:
    """Return the multiply-adds (1e9) that Mask R-CNN and four LayerNorms add to a classifier, as fvcore counts them.

    The classifier's own head is subtracted; FPN, RPN and heads are added. The heads see 1,000 proposals and 100 masks.
    There are 256 channels, 3 anchors, 80 classes, and four convolutions before the masks. The FPN interpolates to the
    nearest neighbour, which fvcore counts as 1 per output.
    """
    widths, C = STAGES[row], 256
    grids = [height * width // side**2 for side in (4, 8, 16, 32)]
    coarsest = -(-height // 64) * -(-width // 64)  # the fifth level, of stride 64, has no convolution of the FPN
    fpn = sum(grid * (channels + 9 * C) * C for grid, channels in zip(grids, widths, strict=True)) + sum(grids[:3]) * C
    rpn = (sum(grids) + coarsest) * (9 * C * C + C * 3 + C * 12)
    # 80 classes and the background, then 4 box offsets for each class
    box = 1000 * (7 * 7 * C * 1024 + 1024 * 1024 + 1024 * (81 + 320))
    mask = 100 * (4 * 14 * 14 * 9 * C * C + 28 * 28 * (C * C + C * 80))
    return Fraction(fpn + rpn + box + mask + _norms(widths, grids) - widths[3] * _CLASSES, 10**9)


def vit3_params_m(width: int, heads: int) -> Fraction:
    """Return the parameters (1e6) of a ViT³ of 12 layers; one of its heads is the convolution, as Section 5 says."""
    d = width // heads
    block = 4 * width * (width + 1) + (heads - 1) * 2 * d * d + 9 * d  # q, k, v and the projection; inner weights
    block += 10 * width + 4 * width + 8 * width**2 + 5 * width  # CPE, LayerNorms, MLP
    return Fraction(12 * block + 769 * width + 2 * width + (width + 1) * _CLASSES, 10**6)


def vmamba_s2l5(what: str) -> Fraction:
    """Return a count of VMamba-T as first released, with stages of 2, 2, 5 and 2 blocks.

    `what` is `params_m` (1e6), or `macs_g`, the multiply-adds (1e9) at 224×224 by its authors' convention.
    """
    counted = cost("vmamba_tiny_224", {"depths": (2, 2, 5, 2), "expand": 2}, (224, 224))
    return {
        "params_m": Fraction(counted.num_params, 10**6),
        "macs_g": Fraction(sum(counted.paper_terms.values()), 10**9),
    }[what]


def inner_over_outer(model: str, loss: str) -> Fraction:
    """Return the multiply-adds of a head's inner loop, divided by those of one forward pass of its inner model.

    See `repro.models.inner`; the head has 196 tokens of width 64.
    """
    tokens, d = 196, 64
    loop = InnerLoop(model=model, loss=loss)
    # two epochs cost one more training pass, so the difference leaves the read-out: one forward pass
    twice = InnerLoop(model=model, loss=loss, epochs=2)
    forward = 2 * loop.count_macs(tokens, d) - twice.count_macs(tokens, d)
    return Fraction(loop.count_macs(tokens, d), forward)


def largest_value_gradient(loss: str) -> float:
    """Return the largest |∂ outer loss / ∂v| over all elements of v and all inner models, in fp64.

    `loss` is the inner loss. `smooth_l1, far` counts only the elements of v further than 1 from their prediction.
    """
    return max(_value_gradients(loss))


def least_value_gradient(loss: str) -> float:
    """Return the smallest, over the inner models, of the largest |∂ outer loss / ∂v|; see `largest_value_gradient`."""
    return min(_value_gradients(loss))


def identity_error(name: str) -> float:
    """Return the error of an equation of the text against our inner learner in fp64, relative to its largest value.

    `linear_attention`: Eq. 4. A linear layer that starts at 0 and learns by the dot product computes q(KᵀV). The rate
    N√d cancels the factors 1/N and d^-½ of our inner loss.
    `rate_in_keys`: Eq. 7. For a linear layer and the MSE, √η k and √η v replace the rate η.

    Raises:
        ValueError: another name.
    """
    generator = torch.Generator().manual_seed(0)
    tokens, d = 12, 4
    q, k, v = (torch.randn(2, 2, tokens, d, generator=generator, dtype=torch.float64) for _ in range(3))
    W = torch.randn(2, d, d, generator=generator, dtype=torch.float64)
    scaled, mse = InnerLoop(model="fc", lr=tokens * d**0.5), InnerLoop(model="fc", loss="mse")
    eta = 0.3
    slow = InnerLoop(model="fc", loss="mse", lr=eta)
    sides = {
        "linear_attention": (learn(scaled, [torch.zeros_like(W)], q, k, v, _GRID), q @ (k.mT @ v)),
        "rate_in_keys": (learn(slow, [W], q, k, v, _GRID), learn(mse, [W], q, eta**0.5 * k, eta**0.5 * v, _GRID)),
    }
    return find_error(*choose(sides, name, "equation of the text"))


def _value_gradients(loss: str) -> list[float]:
    """Return the largest |∂ outer loss / ∂v| of each inner model after one step on a full batch of random tokens."""
    name, _, asked = loss.partition(", ")
    generator, found = torch.Generator().manual_seed(0), []
    for model in MODELS:
        loop = InnerLoop(model=model, loss=name)
        W = [torch.randn(2, *shape, generator=generator, dtype=torch.float64) / 2 for shape in loop.shapes(4)]
        q, k, v = torch.randn(3, 2, 2, 12, 4, generator=generator, dtype=torch.float64)
        v = (3 * v).requires_grad_()
        learn(loop, W, q, k, v, _GRID).square().sum().backward()
        far = (read_out(loop, W, k, _GRID) - v).abs() > 1
        found.append((v.grad[far] if asked == "far" else v.grad).abs().max().item())
    return found


def _norms(widths: tuple[int, ...], grids: list[int]) -> int:
    """Count a LayerNorm on each of the four maps as fvcore does, 5 per value."""
    return 5 * sum(grid * width for grid, width in zip(grids, widths, strict=True))
