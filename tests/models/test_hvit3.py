"""H-ViT3 against its official release, RoPE against complex numbers, and counts against the published ones."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from repro.bench import build
from repro.bench.flops import OperatorCounter, cost, counted_macs
from repro.core.errors import UserError
from repro.models.hvit3 import ConvMlp, HViT3, official_state_dict, rotations
from repro.models.pyramid import build_pyramid
from repro.models.vit3 import InnerTraining, rotate
from repro.models.weights import read_official
from repro.tasks.detection.mask_rcnn import MaskRcnn
from repro.tasks.detection.params import MaskRcnnParams
from tests.models.helpers import load_official, nano, relative, shaken

SIZES = ("tiny", "small", "base")


@pytest.fixture(scope="module")
def truth() -> dict[str, Tensor]:
    with np.load(Path(__file__).parents[1] / "data" / "hvit3_model.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file}


def below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def released(truth) -> HViT3:
    """The small model of the release, with its weights."""
    config = {key: value.tolist() for key, value in below(truth, "config/").items()}
    shape = {"widths": config["dim"], "depths": config["depths"], "num_heads": config["num_heads"]}
    model = HViT3(img_size=config["img_size"], num_classes=config["num_classes"], **shape).eval()
    load_official(model, below(truth, "state_dict/"))
    return model


def test_model_equals_the_official_release(truth):
    model = released(truth)
    feature_map, maps = model.forward_intermediates(truth["x"])
    for i, found in enumerate(maps):
        assert relative(found.flatten(2).mT, truth[f"stage_tokens/{i}"]) < 1e-5, i
    assert relative(model.forward_head(feature_map, pre_logits=True), truth["features"]) < 1e-5
    logits = model(truth["x"])
    assert relative(logits, truth["logits"]) < 1e-5
    logits.backward(truth["cot"])
    parameters = dict(model.named_parameters())
    gradients = official_state_dict(below(truth, "grads/"))
    assert {name.split(".")[0] for name in gradients} == {"stages", "patch_embed", "head"}
    for name, expected in gradients.items():
        assert relative(parameters[name].grad, expected) < 1e-4, name


def test_layer_norms_have_the_eps_of_the_release():
    """At a deviation of 1e-3 the variance is a tenth of the release's eps of 1e-5 (`nn.LayerNorm`'s default)."""
    norms = [module for module in nano("hvit3").modules() if isinstance(module, torch.nn.LayerNorm)]
    assert norms
    for norm in norms:
        x = 1e-3 * torch.randn(4, *norm.normalized_shape)
        torch.testing.assert_close(norm(x), F.layer_norm(x, norm.normalized_shape, eps=1e-5))


def test_official_file_with_its_tables_of_rotations(truth, tmp_path):
    state = below(truth, "state_dict/")
    tables = {f"layers.{i}.blocks.0.rope.rotations": torch.zeros(2, 3, 4, 2) for i in range(4)}
    torch.save({"model": state | tables, "epoch": 299}, tmp_path / "official.pth")
    assert set(official_state_dict(read_official(tmp_path / "official.pth"))) == set(released(truth).state_dict())
    load_official(released(truth), state | tables)
    with pytest.raises(UserError, match="norm.weight missing"):
        load_official(released(truth), {key: value for key, value in state.items() if key != "norm.weight"})


def test_dense_maps_equal_the_official_detector(truth):
    """On 70 x 102 pixels stem and downsampling pad: 72 x 104 pixels, 10 x 14 and 6 x 8 positions. The fourth stage is
    not stored.
    """
    weights = below(truth, "dense/state_dict/")
    shape = {"widths": (32, 32, 64, 64), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}
    norms = {f"norms.{key.removeprefix('norm')}": value for key, value in weights.items() if key.startswith("norm")}
    trunk = official_state_dict({key: value for key, value in weights.items() if not key.startswith("norm")})
    pyramid = build_pyramid("hvit3_nano_144", options=shape).eval()
    missing, unused = pyramid.load_state_dict(
        norms | {f"backbone.{key}": value for key, value in trunk.items()}, strict=False
    )
    assert not unused and all(
        name.startswith(("backbone.stages.2.downsample", "backbone.stages.3", "norms.3")) for name in missing
    )
    with torch.no_grad():
        maps = pyramid(truth["dense/x"])
    assert [tuple(level.shape[2:]) for level in maps] == [(18, 26), (9, 13), (5, 7), (3, 4)]
    for i in range(3):
        assert relative(maps[i], truth[f"dense/maps/{i}"]) < 1e-5, i


@pytest.mark.parametrize(("grid", "dim"), [((5, 3), 12), ((1, 4), 8), ((6, 6), 32)])
def test_rotations_are_complex_multiplications(grid, dim):
    """Token by token and pair by pair, with Python's complex numbers."""
    torch.manual_seed(0)
    (h, w), m = grid, dim // 4
    x = torch.randn(2, h * w, dim, dtype=torch.float64)
    found = rotate(x, rotations(grid, dim, dtype=torch.float64, device=torch.device("cpu")))
    for image in range(2):
        for row in range(h):
            for column in range(w):
                token = row * w + column
                for pair in range(dim // 2):
                    place = row if pair < m else column
                    angle = place * 10000 ** (-(pair % m) / m)
                    real, imaginary = x[image, token, 2 * pair : 2 * pair + 2].tolist()
                    turned = complex(real, imaginary) * complex(np.cos(angle), np.sin(angle))
                    expected = torch.tensor([turned.real, turned.imag], dtype=torch.float64)
                    torch.testing.assert_close(
                        found[image, token, 2 * pair : 2 * pair + 2], expected, rtol=1e-12, atol=1e-12
                    )


def test_rotated_products_depend_on_the_distance_alone():
    rotation = rotations((7, 7), 16, dtype=torch.float64, device=torch.device("cpu"))
    q, k = (torch.randn(16, dtype=torch.float64).expand(1, 49, 16) for _ in range(2))
    scores = (rotate(q, rotation)[0] @ rotate(k, rotation)[0].T).view(7, 7, 7, 7)
    # two rows down and three columns right, both times
    torch.testing.assert_close(scores[1, 2, 3, 5], scores[4, 0, 6, 3])
    assert not torch.isclose(scores[1, 2, 3, 5], scores[1, 2, 4, 5])


def test_queries_and_keys_are_rotated_before_the_heads_are_split():
    """The block with rotations is the block without them whose Linear already returns rotated queries and keys."""
    torch.manual_seed(0)
    block, grid = shaken(InnerTraining(24, 3)), (3, 4)
    x, rotation = torch.randn(2, 12, 24), rotations(grid, 24, dtype=torch.float32, device=torch.device("cpu"))
    q, k, rest = block.qkv(x).split([24, 24, 24 + 3 * 8], dim=-1)
    turned = torch.cat((rotate(q, rotation), rotate(k, rotation), rest), dim=-1)
    expected = shaken(InnerTraining(24, 3))
    expected.load_state_dict(block.state_dict())
    expected.qkv.forward = lambda tokens: turned
    torch.testing.assert_close(block(x, grid, rotation), expected(x, grid))
    assert relative(block(x, grid), expected(x, grid)) > 1e-3


def test_convolutional_mlp_by_hand():
    torch.manual_seed(0)
    mlp, tokens = shaken(ConvMlp(4)), torch.randn(2, 15, 4)
    hidden = F.gelu(tokens @ mlp.fc1.weight.T + mlp.fc1.bias)
    image = F.pad(hidden.mT.unflatten(2, (3, 5)), (1, 1, 1, 1))
    window = sum(
        image[..., y : y + 3, x : x + 5] * mlp.dwc.weight[:, 0, y, x, None, None] for y in range(3) for x in range(3)
    )
    hidden = F.gelu(hidden + (window + mlp.dwc.bias[:, None, None]).flatten(2).mT)
    torch.testing.assert_close(mlp(tokens, (3, 5)), hidden @ mlp.fc2.weight.T + mlp.fc2.bias)


@pytest.mark.parametrize(("size", "count"), [("tiny", 28_703_560), ("small", 54_362_056), ("base", 94_369_304)])
def test_parameters_of_the_sizes(size, count):
    assert cost(f"hvit3_{size}_224", {}, (224, 224)).num_params == count


@pytest.mark.parametrize(("size", "giga"), [("tiny", 4.9033), ("small", 8.7320), ("base", 16.6821)])
def test_multiply_adds_of_the_sizes(size, giga):
    """The papers' counter does not see the convolution's inner gradient, which is written as a product of elements
    there.
    """
    counted = cost(f"hvit3_{size}_224", {}, (224, 224))
    assert counted.method == "analytic"
    assert round((counted.macs - counted.mac_terms["inner_conv"] / 2) / 1e9, 4) == giga


@pytest.mark.parametrize(
    ("name", "options"),
    [("hvit3_tiny_224", {}), ("hvit3_nano_144", {}), ("hvit3_nano_144", {"num_classes": 0, "in_chans": 1})],
)
@pytest.mark.parametrize("resolution", [(224, 224), (70, 102)])
def test_closed_form_equals_the_operators(name, options, resolution):
    model = build.create(name, options, resolution, device="meta")
    if "in_chans" not in options:
        assert cost(name, options, resolution).macs == counted_macs(model, resolution)
        return
    image = torch.empty(1, 1, *resolution, device="meta")
    with torch.no_grad(), OperatorCounter() as counter:
        model(image)
    assert sum(model.mac_terms(resolution).values()) == counter.macs
    assert sum(model.param_terms().values()) == sum(p.numel() for p in model.parameters())


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("size", "published"), [("tiny", 48_358_992), ("small", 74_017_488), ("base", 113_987_296)])
def test_detector_has_the_published_parameters(size, published):
    """torchvision's heads also have a box and a mask of the background, which mmdet's have not: 4 (1024 + 1) and 256 +
    1 parameters.
    """
    with torch.device("meta"):
        model = MaskRcnn(build_pyramid(f"hvit3_{size}_224"), 80, MaskRcnnParams())
    assert count(model) - 4 * (1024 + 1) - (256 + 1) == published


