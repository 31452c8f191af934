"""ViT3 against its official release, against autograd of the inner loss, and against counts by hand."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from repro.models.vit3 import InnerTraining, ViT3, official_state_dict
from tests.models.helpers import nano, relative

DATA = Path(__file__).parents[1] / "data"


def read(name: str) -> dict[str, Tensor]:
    with np.load(DATA / name) as file:
        return {key: torch.from_numpy(file[key]) for key in file if file[key].dtype.kind == "f"}


def below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def test_block_equals_the_official_release():
    truth = read("vit3_block.npz")
    block = InnerTraining(32, 4)
    block.load_state_dict(below(truth, "state_dict/"))
    x = truth["x"].clone().requires_grad_()
    out = block(x, (5, 7))
    out.backward(truth["grad_out"])
    assert relative(out, truth["out"]) < 1e-5
    assert relative(x.grad, truth["grad_x"]) < 1e-5
    expected = below(truth, "grads/")
    assert set(expected) == {name for name, _ in block.named_parameters()}
    for name, parameter in block.named_parameters():
        assert relative(parameter.grad, expected[name]) < 1e-5, name


def test_model_equals_the_official_release():
    truth = read("vit3_model.npz")
    model = ViT3(img_size=64, num_classes=11, embed_dim=48, depth=2, num_heads=3).eval()
    model.load_state_dict(official_state_dict(below(truth, "state_dict/")))
    with torch.no_grad():
        tokens = model.forward_features(truth["x"])
        assert relative(model.forward_head(tokens, pre_logits=True), truth["features"]) < 1e-5
        assert relative(model(truth["x"]), truth["logits"]) < 1e-5


def test_a_zero_value_takes_no_step_and_has_finite_gradients():
    """‖g‖ has no gradient at 0, where black images lead: v is 0 for them if the bias is."""
    block = InnerTraining(8, 2)
    x = torch.zeros(1, 6, 8, requires_grad=True)
    with torch.no_grad():
        block.qkv.bias.zero_()
    out = block(x, (2, 3))
    out.sum().backward()
    assert torch.equal(out, block.proj.bias.expand_as(out))
    assert all(p.grad.isfinite().all() for p in (x, *block.parameters()))


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


def test_low_precision_parameters_run_without_autocast():
    model = nano("vit3").bfloat16()
    assert model(torch.randn(1, 3, 32, 48).bfloat16()).dtype == torch.bfloat16


# by hand: qkv with 3C + 3d outputs, proj with C + d inputs, w1 and w2 (h, d, d), w3 (d, 1, 3, 3), convolution, two
# LayerNorms, MLP
def parameters_by_hand(C: int, heads: int) -> int:
    d = C // heads
    block = C * (3 * C + 3 * d) + 3 * C + 3 * d + 2 * heads * d * d + 9 * d + (C + d) * C + C
    block += 10 * C + 4 * C + (C * 4 * C + 4 * C) + (4 * C * C + C)
    return (768 * C + C) + 12 * block + 2 * C + 1000 * C + 1000


@pytest.mark.parametrize(
    ("size", "C", "heads", "count"),
    [("tiny", 192, 6, 6_149_416), ("small", 384, 6, 23_799_400), ("base", 768, 12, 90_055_912)],
)
def test_parameters_of_the_sizes(size, C, heads, count):
    with torch.device("meta"):
        model = timm.create_model(f"vit3_{size}_patch16_224")
    assert sum(p.numel() for p in model.parameters()) == parameters_by_hand(C, heads) == count


def test_rows_and_columns_are_told_apart():
    """If every 3x3 window and the patches are symmetric, the maps of an image and of its transpose are transposes."""
    model = nano("vit3").double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 4 and not name.endswith(("w1", "w2")):
                parameter.copy_((parameter + parameter.mT) / 2)
        image = torch.randn(1, 3, 48, 80, dtype=torch.float64)
        (straight,), (turned,) = (
            model.forward_intermediates(i, indices=1, intermediates_only=True) for i in (image, image.mT)
        )
    torch.testing.assert_close(straight, turned.mT)


def test_initialisation():
    torch.manual_seed(0)
    model = timm.create_model("vit3_tiny_patch16_224", depth=2)
    block = model.blocks[1]
    linears = block.attn.qkv.weight, block.attn.proj.weight, block.mlp.fc1.weight, model.head.weight
    for weight in (*linears, block.attn.w1, block.attn.w2, block.attn.w3):
        assert abs(weight.detach().std().item() / 0.02 - 1) < 0.1 and abs(weight.detach().mean().item()) < 4e-3
    assert not any(
        bias.any() for bias in (block.attn.qkv.bias, block.attn.proj.bias, block.mlp.fc2.bias, model.head.bias)
    )
    assert block.cpe.weight.abs().max() > 0.2  # PyTorch's default: uniform up to 1/3


def test_stochastic_depth_grows_from_0_and_spares_the_convolution():
    model = nano("vit3", drop_path_rate=0.3)
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for block in model.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])
    block = model.blocks[3].train()
    block.drop_path.drop_prob = 1.0
    tokens = torch.randn(2, 12, 64)
    image = tokens.mT.reshape(2, 64, 3, 4)
    expected = image + F.conv2d(image, block.cpe.weight, block.cpe.bias, padding=1, groups=64)
    torch.testing.assert_close(block(tokens, (3, 4)), expected.flatten(2).mT)
