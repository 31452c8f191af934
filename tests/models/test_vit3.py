"""ViT3's block against its official release, its precision, and the axes of its grid."""

import pytest
import torch

from repro.models.vit3 import InnerTraining
from tests.models.helpers import assert_official_part, below, nano, read_data


def test_block_equals_the_official_release():
    truth, block = read_data("vit3_block.npz"), InnerTraining(32, 4)
    assert_official_part(block, truth, run=lambda part, x: part(x, (5, 7)))
    assert set(below(truth, "grads/")) == {name for name, _ in block.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_inner_step_is_fp32_under_autocast(dtype):
    """Compared with fp64 on the same rounded q, k and v, only one rounding of the output remains."""
    torch.manual_seed(0)
    block = InnerTraining(32, 4)
    x = torch.randn(2, 35, 32)
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        out, rounded = block(x, (5, 7)), block.qkv(x)
    assert out.dtype == rounded.dtype == dtype
    exact = InnerTraining(32, 4).double()
    exact.load_state_dict(block.state_dict())
    learned = []
    with torch.no_grad():
        exact.qkv.forward = lambda _: rounded.double()
        exact.proj.forward = lambda tokens: learned.append(tokens)
        exact(x.double(), (5, 7))
        block.proj.forward = lambda tokens: learned.append(tokens)
        with torch.autocast("cpu", dtype=dtype):
            block(x, (5, 7))
    exact_rounded, ours = learned[0].to(dtype), learned[1]
    # the others are within an fp32 error of the midpoint of two numbers
    assert (ours == exact_rounded).float().mean() > 0.99


def test_rows_and_columns_are_told_apart():
    """If every 3x3 window and the patches are symmetric, the maps of an image and of its transpose are transposes."""
    model = nano("vit3").double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 4 and not name.endswith(("w1", "w2")):
                parameter.copy_((parameter + parameter.mT) / 2)
        image = torch.randn(1, 3, 48, 80, dtype=torch.float64)
        how = {"indices": 1, "intermediates_only": True}
        (straight,), (turned,) = (model.forward_intermediates(i, **how) for i in (image, image.mT))
    torch.testing.assert_close(straight, turned.mT)