@pytest.mark.parametrize(("size", "published"), [("tiny", 57_903_094), ("small", 83_561_590), ("base", 124_407_942)])
def test_segmenter_has_the_published_parameters(size, published):
    """The published counts leave out the auxiliary head, which is used in training alone."""
    from repro.tasks.segmentation.params import UperNetParams
    from repro.tasks.segmentation.upernet import build_upernet

    with torch.device("meta"):
        model = build_upernet(
            build_pyramid(f"hvit3_{size}_224"), UperNetParams(), num_classes=150, window=512, stride=None
        )
    assert count(model) - count(model.auxiliary_head) == published


@pytest.mark.parametrize(
    ("size", "image_size", "giga"),
    [
        *((size, (800, 1280), giga) for size, giga in zip(SIZES, (100.06, 178.19, 340.44), strict=True)),
        *((size, (512, 2048), giga) for size, giga in zip(SIZES, (102.46, 182.47, 348.61), strict=True)),
    ],
)
def test_multiply_adds_of_the_dense_backbones(size, image_size, giga):
    with torch.device("meta"):
        pyramid, image = build_pyramid(f"hvit3_{size}_224").eval(), torch.empty(1, 3, *image_size)
    with torch.no_grad(), OperatorCounter() as counter:
        pyramid(image)
    terms = pyramid.backbone.mac_terms(image_size)
    assert counter.macs == sum(terms.values())
    assert round((counter.macs - terms["inner_conv"] / 2) / 1e9, 2) == giga


