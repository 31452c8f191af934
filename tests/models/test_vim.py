"""Vim against tensors of the official mixer, published counts, a token-by-token implementation, and timm's conventions."""

import math
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F

from repro.bench.flops import cost
from repro.core.errors import UserError
from repro.models.vim import VimMixer, official_state_dict
from tests.models.helpers import load_official, nano, relative, shaken

OFFICIAL = Path(__file__).parents[1] / "data" / "vim_mixer.npz"
WIDTHS = {"tiny": 192, "small": 384, "base": 768}


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_official_mixer(backend):
    """The output and every gradient, with a state dict under the official names."""
    data = {key: torch.from_numpy(np.asarray(x)) for key, x in np.load(OFFICIAL).items()}
    mixer = VimMixer(int(data["dim"]), depth=24)
    mixer.load_state_dict(
        {key.removeprefix("state_dict/"): x for key, x in data.items() if key.startswith("state_dict/")}
    )
    mixer.backend = backend
    x = data["x"].requires_grad_()
    out = mixer(x)
    out.backward(data["grad_out"])
    errors = {"out": relative(out.detach(), data["out"]), "x": relative(x.grad, data["grad_x"])}
    errors |= {name: relative(p.grad, data[f"grads/{name}"]) for name, p in mixer.named_parameters()}
    assert len(errors) == 18 and max(errors.values()) < 1e-5, errors


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


def mixer_by_hand(mixer: VimMixer, x: torch.Tensor) -> torch.Tensor:
    """Sections 1.2 and 1.3 of the model's definition token by token, with the backward branch by flipping."""
    x_in, z = (x @ mixer.in_proj.weight.T).chunk(2, -1)
    total = 0
    for flip, suffix, rates in ((False, "", mixer.A_log), (True, "_b", mixer.A_b_log)):
        conv, x_proj, dt_proj = (getattr(mixer, name + suffix) for name in ("conv1d", "x_proj", "dt_proj"))
        source, gate = (t.flip(1) if flip else t for t in (x_in, z))
        h, outs = torch.zeros(len(x), *rates.shape, dtype=x.dtype), []
        for t in range(x.shape[1]):
            u = conv.bias + sum(conv.weight[:, 0, 3 - j] * source[:, t - j] for j in range(4) if t >= j)
            u = u * torch.sigmoid(u)
            low, B, C = (u @ x_proj.weight.T).split((mixer.rank, 16, 16), -1)
            step = torch.log1p(torch.exp(low @ dt_proj.weight.T + dt_proj.bias))
            h = torch.exp(-step[..., None] * torch.exp(rates)) * h + (step * u)[..., None] * B[:, None]
            y = (h * C[:, None]).sum(-1) + getattr(mixer, "D" + suffix) * u
            outs.append(y * gate[:, t] * torch.sigmoid(gate[:, t]))
        out = torch.stack(outs, 1)
        total = total + (out.flip(1) if flip else out) / 2
    return total @ mixer.out_proj.weight.T


def test_mixer_by_hand():
    torch.manual_seed(0)
    mixer = shaken(VimMixer(24, 4).double())
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(mixer(x), mixer_by_hand(mixer, x), rtol=1e-9, atol=1e-10)


def test_model_as_the_release_runs_it():
    """With (h, r) carried side by side: r ← r + h, y = RMSNorm(r), h ← Mixer(y); the class feature follows the last
    sum.
    """
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


def test_drop_path_grows_over_the_branches():
    """The rates [0] + linspace(0, p) of the release belong to the sums before the norms; the last sum is after all
    blocks.
    """
    model = nano("vim", drop_path_rate=0.3)
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for block in model.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_official_names():
    """The names of the release's Vim-T, written out."""
    with torch.device("meta"):
        model = timm.create_model("vim_tiny_patch16_224")
    mixer = ["A_log", "A_b_log", "D", "D_b", "in_proj.weight", "out_proj.weight"]
    mixer += [
        f"{part}{direction}.{kind}"
        for part in ("conv1d", "dt_proj")
        for direction in ("", "_b")
        for kind in ("weight", "bias")
    ]
    mixer += ["x_proj.weight", "x_proj_b.weight"]
    names = [
        "cls_token",
        "pos_embed",
        "patch_embed.proj.weight",
        "patch_embed.proj.bias",
        "norm_f.weight",
        "head.weight",
        "head.bias",
    ]
    names += [f"layers.{i}.{name}" for i in range(24) for name in (*(f"mixer.{x}" for x in mixer), "norm.weight")]
    renamed = official_state_dict(dict.fromkeys(names))
    assert set(renamed) == set(model.state_dict()) and len(renamed) == len(names)
    assert "unknown.weight" in official_state_dict({"unknown.weight": None})


