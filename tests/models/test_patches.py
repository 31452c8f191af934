"""Patches by one product are the convolution whose windows touch."""

import pytest
import torch
import torch.nn.functional as F

from repro.models.image_model import PatchConv
from tests.models.helpers import nano

FORMS = {
    "square": (torch.randn(2, 3, 8, 8), 4),
    "high": (torch.randn(1, 3, 12, 4), 2),
    "pixels": (torch.randn(1, 3, 2, 3), 1),
    "one channel": (torch.randn(2, 1, 8, 4), 4),
    "channels last": (torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last), 4),
    "a part": (torch.randn(2, 3, 12, 12)[:, :, 1:9, 2:10], 4),
    "no image": (torch.randn(0, 3, 8, 8), 4),
    "no batch": (torch.randn(3, 8, 4), 4),
}


@pytest.mark.parametrize(("x", "patch_size"), FORMS.values(), ids=FORMS)
def test_it_is_the_convolution(x, patch_size):
    """In fp64, with its gradients."""
    conv, x = PatchConv(x.shape[-3], 6, patch_size).double(), x.double().requires_grad_()
    leaves = [x, conv.weight, conv.bias]
    results = [conv(x), F.conv2d(x, conv.weight, conv.bias, stride=patch_size)]
    gradients = [torch.autograd.grad(out.sin().sum(), leaves) for out in results]
    for found, expected in zip(*([out, *each] for out, each in zip(results, gradients, strict=True)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["vittt", "vim"])
def test_the_first_block_gets_tokens_as_they_lie_in_memory(family):
    model = nano(family)
    tokens, grid = model.patches(torch.randn(2, 3, 32, 48))
    assert tokens.is_contiguous() and tokens.shape == (2, 6, model.embed_dim) and grid == (2, 3)


def test_autocast_chooses_the_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        assert PatchConv(3, 6, 4)(torch.randn(1, 3, 8, 8)).dtype == torch.bfloat16
