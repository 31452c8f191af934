"""Vittt against its definition, written out around the reference of its inner learner."""

import pytest
import torch
import torch.nn.functional as F

from kernels.ttt_linear.reference import ttt_linear_dual
from repro.models.backbone import insert_tokens, remove_tokens
from repro.models.reading import Reading
from repro.models.ttt_mixer import DESIGNS, TTTMixer
from repro.models.vittt import Vittt
from repro.models.vittt_block import class_positions
from tests.models.helpers import nano, shaken


def mixer_by_hand(mixer: TTTMixer, x: torch.Tensor) -> torch.Tensor:
    """Section 2 of the model's definition around the equations of the inner learner."""
    D, H, reading = mixer.dim, mixer.num_heads, getattr(mixer, "reading", Reading())
    d, T = D // H, x.shape[1]
    weights = list(mixer.in_proj.weight.split(D))
    gate_weight, gate_bias = None, 0.0
    if getattr(mixer, "gate_proj", None) is not None:
        gate_weight = mixer.gate_proj.weight
        gate_bias = 0.0 if mixer.gate_proj.bias is None else mixer.gate_proj.bias
    elif mixer.has_gate:
        gate_weight = weights.pop(0)
    q_or_kq = [weights.pop(0) for _ in range(mixer.directions)]
    k_weights = [weights.pop(0) for _ in range(mixer.directions)] if mixer.separate_q else q_or_kq
    v_weights = [weights.pop(0) for _ in range(mixer.directions)]
    assert not weights
    gated, outs = x, []
    for r in range(mixer.directions):
        tokens = x.flip(1) if r else x
        q, k, v = (tokens @ weight[r].T for weight in (q_or_kq, k_weights, v_weights))
        convolved = {}
        for name, source in (("conv_q", q), ("conv_k", k)):
            if (conv := getattr(mixer, name, None)) is not None:
                size, w = conv.kernel_size[0], conv.weight[r * D : (r + 1) * D, 0]
                bias = 0.0 if conv.bias is None else conv.bias[r * D : (r + 1) * D]
                padded = F.pad(source, (0, 0, size - 1, 0))
                convolved[name] = bias + sum(w[:, j] * padded[:, j : j + T] for j in range(size))
        k = convolved.get("conv_k", k)
        q = convolved.get("conv_q", k if reading.conv1d_count == 1 and "conv_k" in convolved else q)
        if r == 0 and reading.gate_input == "conv1d" and convolved:
            gated = k if "conv_k" in convolved else q
        lr = reading.eta_base * torch.sigmoid(tokens @ mixer.lr_proj.weight.T + mixer.lr_proj.bias) / d
        lr = lr[..., r * H : (r + 1) * H] if reading.learning_rate == "per_direction" else lr
        chunk = mixer.chunk_size or T
        q, k, v = (t.unflatten(2, (H, d)) for t in (q, k, v))
        if reading.rotary == "chunk":  # as a product of complex numbers
            places = (torch.arange(T, dtype=torch.float64) % chunk)[:, None, None]
            angle = places / 10000 ** (2 * torch.arange(d // 2, dtype=torch.float64) / d)
            turns = torch.polar(torch.ones_like(angle), angle)
            q, k = (torch.complex(*t.unflatten(3, (2, d // 2)).unbind(3)) * turns for t in (q, k))
            q, k = (torch.cat([t.real, t.imag], 3) for t in (q, k))
        c = 1 / torch.arange(1.0, chunk + 1, dtype=torch.float64) ** (reading.token_scale_start == "reciprocal")
        if mixer.token_scale is not None:
            delta = mixer.token_scale[min(r, len(mixer.token_scale) - 1)][:chunk]
            c = c + F.pad(delta, (0, chunk - len(delta)))
        shared = min(r, len(mixer.b0) - 1)
        start = mixer.W0[min(r, len(mixer.W0) - 1)], mixer.b0[shared], mixer.ln_weight[shared], mixer.ln_bias[shared]
        target = v if reading.inner_target == "v_minus_k" else v + k  # of which the reference takes k away
        out = ttt_linear_dual(q, k, target, lr, c.clamp(min=0), *start, chunk_size=chunk)
        out = (out if reading.inner_residual else out - q).flatten(2)
        outs.append(out.flip(1) if r else out)
    gate = 1.0
    if gate_weight is not None:
        gate = gated @ gate_weight.T + gate_bias
        gate = F.gelu(gate, approximate="tanh") if reading.gate_activation == "gelu" else 1 / (1 + torch.exp(-gate))

    def norm(z, layer):
        return F.layer_norm(z, (D,), layer.weight, layer.bias, 1e-6)

    before, after = (gate, 1.0) if reading.post_norm_place == "after_gate" else (1.0, gate)
    if reading.post_norm == "merged":
        z = norm(before * sum(outs), mixer.post_norm)
    elif reading.post_norm == "per_direction":
        z = sum(norm(before * out, layer) for out, layer in zip(outs, mixer.post_norm, strict=True))
    else:
        z = before * sum(outs)
    return F.linear(after * z, mixer.out_proj.weight, mixer.out_proj.bias)


@pytest.mark.parametrize("design", DESIGNS[:-1])
@pytest.mark.parametrize(("chunk_size", "w0"), [(4, "per_direction"), (0, "shared"), (4, "frozen")])
def test_mixer_equals_algorithm_1_by_hand(design, chunk_size, w0):
    torch.manual_seed(0)
    mixer = shaken(TTTMixer(8, 2, 5, design=design, chunk_size=chunk_size, w0=w0).double())
    x = torch.randn(2, 11, 8, dtype=torch.float64)
    with torch.no_grad():
        ours = mixer(x)
    expected = mixer_by_hand(mixer, x).detach()
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)


def test_block_is_equation_9_with_the_convolution_on_the_stream():
    model = shaken(nano("vittt")).double()
    block = model.blocks[1]
    x = torch.randn(2, 12, 64, dtype=torch.float64)
    y = x + F.conv2d(x.mT.reshape(2, 64, 3, 4), block.dwconv.weight, padding=1, groups=64).flatten(2).mT
    y = y + block.mixer(F.layer_norm(y, (64,), block.norm1.weight, block.norm1.bias, 1e-6))
    n = F.layer_norm(y, (64,), block.norm2.weight, block.norm2.bias, 1e-6)
    m = block.mlp
    hidden = F.silu(F.linear(n, m.fc1_g.weight, m.fc1_g.bias)) * F.linear(n, m.fc1_x.weight, m.fc1_x.bias)
    expected = y + F.linear(hidden, m.fc2.weight, m.fc2.bias)
    assert hidden.shape[-1] == int(8 * 64 / 3)
    torch.testing.assert_close(block(x, (3, 4)), expected)


@pytest.mark.parametrize(
    ("pool", "num_patches", "positions"), [("mean", 6, ()), ("head", 6, (0,)), ("mid", 7, (3,)), ("double", 6, (0, 7))]
)
def test_class_tokens_sit_where_table_4_says(pool, num_patches, positions):
    assert class_positions(pool, num_patches) == positions
    tokens, extra = torch.randn(2, num_patches, 3), torch.full((2, len(positions), 3), 9.0)
    merged = insert_tokens(tokens, extra, positions)
    assert merged.shape[1] == num_patches + len(positions)
    assert all((merged[:, p] == 9).all() for p in positions)
    assert torch.equal(remove_tokens(merged, positions), tokens)


@pytest.mark.parametrize("pool", ["head", "mid", "double"])
def test_class_tokens_skip_the_convolution(pool):
    block = shaken(nano("vittt", pool=pool)).blocks[0]
    positions = class_positions(pool, 12)
    x = torch.randn(2, 12 + len(positions), 64)
    out = block._convolve(x, (3, 4))
    assert torch.equal(out[:, list(positions)], x[:, list(positions)])
    plain = shaken(nano("vittt")).blocks[0]
    plain.dwconv.load_state_dict(block.dwconv.state_dict())
    patches = remove_tokens(x, positions)
    torch.testing.assert_close(remove_tokens(out, positions), plain._convolve(patches, (3, 4)))


def test_pooling_strategies_by_hand():
    tokens = torch.tensor([[[1.0, 0], [0, 3], [2, 2], [0, 1]]])
    expected = {"mean": [0.75, 1.5], "max": [0, 3], "head": [1, 0], "mid": [0, 3], "double": [0.5, 0.5]}
    for pool, feature in expected.items():
        model = Vittt(img_size=16, embed_dim=2, num_heads=1, depth=1, pool=pool, num_classes=0)
        assert model.forward_head(tokens).tolist() == [feature], pool


@pytest.mark.parametrize("pool", ["mid", "max"])
def test_an_exported_graph_is_for_any_number_of_images(pool):
    model, image = nano("vittt", depth=1, img_size=48, pool=pool), torch.randn(3, 3, 48, 48)
    batch = {0: torch.export.Dim("batch")}
    graph = torch.export.export(model, (image[:2],), dynamic_shapes=(batch,), strict=False).module()
    torch.testing.assert_close(graph(image), model(image))
