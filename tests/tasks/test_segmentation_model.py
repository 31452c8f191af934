"""UperNet: its size, its losses and its windows, by hand; and what mmsegmentation prints."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from repro.core.errors import UserError
from repro.models.pyramid import build_pyramid
from repro.tasks.segmentation.data import IGNORED
from repro.tasks.segmentation.mmseg_backbone import VitttAdapter
from repro.tasks.segmentation.openmmlab import mmengine, mmseg
from repro.tasks.segmentation.params import UperNetParams
from repro.tasks.segmentation.task import label_map
from repro.tasks.segmentation.upernet import build_upernet
from tests.conftest import run_python
from tests.models.helpers import count, state_unchanged
from tests.tasks.backbones import NARROW, SWIN, Pyramid, build_swin, list_unreached


def small(window=32, stride=21, **params):
    torch.manual_seed(0)
    params = dataclasses.replace(NARROW, **params)
    model = build_upernet(Pyramid(), params, num_classes=3, window=window, stride=stride).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):  # statistics that are not the identity's
            torch.nn.init.uniform_(module.running_var, 0.5, 2)
    for head in (model.decode_head, model.auxiliary_head):
        torch.nn.init.normal_(head.conv_seg.weight)
    return model


def sample(labels):
    maps = [mmengine.structures.PixelData(data=label[None]) for label in labels]
    return [mmseg.structures.SegDataSample(gt_sem_seg=each) for each in maps]


@pytest.mark.parametrize(("size", "head", "aux", "total"), [("tiny", 27.61, 0.48, 36.1), ("base", 32.33, 1.81, 133.6)])
def test_heads_and_upernet_on_vit_have_the_published_parameters(size, head, aux, total):
    with torch.device("meta"):
        adapter = build_pyramid(f"deit_{size}_patch16_224", features="each")
        model = build_upernet(adapter, UperNetParams(), num_classes=150, window=512, stride=341)
    assert [round(count(part) / 1e6, 2) for part in (model.decode_head, model.auxiliary_head)] == [head, aux]
    assert round(count(model) / 1e6, 1) == total


def test_classifiers_start_small_and_the_backbone_is_left_alone():
    backbone, params = Pyramid(), UperNetParams(channels=64, aux_channels=64)
    torch.manual_seed(0)
    with state_unchanged(backbone):
        model = build_upernet(backbone, params, num_classes=150, window=64, stride=43)
    assert model.backbone is backbone
    for head in (model.decode_head, model.auxiliary_head):
        assert head.conv_seg.weight.std().item() == pytest.approx(0.01, rel=0.05)
        assert head.conv_seg.weight.mean().abs() < 1e-3 and not head.conv_seg.bias.any()


@pytest.mark.parametrize(
    "params", [{}, {"class_weights": (1.0, 0.25, 0.5), "aux_weight": 0.7}], ids=["plain", "weighted"]
)
def test_losses_are_means_over_all_pixels_or_weighted_ones_over_the_labelled(params):
    """The auxiliary loss weighs less, by default 0.4."""
    model = small(**params).double()
    images, labels = torch.randn(2, 3, 32, 64, dtype=torch.float64), torch.randint(0, 3, (2, 32, 64))
    labelled = labels[:, 10:].clone()
    labels[:, :10] = IGNORED
    losses, maps = model(images, sample(labels), mode="loss"), model.backbone(images)

    assert torch.equal(model(images), model.decode_head(maps)) and model(images).shape == (2, 3, 8, 16)
    weights = torch.tensor(params.get("class_weights", (1.0, 1.0, 1.0)), dtype=torch.float64)
    total = weights[labelled].sum() if params else labels.numel()
    heads = ("decode", model.decode_head, 1.0), ("aux", model.auxiliary_head, params.get("aux_weight", 0.4))
    for name, head, weight in heads:
        log_p = F.interpolate(head(maps), size=(32, 64), mode="bilinear", align_corners=False).log_softmax(1)[:, :, 10:]
        loss = weight * F.nll_loss(log_p, labelled, weights, reduction="sum") / total
        assert losses[f"{name}.loss_ce"].item() == pytest.approx(loss.item(), rel=1e-6 if params else 1e-9)
    right = F.interpolate(model(images), size=(32, 64), mode="bilinear").argmax(1)[:, 10:] == labelled
    assert losses["decode.acc_seg"].item() == pytest.approx(100 * right.double().mean().item(), rel=1e-5)


def test_class_weights_are_one_for_each_class():
    with pytest.raises(UserError, match="upernet.class_weights: 2 numbers for 3 classes"):
        small(class_weights=(1.0, 0.5))


# the last window of an axis is shifted inside: 0, 21, 42 -> 32 and 0, 21 -> 8 (64 and 40 pixels, windows of 32)
@pytest.mark.parametrize(
    ("window", "stride", "size", "tops", "lefts"),
    [
        (32, 21, (32, 64), [0], [0, 21, 32]),
        (32, 21, (40, 64), [0, 8], [0, 21, 32]),
        # the whole image is seen at once without a stride, and where it is smaller than a window
        (32, None, (32, 64), [0], [0]),
        (96, 64, (32, 64), [0], [0]),
    ],
)
@torch.no_grad()
def test_windows_are_averaged_resized_and_the_largest_logit_taken(window, stride, size, tops, lefts):
    model, image = small(window=window, stride=stride), torch.randn(1, 3, *size)
    seen = (window, window) if stride == 21 else size
    total, count = torch.zeros(1, 3, *size), torch.zeros(size)
    for top in tops:
        for left in lefts:
            place = ..., slice(top, top + seen[0]), slice(left, left + seen[1])
            total[place] += F.interpolate(model(image[place]), size=seen, mode="bilinear")
            count[place] += 1
    expected = F.interpolate(total / count, size=(50, 101), mode="bilinear")
    assert torch.equal(label_map(model, image, (50, 101)), expected.argmax(1)[0])
    sample = mmseg.structures.SegDataSample(metainfo={"ori_shape": (50, 101), "img_shape": size})
    found = model.predict(image, [sample])[0].seg_logits.data
    torch.testing.assert_close(found, expected[0], rtol=1e-5, atol=1e-5)


def test_a_hierarchical_backbone_is_trained_and_segments():
    torch.manual_seed(0)
    model = build_upernet(build_swin("each"), NARROW, num_classes=3, window=64, stride=43).train()
    assert model.decode_head.in_channels == [8, 16, 32, 64] and model.auxiliary_head.in_channels == 32
    images, labels = torch.randn(2, 3, 64, 96), torch.randint(0, 3, (2, 64, 96))
    losses = model(images, sample(labels), mode="loss")
    sum(value for name, value in losses.items() if "loss" in name).backward()
    assert list_unreached(model) == []
    with torch.no_grad():
        assert label_map(model.eval(), images[:1], (20, 30)).shape == (20, 30)


def test_a_swin_in_mmsegmentations_registry():
    maps = VitttAdapter("swin_tiny_patch4_window7_224", options=SWIN)(torch.zeros(1, 3, 64, 64))
    assert [tuple(level.shape) for level in maps] == [(1, 8, 16, 16), (1, 16, 8, 8), (1, 32, 4, 4), (1, 64, 2, 2)]


@pytest.mark.slow
def test_importing_and_building_says_nothing():
    code = (
        "import torch; from repro.tasks.segmentation.upernet import build_upernet\n"
        "from repro.tasks.segmentation.params import UperNetParams\n"
        "backbone = torch.nn.Conv2d(3, 8, 1); backbone.channels = (8,) * 4\n"
        "build_upernet(backbone, UperNetParams(channels=8, aux_channels=4), num_classes=2, window=32, stride=32)"
    )
    done = run_python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_params_import_nothing_heavy():
    heavy = ("torch", "mmseg", "mmcv", "cv2", "numpy")
    code = f"import sys, repro.tasks.segmentation.params; print([name for name in {heavy} if name in sys.modules])"
    assert run_python("-c", code).stdout.strip() == "[]"
