"""Vittt with softmax attention: by its equation, against timm's DeiT, and what it shares with Vittt."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F

from repro.models import fused_block
from tests.models.helpers import nano, shaken


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_a_block_by_hand():
    block = shaken(nano("softvittt", num_heads=4)).double().blocks[1]
    x, D, d, m = draw(2, 12, 64), 64, 16, block.mixer
    y = x + F.conv2d(x.mT.reshape(2, D, 3, 4), block.dwconv.weight, padding=1, groups=D).flatten(2).mT
    n = F.layer_norm(y, (D,), block.norm1.weight, block.norm1.bias, 1e-6)
    gate, q, k, v = (n @ weight.T for weight in m.in_proj.weight.split(D))
    heads = []
    for head in range(4):
        q_h, k_h, v_h = (each[..., head * d : (head + 1) * d] for each in (q, k, v))
        weights = torch.exp(torch.einsum("btd,bsd->bts", q_h, k_h) / math.sqrt(d))
        heads.append(weights @ v_h / weights.sum(-1, keepdim=True))
    normed = F.layer_norm(torch.cat(heads, -1), (D,), m.post_norm.weight, m.post_norm.bias, 1e-6)
    gelu = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    y = y + (gelu * normed) @ m.out_proj.weight.T
    y = y + block.mlp(F.layer_norm(y, (D,), block.norm2.weight, block.norm2.bias, 1e-6))
    torch.testing.assert_close(block(x, (3, 4)), y, rtol=1e-10, atol=1e-10)


def test_deit_is_the_block_deit_without_convolution():
    """All but the convolution is timm's: one weight for each of its weights."""
    ours, deit = (nano("softvittt", block="deit", pool="head", num_heads=4), nano("deit", num_heads=4))
    ours, deit = shaken(ours).double(), deit.double()
    state = ours.state_dict()
    class_row = state.pop("cls_pos_embed")
    positions = torch.cat([class_row, state.pop("pos_embed")], 1)
    names = {"mixer.in_proj": "attn.qkv", "mixer.out_proj": "attn.proj", "patch_embed.": "patch_embed.proj."}
    renamed = {}
    for name, value in state.items():
        for old, new in names.items():
            name = name.replace(old, new)
        if "dwconv" not in name:
            renamed[name] = value
    deit.load_state_dict(renamed | {"pos_embed": positions})
    for block in ours.blocks:
        torch.nn.init.zeros_(block.dwconv.weight)
    image = draw(2, 3, 144, 144)
    torch.testing.assert_close(ours(image), deit(image))


@pytest.mark.parametrize("control", [("vittt", {"step": "dot"}), ("softvittt", {})], ids=["dot", "softmax"])
def test_a_control_starts_from_the_values_of_vittt(control):
    """`dot` from all that it keeps, and the model with softmax from what is outside its mixers."""
    family, options = control
    vittt, other = nano("vittt").state_dict(), nano(family, **options).state_dict()
    shared = {name for name in other if name in vittt and vittt[name].shape == other[name].shape}
    shared -= {name for name in shared if ".mixer." in name and family == "softvittt"}
    assert {name.rpartition("blocks.0.")[2] for name in shared} >= {"dwconv.weight", "mlp.fc2.weight", "head.weight"}
    assert all(torch.equal(vittt[name], other[name]) for name in shared)
    if family == "vittt":
        assert set(vittt) - set(other) == {
            f"blocks.{i}.mixer.{n}" for i in range(4) for n in ("b0", "ln_weight", "ln_bias")
        }


def test_no_kernel_of_the_learner_takes_a_block():
    model, image = shaken(nano("softvittt")), torch.randn(1, 3, 32, 48)
    with torch.inference_mode():
        before = model(image)
        assert fused_block.find_backend(model.blocks[0], torch.randn(1, 6, 64)) is None
        assert torch.equal(model.freeze()(image), before)
    assert model.selected_backend(torch.float32) == "torch" and not [*model.buffers()]


@pytest.mark.parametrize(
    "option", [{"step": "dot"}, {"design": "conv1d"}, {"chunk_size": 8}, {"reading": "post_norm=none"}]
)
def test_options_of_the_learner_are_refused(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))}: belongs to the inner learner"):
        timm.create_model("softvittt_nano_patch4_32", **option)


def test_the_controls_have_the_parameters_of_vittt_to_a_twentieth():
    def count(name, **options):
        return sum(p.numel() for p in timm.create_model(name, num_classes=10, img_size=32, **options).parameters())

    vittt = count("vittt_nano_patch16_144", patch_size=4)
    deit = count("deit_nano_patch16_144", patch_size=4, embed_dim=76)
    convolved = count("softvittt_nano_patch4_32", block="deit", pool="head", embed_dim=76)
    assert abs(count("softvittt_nano_patch4_32") / vittt - 1) < 0.045
    assert convolved - deit == 4 * 9 * 76 and convolved / vittt - 1 < 0.045
