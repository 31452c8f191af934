"""ViT3's block against its official release, and its precision."""

import pytest
import torch

from repro.models.vit3 import InnerTraining
from tests.models.helpers import assert_official_part, below, read_data


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
