"""VRWKV against tensors and sizes of the official release, its equations token by token, and timm's conventions."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F

from kernels.bi_wkv.reference import bi_wkv_formula
from repro.bench.counter import counted_macs
from repro.models.vrwkv import VRWKV, q_shift
from tests.models.helpers import below, count, load_official, nano, read_data, relative, shaken

OWN_WKV_MACS, PAPER_WKV_MACS = 6, 29  # per token and channel: in the operator's formula, and in the paper's script


@pytest.mark.parametrize(
    ("size", "params", "backbone", "macs_g"),
    [
        ("tiny", 6_155_176, 5_962_176, 1.169),
        ("small", 23_820_136, 23_435_136, 4.593),
        ("base", 93_645_544, 92_876_544, 18.203),
    ],
)
def test_sizes(size, params, backbone, macs_g):
    """Parameters exactly; multiply-adds with the paper's constant in place of the operator's own count."""
    with torch.device("meta"):
        model = timm.create_model(f"vrwkv_{size}_patch16_224")
    assert count(model) == params and params - count(model.head) == backbone
    C = model.embed_dim
    blocks = [count(block) for block in model.blocks]
    assert blocks[1:] == [13 * C * C + 11 * C + 2 * C * (size != "tiny")] * 11 and blocks[0] == blocks[1] + 2 * C
    ours = counted_macs(model, (224, 224))
    matrices = 12 * 13 * C * C * 196 + 196 * 768 * C + 1000 * C
    assert ours == matrices + 12 * OWN_WKV_MACS * 196 * C
    assert round((matrices + 12 * PAPER_WKV_MACS * 196 * C) / 1e9, 3) == macs_g


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_official_feature_map(backend):
    data = read_data("vrwkv_model.npz")
    model = VRWKV(img_size=64, embed_dim=48, depth=3, num_classes=0).eval()
    load_official(model, below(data, "state_dict/"))
    model.set_backend(backend)
    with torch.no_grad():
        _, (feature_map,) = model.forward_intermediates(data["x"], indices=1, norm=True)
    assert relative(feature_map, data["feature_map"]) < 2e-6


@pytest.mark.parametrize("C", [8, 10])
def test_q_shift_by_hand(C):
    h, w = 3, 4
    x = torch.randn(2, h * w, C)
    out = q_shift(x, (h, w))
    for c in range(C):
        steps = [(0, -1), (0, 1), (-1, 0), (1, 0)]
        down, across = next(step for j, step in enumerate(steps) if c < int(C * (j + 1) / 4))
        for row in range(h):
            for column in range(w):
                a, b = row + down, column + across
                expected = x[:, a * w + b, c] if 0 <= a < h and 0 <= b < w else torch.zeros(2)
                assert torch.equal(out[:, row * w + column, c], expected)


def spatial_by_hand(att, x, grid):
    """The mixer's equations around the reference of Bi-WKV; it shares only Q-Shift with the model."""
    shifted = q_shift(x, grid)
    k, v, r = (m * x + (1 - m) * shifted for m in (att.spatial_mix_k, att.spatial_mix_v, att.spatial_mix_r))
    r, k, v = r @ att.receptance.weight.T, k @ att.key.weight.T, v @ att.value.weight.T
    wkv = bi_wkv_formula(att.spatial_decay / x.shape[1], att.spatial_first / x.shape[1], k, v)
    return (torch.sigmoid(r) * wkv) @ att.output.weight.T


def channel_by_hand(ffn, x, grid):
    mixed_k, mixed_r = (m * x + (1 - m) * q_shift(x, grid) for m in (ffn.spatial_mix_k, ffn.spatial_mix_r))
    value = F.relu(mixed_k @ ffn.key.weight.T) ** 2 @ ffn.value.weight.T
    return torch.sigmoid(mixed_r @ ffn.receptance.weight.T) * value


@pytest.mark.parametrize(("number", "post_norm"), [(0, True), (1, False)])
def test_block_by_hand(post_norm, number):
    block = shaken(nano("vrwkv", post_norm=post_norm)).double().blocks[number]
    grid = (3, 5)
    x = torch.randn(2, 15, 64, dtype=torch.float64)

    def norm(layer, y):
        return F.layer_norm(y, (64,), layer.weight, layer.bias, 1e-5)

    with torch.no_grad():
        expected = norm(block.ln0, x) if number == 0 else x
        if post_norm:
            expected = expected + block.gamma1 * norm(block.ln1, spatial_by_hand(block.att, expected, grid))
            expected = expected + block.gamma2 * norm(block.ln2, channel_by_hand(block.ffn, expected, grid))
        else:
            expected = expected + spatial_by_hand(block.att, norm(block.ln1, expected), grid)
            expected = expected + channel_by_hand(block.ffn, norm(block.ln2, expected), grid)
        torch.testing.assert_close(block(x, grid), expected)


@pytest.mark.parametrize("layer", [0, 5])
def test_fancy_initial_values(layer):
    block, C, L = timm.create_model("vrwkv_tiny_patch16_224").blocks[layer], 192, 12
    i, p, rise = torch.arange(C), 1 - layer / L, layer / (L - 1)
    mix = (i / C) ** p
    expected = {
        "att.spatial_decay": -5 + 8 * (i / (C - 1)) ** (0.7 + 1.3 * rise),
        "att.spatial_first": math.log(0.3) + 0.5 * ((i + 1) % 3 - 1),
        "att.spatial_mix_k": mix,
        "att.spatial_mix_v": mix + 0.3 * rise,
        "att.spatial_mix_r": (i / C) ** (p / 2),
        "ffn.spatial_mix_k": mix,
        "ffn.spatial_mix_r": mix,
    }
    for name, value in expected.items():
        torch.testing.assert_close(block.get_parameter(name).detach().flatten(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("size", "gamma"), [("small", 1.0), ("base", 1e-5)])
def test_layer_scales_of_the_sizes(size, gamma):
    block = timm.create_model(f"vrwkv_{size}_patch16_224", depth=1).blocks[0]
    assert (block.gamma1 == gamma).all() and (block.gamma2 == gamma).all()
