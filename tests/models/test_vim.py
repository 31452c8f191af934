"""Vim against tensors of the official mixer, published counts, a token-by-token implementation, and timm's conventions."""

import pytest
import timm
import torch
import torch.nn.functional as F

from repro.bench.flops import cost
from repro.models.vim import VimMixer, official_state_dict
from tests.models.helpers import assert_official_part, below, nano, read_data, shaken

WIDTHS = {"tiny": 192, "small": 384, "base": 768}


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_official_mixer(backend):
    """The output and every gradient, with a state dict under the official names."""
    data = read_data("vim_mixer.npz")
    mixer = VimMixer(int(data["dim"]), depth=24)
    mixer.backend = backend
    assert_official_part(mixer, data)
    assert set(below(data, "grads/")) == {name for name, _ in mixer.named_parameters()}


@pytest.mark.parametrize(
    ("size", "params", "dense_g"),
    [("tiny", 7_148_008, "1.293"), ("small", 25_796_584, "4.851"), ("base", 97_598_440, "18.766")],
)
def test_parameters_and_macs_of_the_published_sizes(size, params, dense_g):
    """Dense multiply-adds at 224 as published, plus 4·T·E·N for the scan in each direction and block."""
    counted = cost(f"vim_{size}_patch16_224", {}, (224, 224))
    assert counted.num_params == params
    scan = 24 * 2 * 4 * 197 * 2 * WIDTHS[size] * 16
    assert f"{(counted.macs - scan) / 1e9:.3f}" == dense_g


def test_macs_at_another_resolution_by_hand():
    D, E, R, T = 192, 384, 12, 401
    per_token = 2 * E * D + 2 * (4 * E + E * (R + 32) + R * E + 4 * E * 16) + E * D
    assert cost("vim_tiny_patch16_224", {}, (320, 320)).macs == 24 * T * per_token + 400 * 768 * D + 1000 * D


def test_model_as_the_release_runs_it():
    """With (h, r) side by side: r ← r + h, y = RMSNorm(r), h ← Mixer(y); the class feature follows the last sum."""
    model = shaken(nano("vim", depth=3)).double()
    image = torch.randn(2, 3, 144, 144, dtype=torch.float64)

    def rms(x, norm):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * norm.weight

    with torch.no_grad():
        patches = F.conv2d(image, model.patch_embed.weight, model.patch_embed.bias, stride=16).flatten(2).mT
        h = torch.cat([patches[:, :40], model.cls_token.expand(2, 1, 64), patches[:, 40:]], 1) + model.pos_embed
        r = 0
        for block in model.blocks:
            r = r + h
            h = block.mixer(rms(r, block.norm))
        expected = model.head(rms(r + h, model.norm)[:, 40])
        torch.testing.assert_close(model(image), expected)


def test_official_names():
    """The names of the release's Vim-T, written out."""
    with torch.device("meta"):
        model = timm.create_model("vim_tiny_patch16_224")
    mixer = ["A_log", "A_b_log", "D", "D_b", "in_proj.weight", "out_proj.weight"]
    kinds = [f"{direction}.{kind}" for direction in ("", "_b") for kind in ("weight", "bias")]
    mixer += [f"{part}{kind}" for part in ("conv1d", "dt_proj") for kind in kinds]
    mixer += ["x_proj.weight", "x_proj_b.weight"]
    names = ["cls_token", "pos_embed", "norm_f.weight"]
    names += [f"{part}.{kind}" for part in ("patch_embed.proj", "head") for kind in ("weight", "bias")]
    names += [f"layers.{i}.{name}" for i in range(24) for name in (*(f"mixer.{x}" for x in mixer), "norm.weight")]
    renamed = official_state_dict(dict.fromkeys(names))
    assert set(renamed) == set(model.state_dict()) and len(renamed) == len(names)
    assert "unknown.weight" in official_state_dict({"unknown.weight": None})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_residual_stream_is_fp32(dtype):
    """Under autocast, and with weights of bf16."""
    model = nano("vim").to(dtype)
    image = torch.randn(1, 3, 32, 32).to(dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        tokens, grid = model.embed(image)
        after = model.blocks[0](tokens, grid)
        assert tokens.dtype == after.dtype == torch.float32
        assert model.blocks[0].mixer(model.blocks[0].norm(tokens)).dtype == torch.bfloat16
        assert model(image).isfinite().all()
