"""H-ViT3 against its official release, and its counts against the published ones."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from repro.bench.counter import OperatorCounter
from repro.core.errors import UserError
from repro.models.hvit3 import HViT3, official_state_dict
from repro.models.pyramid import build_pyramid
from repro.tasks.detection.mask_rcnn import MaskRcnn
from repro.tasks.detection.params import MaskRcnnParams
from repro.tasks.segmentation.params import UperNetParams
from repro.tasks.segmentation.upernet import build_upernet
from tests.models.helpers import below, count, load_official, nano, read_data, relative
from tests.slow import first


@pytest.fixture(scope="module")
def truth() -> dict[str, Tensor]:
    return read_data("hvit3_model.npz")


def released(truth) -> HViT3:
    """The small model of the release, with its weights."""
    config = {key: value.tolist() for key, value in below(truth, "config/").items()}
    shape = {"widths": config["dim"], "depths": config["depths"], "num_heads": config["num_heads"]}
    model = HViT3(img_size=config["img_size"], num_classes=config["num_classes"], **shape).eval()
    tables = {f"layers.{i}.blocks.0.rope.rotations": torch.zeros(2, 3, 4, 2) for i in range(4)}  # which files have
    load_official(model, below(truth, "state_dict/") | tables)
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


def test_dense_maps_equal_the_official_detector(truth):
    """On 70 x 102 pixels stem and downsampling pad; the fourth stage is not stored."""
    weights = below(truth, "dense/state_dict/")
    shape = {"widths": (32, 32, 64, 64), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}
    norms = {f"norms.{key.removeprefix('norm')}": value for key, value in weights.items() if key.startswith("norm")}
    trunk = official_state_dict({key: value for key, value in weights.items() if not key.startswith("norm")})
    pyramid = build_pyramid("hvit3_nano_144", options=shape).eval()
    trunk = {f"backbone.{key}": value for key, value in trunk.items()}
    missing, unused = pyramid.load_state_dict(norms | trunk, strict=False)
    fourth = ("backbone.stages.2.downsample", "backbone.stages.3", "norms.3")
    assert not unused and all(name.startswith(fourth) for name in missing)
    with torch.no_grad():
        maps = pyramid(truth["dense/x"])
    assert [tuple(level.shape[2:]) for level in maps] == [(18, 26), (9, 13), (5, 7), (3, 4)]
    for i in range(3):
        assert relative(maps[i], truth[f"dense/maps/{i}"]) < 1e-5, i


# parameters of the published detector and segmenter; multiply-adds of their backbone at 800 x 1280 and 512 x 2048 pixels
DENSE = {"tiny": (48_358_992, 57_903_094, 100.06, 102.46), "small": (74_017_488, 83_561_590, 178.19, 182.47)}
DENSE["base"] = 113_987_296, 124_407_942, 340.44, 348.61


@pytest.mark.parametrize("size", first(DENSE))
def test_dense_models_are_those_that_are_published(size):
    """Without torchvision's box and mask of the background, and without the segmenter's auxiliary head."""
    detector_params, segmenter_params, *gigas = DENSE[size]
    with torch.device("meta"):
        pyramid = build_pyramid(f"hvit3_{size}_224").eval()
        detector = MaskRcnn(pyramid, 80, MaskRcnnParams())
        segmenter = build_upernet(pyramid, UperNetParams(), num_classes=150, window=512, stride=None)
        images = [torch.empty(1, 3, *image_size) for image_size in ((800, 1280), (512, 2048))]
    assert count(detector) - 4 * (1024 + 1) - (256 + 1) == detector_params
    assert count(segmenter) - count(segmenter.auxiliary_head) == segmenter_params
    for image, giga in zip(images, gigas, strict=True):
        with torch.no_grad(), OperatorCounter() as counter:
            pyramid.eval()(image)
        terms = pyramid.backbone.mac_terms(image.shape[2:])
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