@pytest.mark.parametrize("size", [(31, 64), (64, 8), (1, 1)])
def test_images_smaller_than_the_stride_are_refused(size):
    message = f"{size[0]}x{size[1]}: height and width must be at least 32"
    with pytest.raises(ValueError, match=message) as caught:
        nano("hvit3")(torch.zeros(1, 3, *size))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=message):
        timm.create_model("hvit3_nano_144", img_size=size)
    with pytest.raises(UserError, match=f"HViT3 does not take images of {size[0]}x{size[1]} pixels"):
        build_pyramid("hvit3_nano_144")(torch.zeros(1, 3, *size))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": (16, 32, 64, 98)}, "width 98 is not a multiple of 4"),
        ({"num_heads": (1, 2, 4)}, r"num_heads \[1, 2, 4\]: expected one for each of the 4 stages"),
        ({"num_heads": (1, 2, 5, 6)}, "embed_dim 64 is not a multiple of num_heads 5"),
        ({"depths": (1, 1, 1)}, "4 widths and 3 depths, expected 4 of each"),
    ],
)
def test_what_cannot_be_built_is_one_line(options, message):
    with pytest.raises(ValueError, match=message):
        nano("hvit3", **options)


def test_timm_is_told_the_first_convolution_and_the_head():
    model = nano("hvit3")
    first, head = (model.get_submodule(model.pretrained_cfg[key]) for key in ("first_conv", "classifier"))
    assert first.in_channels == 3 and head is model.head


def test_no_state_depends_on_the_image_size():
    model = nano("hvit3", img_size=(64, 96))
    assert {key: value.shape for key, value in model.state_dict().items()} == {
        k: v.shape for k, v in nano("hvit3").state_dict().items()
    }
    assert not [name for name, _ in model.named_buffers() if "running" not in name and "num_batches" not in name]


def test_initialisation():
    torch.manual_seed(0)
    model = timm.create_model("hvit3_tiny_224")
    block = model.stages[2].blocks[1]
    linears = (
        block.attn.qkv.weight,
        block.attn.proj.weight,
        block.mlp.fc1.weight,
        block.mlp.fc2.weight,
        model.head.weight,
    )
    for weight in (*linears, block.attn.w1, block.attn.w2, block.attn.w3):
        assert abs(weight.detach().std().item() / 0.02 - 1) < 0.1 and abs(weight.detach().mean().item()) < 4e-3
    assert not any(
        bias.any() for bias in (block.attn.qkv.bias, block.attn.proj.bias, block.mlp.fc2.bias, model.head.bias)
    )
    for convolution in (block.cpe, block.mlp.dwc):
        assert convolution.weight.abs().max() > 0.3  # PyTorch's default: uniform up to 1/3


def test_stochastic_depth_grows_over_the_blocks_of_all_stages_and_spares_the_convolution():
    model = nano("hvit3", drop_path_rate=0.4)
    blocks = [block for stage in model.stages for block in stage.blocks]
    assert [getattr(block.drop_path, "drop_prob", 0.0) for block in blocks] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    block = model.stages[2].blocks[1].train()
    block.drop_path.drop_prob = 1.0
    x = torch.randn(2, 64, 3, 4)
    rotation = rotations((3, 4), 64, dtype=torch.float32, device=x.device)
    torch.testing.assert_close(
        block(x, rotation), x + F.conv2d(x, block.cpe.weight, block.cpe.bias, padding=1, groups=64)
    )


def test_half_precision():
    model, image = nano("hvit3"), torch.randn(1, 3, 40, 64)
    with torch.no_grad():
        expected = model(image)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert relative(model(image).float(), expected) < 0.1
        assert model.bfloat16()(image.bfloat16()).dtype == torch.bfloat16
