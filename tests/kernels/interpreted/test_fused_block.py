"""A block of Vittt in few launches: its output and gradients are the plain path's, which everything else takes."""

import pytest
import torch

from kernels import replay
from kernels.tools import check
from repro.models import fused_block
from tests.models.helpers import nano, shaken
from tests.slow import slow


def make(**options):
    options = {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": 80} | options
    return shaken(nano("vittt", **options)).train()


def differentiate(model, images, backend):
    model.set_backend(backend)
    torch.manual_seed(3)  # of the branches that are dropped
    out = model(images)
    return [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]


OTHERS = [{}, {"num_heads": 1}, {"reading": "eta_base=0.5,positions=none"}, {"pool": "max"}, {"drop_path_rate": 0.5}]


@pytest.mark.parametrize("options", [{"depth": 1}, *map(slow, OTHERS)])
@pytest.mark.parametrize("sides", [slow((80, 80)), (48, 96)])
def test_it_is_the_plain_path(options, sides):
    """In fp32, on square and other grids whose last chunk is shorter, and where the same seed drops the same branches."""
    model, images = make(**options), torch.randn(2, 3, *sides)
    # auto takes torch on a CPU
    assert not any(fused_block.find_backend(block, torch.zeros(1)) for block in model.blocks)
    expected, found = (differentiate(model, images, backend) for backend in ("torch", "triton"))
    assert all(fused_block.find_backend(block, torch.zeros(1)) for block in model.blocks)
    names = ["out", *(name for name, _ in model.named_parameters())]
    errors = {name: check.relative_error(a, b, 1e-3) for name, a, b in zip(names, found, expected, strict=True)}
    assert max(errors.values()) < 2e-5, errors


def write_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(0.9)


def step_fused(model):
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimiser.step()


def load(model):
    model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()}, assign=True)


CHANGES = {"a write to .data": write_data, "a fused optimiser": step_fused, "loading": load}
CHANGES["casting"] = lambda model: model.half().float()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_new_weights_are_used_at_once(change):
    """`_version`, by which PyTorch counts writes, does not move for some of them."""
    model, images = make().eval(), torch.randn(1, 3, 80, 80)
    model.set_backend("triton")
    with torch.no_grad():
        before = model(images)
        change(model)
        found = model(images)
        model.set_backend("torch")
        torch.testing.assert_close(found, model(images), rtol=1e-4, atol=1e-4)
    assert not torch.equal(found, before)


def test_a_frozen_model_keeps_its_constants():
    """The bits of one that is not; nothing is made again until it is trained, cast or loaded, or seen by gradients."""
    model, images = make().eval(), torch.randn(1, 3, 80, 80)
    model.set_backend("triton")
    with torch.inference_mode():
        expected = model(images)
        assert torch.equal(model.freeze()(images), expected)
        block = model.blocks[0]
        kept = fused_block.find_constants(block, 25, fused_block.Constants)
        assert kept[0] is fused_block.find_constants(block, 25, fused_block.Constants)[0]
    assert fused_block.find_constants(block, 25, fused_block.Constants)[0] is not kept[0]
    assert not any("kept" in name for name in model.state_dict())
    for change in (model.train, model.eval, model.half, lambda: model.load_state_dict(model.state_dict())):
        model.freeze()
        change()
        assert not list(block.buffers(recurse=False))


@pytest.mark.parametrize("heads", [1, 2])
def test_rows_of_the_projection_can_be_loaded_by_sixteen_bytes(heads):
    """They, and where gate, keys and values start in them, are multiples of 16 numbers."""
    block = make(num_heads=heads).blocks[0]
    assert block.mixer.dim % 16 == len(fused_block.find_constants(block, 25, fused_block.Constants).in_weight) % 16 == 0


def test_a_frozen_block_repeats_its_launches(monkeypatch):
    """For other images, sides, batches and dtypes, each as it computes them anew; another weight is seen."""
    model = make(img_size=48, depth=1).eval()
    model.set_backend("triton")
    calls = [torch.randn(batch, 3, *sides) for batch, sides in ((2, (48, 48)), (1, (32, 64)))]
    calls += [torch.randn_like(images) for images in calls]
    with torch.inference_mode():
        expected = [model(images) for images in calls]
        monkeypatch.setattr(replay, "REPLAYED", {"cpu"})
        model.freeze()
        for images, want in zip(calls, expected, strict=True):
            assert check.relative_error(model(images), want) < 1e-5
        for block in model.blocks:
            assert len(fused_block.REPLAYS[block]) == 2 and all(fused_block.REPLAYS[block].values())
        first, again = model(calls[0]), model(calls[0])
        assert torch.equal(first, again)
        with torch.autocast("cpu", torch.float16):
            assert model.blocks[0](torch.randn(1, 9, 32), (3, 3)).isfinite().all()
        assert list(fused_block.REPLAYS[model.blocks[0]].values()).count(None) == 1
    model.train().eval()
    assert not any(block in fused_block.REPLAYS for block in model.blocks)
    with torch.inference_mode():
        model.blocks[0].mixer.out_proj.weight.mul_(2)
        assert check.relative_error(model(calls[0]), expected[0]) > 1e-3
