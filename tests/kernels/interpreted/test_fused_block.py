"""A block of Vittt in few launches: output and every gradient are those of the plain path, and what it is not for takes that path."""

import pytest
import timm
import torch

import repro.models  # noqa: F401
from kernels.tools import check
from repro.models import fused_block
from tests.slow import slow

NAMES = {"stream": "tokens"}


def make(seed=0, **options):
    torch.manual_seed(seed)
    model = timm.create_model(
        "vittt_nano_patch16_144", num_classes=5, **{"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": 80} | options
    )
    with torch.no_grad():
        for parameter in model.parameters():  # away from the zeros and ones of the start
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def differentiate(model, images, backend):
    model.set_backend(backend)
    out = model(images)
    return [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]


@pytest.mark.parametrize(
    "options", [{}, *[slow(options) for options in ({"num_heads": 1}, {"reading": "eta_base=0.5,positions=none"}, {"pool": "max"})]]
)
@pytest.mark.parametrize("sides", [slow((80, 80)), (48, 112)])
def test_it_is_the_plain_path(options, sides):
    """In fp32, on square and other grids whose last chunk is shorter: the two differ by rounding."""
    model, images = make(**options), torch.randn(2, 3, *sides)
    assert all(fused_block.can_fuse(block, torch.zeros(1)) for block in model.blocks) is False  # auto takes torch on a CPU
    expected, found = (differentiate(model, images, backend) for backend in ("torch", "triton"))
    assert all(fused_block.can_fuse(block, torch.zeros(1)) for block in model.blocks)
    names = ["out", *(name for name, _ in model.named_parameters())]
    errors = {name: check.relative_error(a, b, 1e-3) for name, a, b in zip(names, found, expected, strict=True)}
    assert max(errors.values()) < 2e-5, errors


@pytest.mark.parametrize(
    "options", [{"pool": "head"}, {"design": "dual"}, {"reading": "swiglu_bias=false"}, {"reading": "gate_activation=sigmoid"}]
)
def test_what_it_is_not_for(options):
    model = make(**options)
    model.set_backend("triton")
    assert not any(fused_block.can_fuse(block, torch.zeros(1)) for block in model.blocks)


def test_constants_are_made_once_for_the_same_weights():
    """And again after a step of an optimiser, for another length, and wherever gradients are wanted."""
    block = make().blocks[0]
    with torch.no_grad():
        first = fused_block.find_constants(block, 25)
        assert fused_block.find_constants(block, 25) is first
        block.norm1.weight.add_(1.0)
        second = fused_block.find_constants(block, 25)
        assert second is not first and fused_block.find_constants(block, 25) is second
    with torch.inference_mode():
        assert fused_block.find_constants(block, 25) is second
    assert fused_block.find_constants(block, 25) is not second


def test_inference_is_the_same_call_after_call():
    """With kept constants, under inference mode: the bits of the first call, and after new weights those of the new ones."""
    model, images = make().eval(), torch.randn(1, 3, 80, 80)
    model.set_backend("triton")
    with torch.inference_mode():
        first = model(images)
        assert torch.equal(model(images), first)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    changed = model(images).detach()
    with torch.inference_mode():
        assert torch.equal(model(images), changed) and not torch.equal(changed, first)


@pytest.mark.slow
def test_samples_drop_branches_as_on_the_plain_path():
    """Stochastic depth in training: the same seed drops the same."""
    model, images = make(drop_path_rate=0.5).train(), torch.randn(4, 3, 80, 80)
    results = []
    for backend in ("torch", "triton"):
        torch.manual_seed(3)
        results.append(differentiate(model, images, backend))
    errors = [check.relative_error(a, b, 1e-3) for a, b in zip(*results, strict=True)]
    assert max(errors) < 2e-5