def test_weights_in_official_names_load_strictly():
    model, other = shaken(nano("vim")), nano("vim")
    ours_to_official = {"blocks.": "layers.", "patch_embed.": "patch_embed.proj.", "norm.": "norm_f."}
    official = {}
    for key, value in model.state_dict().items():
        prefix = next((ours for ours in ours_to_official if key.startswith(ours)), "")
        official[ours_to_official.get(prefix, "") + key[len(prefix) :]] = value
    load_official(other, official)
    image = torch.randn(1, 3, 48, 64)
    with torch.no_grad():
        assert torch.equal(other(image), model(image))
    with pytest.raises(UserError, match="layers_of_another not used"):
        load_official(other, official | {"layers_of_another": torch.zeros(1)})


def test_initialisation():
    torch.manual_seed(0)
    model = timm.create_model("vim_tiny_patch16_224")
    model.requires_grad_(False)
    mixer = model.blocks[0].mixer
    torch.testing.assert_close(-mixer.A_log.exp()[5], -torch.arange(1.0, 17))
    assert torch.equal(mixer.A_log, mixer.A_b_log) and (mixer.D == 1).all() and (mixer.D_b == 1).all()
    step = F.softplus(mixer.dt_proj.bias)
    assert 1e-3 * 0.99 <= step.min() < 2e-3 and 0.05 < step.max() <= 0.1 * 1.01
    assert step.log().mean().item() == pytest.approx(math.log(1e-2), abs=0.3)  # log-uniform: half of them below 0.01
    assert not mixer.dt_proj_b.bias.any()
    assert mixer.dt_proj.weight.abs().max() <= 12**-0.5 and mixer.dt_proj.weight.std().item() == pytest.approx(
        (12 * 3) ** -0.5, rel=0.1
    )
    # kaiming_uniform(a=√5) is U(±fan_in^-½), of variance 1/(3 fan_in); then / √24
    assert mixer.out_proj.weight.std().item() == pytest.approx((3 * 384 * 24) ** -0.5, rel=0.05)
    assert mixer.in_proj.weight.std().item() == pytest.approx((3 * 192) ** -0.5, rel=0.05)
    assert (
        model.patch_embed.weight.std().item() == pytest.approx(768**-0.5, rel=0.05) and not model.patch_embed.bias.any()
    )
    for weight in (model.pos_embed, model.head.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not model.head.bias.any() and (model.norm.weight == 1).all()


def test_weight_decay():
    """Except for vectors and biases, which every family exempts, only the embeddings; A_log and A_b_log decay."""
    assert nano("vim").no_weight_decay() == {"pos_embed", "cls_token"}


def test_positions_on_another_grid():
    """The positions of the patches are resampled; the class token keeps its own, which moves to the new middle."""
    model = shaken(nano("vim"))
    with torch.no_grad():
        tokens, grid = model.embed(torch.zeros(1, 3, 80, 48))
        table = torch.cat([model.pos_embed[:, :40], model.pos_embed[:, 41:]], 1).mT.reshape(1, 64, 9, 9)
        expected = (
            F.interpolate(table, size=(5, 3), mode="bicubic", antialias=False).flatten(2).mT + model.patch_embed.bias
        )
    assert grid == (5, 3)
    torch.testing.assert_close(torch.cat([tokens[:, :7], tokens[:, 8:]], 1), expected)
    torch.testing.assert_close(tokens[:, 7], model.cls_token[:, 0] + model.pos_embed[:, 40])


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
