"""Mask R-CNN's parts against hand-made cases, the equations and torchvision's own forward pass."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.ndimage import map_coordinates
from timm.optim._param_groups import param_groups_layer_decay
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import RoIHeads

from repro.tasks.detection import mask_rcnn
from repro.tasks.detection.mask_rcnn import Anchors, IouMatcher, MaskRcnn, ProposalNetwork, PyramidRoiAlign
from repro.tasks.detection.params import MaskRcnnParams
from tests.data_sets.made import block
from tests.models.helpers import count
from tests.tasks.backbones import Pyramid, build_swin, list_unreached

SMALL = MaskRcnnParams(fpn_channels=8, box_channels=16, mask_channels=8, mask_layers=1, rpn_samples=32, roi_samples=32)


def sample(height, width, objects, seed=0):
    """An image, and a target whose masks fill their boxes; objects are (label, x1, y1, x2, y2)."""
    generator = torch.Generator().manual_seed(seed)
    masks = [block(*corners, height, width) for _, *corners in objects]
    masks = torch.from_numpy(np.array(masks, dtype=np.uint8).reshape(-1, height, width))
    boxes = torch.tensor([corners for _, *corners in objects], dtype=torch.float32).reshape(-1, 4)
    labels = torch.tensor([label for label, *_ in objects], dtype=torch.int64)
    image = torch.randint(0, 256, (3, height, width), generator=generator, dtype=torch.uint8)
    return image, {"boxes": boxes, "labels": labels, "masks": masks}


def build(seed=0, **changed):
    torch.manual_seed(seed)
    return MaskRcnn(Pyramid(), 3, dataclasses.replace(SMALL, **changed))


def samples():
    """Two images of different sizes, the second without objects."""
    return zip(sample(70, 90, [(1, 5, 5, 40, 30), (3, 30, 30, 80, 60)]), sample(33, 64, [], seed=1))


@pytest.mark.parametrize("embed_dim, fpn", [(192, 2_557_952), (768, 3_147_776)])
def test_parameters_are_those_of_the_published_models(embed_dim, fpn):
    """ViT-Adapter + these = the published 28, 48 and 120 M."""
    with torch.device("meta"):
        model = MaskRcnn(Pyramid(embed_dim), 80, MaskRcnnParams())
    heads = model.roi_heads
    parts = ([model.fpn], [model.rpn], [heads.box_head, heads.box_predictor], [heads.mask_head, heads.mask_predictor])
    counts = [sum(map(count, group)) for group in parts]
    assert counts == [fpn, 593_935, 14_310_805, 2_643_537]
    assert count(model) == sum(counts) + count(model.backbone)


def test_one_box_for_all_classes_is_the_same_box_for_each():
    """The losses and the detections are those of a head with a box for each class whose rows for all classes are equal."""
    models = of_each, of_all = [build(min_score=0.0, class_agnostic_boxes=agnostic) for agnostic in (False, True)]
    torch.manual_seed(1)
    own = of_all.state_dict()
    assert own["roi_heads.box_predictor.bbox_pred.weight"].shape == (4, SMALL.box_channels)
    for key, tensor in own.items():
        if "box_predictor.bbox_pred" in key:
            own[key] = torch.cat([tensor.normal_(std=0.1)] * 4)  # of three classes and the background
    of_each.load_state_dict(own)
    images, targets = samples()
    losses, found = [], []
    for model in models:
        torch.manual_seed(2)  # of the samplers
        losses.append(model.train()(images, targets))
        detections = model.eval().detect(images, [image.shape[1:] for image in images])
        found.append([{key: each[key] for key in ("boxes", "labels", "scores")} for each in detections])
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*found)
    assert len(found[0][0]["boxes"]) > 0


def test_initialisation():
    torch.manual_seed(0)
    model = MaskRcnn(Pyramid(192), 80, MaskRcnnParams())
    heads = model.roi_heads
    normal = [
        (heads.box_predictor.cls_score, 0.01),
        (heads.box_predictor.bbox_pred, 0.001),
        (model.rpn.head.conv[0][0], 0.01),
        (heads.mask_predictor.conv5_mask, math.sqrt(2 / (256 * 2 * 2))),  # Kaiming, fan_out
    ]
    for layer, std in normal:
        assert layer.weight.std().item() == pytest.approx(std, rel=0.02)
    fpn = model.fpn
    xavier = [(fpn.inner_blocks[0][0], 192 + 256), (fpn.layer_blocks[0][0], 9 * 512)]
    xavier += [(heads.box_head.fc6, 256 * 49 + 1024)]
    for layer, fans in xavier:  # U(-b, b), b² = 6 / (fan_in + fan_out)
        assert layer.weight.abs().max().item() == pytest.approx(math.sqrt(6 / fans), rel=0.01)
    biases = [p for name, p in model.named_parameters() if name.endswith("bias") and not name.startswith("backbone")]
    assert not any(bias.any() for bias in biases)


def test_anchors_by_hand():
    """800 x 1344 pixels: 25 rows of P5 leave 13 of P6, of stride 64; sides are not rounded."""
    grids = [(200, 336), (100, 168), (50, 84), (25, 42), (13, 21)]
    maps = [torch.zeros(2, 1, *grid, dtype=torch.bfloat16) for grid in grids]
    of_images = Anchors(8.0)(ImageList(torch.zeros(2, 3, 800, 1344), [(800, 1333), (750, 1344)]), maps)
    assert len(of_images) == 2 and of_images[0].shape == (3 * (67_200 + 16_800 + 4_200 + 1_050 + 273), 4)
    flat, square, tall = of_images[1][:3].tolist()
    w, h = 32 * math.sqrt(2), 32 / math.sqrt(2)
    assert square == [-16, -16, 16, 16]
    assert flat == pytest.approx([-w / 2, -h / 2, w / 2, h / 2])
    assert tall == pytest.approx([-h / 2, -w / 2, h / 2, w / 2])
    assert of_images[0][4].tolist() == [4 - 16, -16, 4 + 16, 16]  # the next one is a stride to the right
    assert of_images[0][-2].tolist() == [20 * 64 - 256, 12 * 64 - 256, 20 * 64 + 256, 12 * 64 + 256]


@pytest.mark.parametrize("high, low, least", [(0.7, 0.3, 0.3), (0.5, 0.5, 0.5)])
def test_assignment_by_the_rule_in_loops(high, low, least):
    rng = np.random.default_rng(0)
    for _ in range(50):
        ious = rng.integers(0, rng.integers(4, 21), (rng.integers(1, 5), 12)) / 20  # coarse, so that there are ties
        expected = []
        for column in ious.T:
            expected.append(int(column.argmax()) if column.max() >= high else -1 if column.max() < low else -2)
        for truth, row in enumerate(ious):
            for box in range(12):
                if row.max() >= least and row[box] == row.max():
                    expected[box] = truth
        assert IouMatcher(high, low, min_quality=least)(torch.tensor(ious)).tolist() == expected


def test_proposal_losses_by_hand():
    """Two images of three anchors: 2 positive, 3 negative, 1 ignored; fewer than are sampled, so all of the five count."""
    network = ProposalNetwork(SMALL)
    labels = [torch.tensor([1.0, 0.0, -1.0]), torch.tensor([0.0, 1.0, 0.0])]
    wanted = [torch.zeros(3, 4), torch.ones(3, 4)]
    nines = [9.0] * 4
    deltas = torch.tensor([[0.5, -0.5, 0.0, 2.0], nines, nines, nines, [1.0, 1.0, 1.0, 0.0], nines])
    objectness = torch.tensor([0.0, 0.0, 9.0, 0.0, math.log(3), 0.0])[:, None]
    loss_cls, loss_box = network.compute_loss(objectness, deltas, labels, wanted)
    assert float(loss_cls) == pytest.approx((4 * math.log(2) + math.log(4 / 3)) / 5)
    assert float(loss_box) == pytest.approx((0.5 + 0.5 + 2.0 + 1.0) / 5)


def test_box_losses_by_hand():
    """Three proposals, classes 0 to 2: the box of the right class counts, divided by all proposals."""
    logits = torch.tensor([[0.0, 0.0, 0.0], [0.0, math.log(2), 0.0], [0.0, 0.0, 0.0]])
    deltas = torch.full((3, 12), 9.0)
    deltas[1, 4:8] = torch.tensor([1.0, 0.0, -3.0, 0.0])
    deltas[2, 8:12] = 0.25
    loss_cls, loss_box = mask_rcnn.box_losses(logits, deltas, torch.tensor([0, 1, 2]), torch.zeros(3, 4))
    assert float(loss_cls) == pytest.approx((2 * math.log(3) + math.log(2)) / 3)
    assert float(loss_box) == pytest.approx((4.0 + 1.0) / 3)


def test_level_of_a_box():
    """floor(log2(side / 56)) of four levels: each map holds its level, so that a pooled value is one."""
    maps = {str(level): torch.full((2, 1, 512 >> level, 512 >> level), float(level)) for level in range(5)}
    sides = [10, 56, 111, 112, 223, 224, 447, 448, 896, 1500]
    boxes = torch.tensor([[100.0, 200.0, 100 + side, 200 + side] for side in sides])
    pooled = PyramidRoiAlign(7)(maps, [boxes[:4], boxes[4:]], [(2048, 2048)] * 2)
    assert pooled.shape == (10, 1, 7, 7)
    assert pooled[:, 0, 3, 3].tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3, 3]
    oblong = torch.tensor([[0.0, 0.0, 112.0 * 4, 112.0 / 4]])  # of the area of a square of 112
    assert float(PyramidRoiAlign(7)(maps, [oblong, oblong[:0]], [(2048, 2048)] * 2)[0, 0, 3, 3]) == 1


def test_pooled_values_are_of_the_pixels_under_the_bins():
    """A map whose cells hold the x (y) of their centres pools to the x (y) of the bins' centres."""
    centres = 4 * (torch.arange(64) + 0.5)
    x, y = centres.expand(64, 64), centres[:, None].expand(64, 64)
    maps = {str(level): torch.zeros(1, 2, 64 >> level, 64 >> level) for level in range(5)}
    maps["0"] = torch.stack([x, y])[None]
    pooled = PyramidRoiAlign(7)(maps, [torch.tensor([[30.0, 21.0, 100.0, 105.0]])], [(256, 256)])[0]
    bins = (torch.arange(7) + 0.5) / 7
    expected = torch.stack([(30 + 70 * bins).expand(7, 7), (21 + 84 * bins)[:, None].expand(7, 7)])
    torch.testing.assert_close(pooled, expected)


def test_mask_targets_are_the_mask_under_the_box():
    """Bins of one pixel see that pixel; bins of 2 x 2 are 1 where at least two are."""
    masks = torch.randint(0, 2, (2, 80, 90), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    boxes = torch.tensor([[4.0, 6.0, 32.0, 34.0], [10.0, 20.0, 66.0, 76.0]])
    one, two = mask_rcnn.mask_targets(masks, boxes, torch.tensor([1, 0]), 28)
    assert torch.equal(one, masks[1, 6:34, 4:32].float())
    blocks = masks[0, 20:76, 10:66].float().reshape(28, 2, 28, 2).sum((1, 3))
    assert torch.equal(two, (blocks >= 2).float())
    assert (blocks == 2).any()


def test_pasted_masks_are_sampled_at_pixel_centres():
    """Bilinearly on the grid of the mask, with zeros around it, for boxes anywhere."""
    masks = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(0)) ** 0.3
    boxes = torch.tensor([[2.0, 3.0, 10.0, 7.0], [-3.3, 4.6, 7.7, 13.1], [11.2, -2.0, 18.0, 9.4]])
    expected = np.zeros((3, 12, 15), dtype=bool)
    for number, (x1, y1, x2, y2) in enumerate(boxes.tolist()):
        columns, rows = (np.arange(15) + 0.5 - x1) / (x2 - x1), (np.arange(12) + 0.5 - y1) / (y2 - y1)
        places = 4 * np.stack(np.meshgrid(rows, columns, indexing="ij")) - 0.5
        expected[number] = map_coordinates(masks[number].double(), places, order=1, mode="grid-constant") >= 0.5
    assert expected.any((1, 2)).all() and not expected.all((1, 2)).any()
    np.testing.assert_array_equal(mask_rcnn.paste_masks(masks, boxes, (12, 15)).numpy(), expected)


@torch.no_grad()
def test_detections_are_those_of_torchvision():
    """Its forward pass over the same parts."""
    model = build(min_score=0.0).eval()
    batch, features = model._features(next(samples()))
    first = torch.tensor([(4.0, 4.0, 42.0, 33.0), (28.0, 28.0, 80.0, 62.0), (0.0, 0.0, 20.0, 20.0)])
    found = []
    for forward in (type(model.roi_heads).forward, RoIHeads.forward):
        proposals = [first, torch.tensor([(1.0, 2.0, 30.0, 31.0)])]
        found.append(forward(model.roi_heads, features, proposals, batch.image_sizes)[0])
    for own, their in zip(*found, strict=True):
        assert len(own["boxes"]) and torch.equal(own["masks"], their.pop("masks")[:, 0])
        assert all(torch.equal(own[name], value) for name, value in their.items())


def test_images_are_normalised_and_padded():
    model = build()
    images, _ = samples()
    batch, maps = model._features(images)
    assert batch.tensors.shape == (2, 3, 96, 96) and batch.image_sizes == [(70, 90), (33, 64)]
    pixel = float(images[1][2, 32, 63])
    assert float(batch.tensors[1, 2, 32, 63]) == pytest.approx((pixel / 255 - 0.406) / 0.225, abs=1e-5)
    for padding in (batch.tensors[0, :, 70:], batch.tensors[0, :, :, 90:], batch.tensors[1, :, 33:]):
        assert not padding.any()
    assert [tuple(level.shape[-2:]) for level in maps.values()] == [(24, 24), (12, 12), (6, 6), (3, 3), (2, 2)]
    *_, p5, p6 = maps.values()
    assert torch.equal(p6, p5[:, :, ::2, ::2])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_reach_every_parameter(dtype):
    model = build(seed=1)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        losses = model(*samples())
        outputs = model.rpn.head([torch.rand(1, 8, 4, 4)])
    assert {level.dtype for output in outputs for level in output} == {torch.float32}
    assert set(losses) == {"loss_rpn_cls", "loss_rpn_box", "loss_cls", "loss_box", "loss_mask"}
    assert all(loss.dtype == torch.float32 and loss > 0 for loss in losses.values())
    sum(losses.values()).backward()
    assert list_unreached(model) == []


def test_a_batch_without_objects_trains():
    """Nothing is positive: boxes and masks add no loss, and all parameters still get a gradient."""
    model = build()
    losses = model(*zip(sample(33, 64, [])))
    assert losses["loss_rpn_box"] == losses["loss_box"] == losses["loss_mask"] == 0 and losses["loss_cls"] > 0
    sum(losses.values()).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_nothing_found_is_no_error():
    model = build(min_score=1.0).eval()
    (found,) = model.detect([sample(33, 64, [])[0]], [(50, 60)])
    shapes = {"boxes": (0, 4), "scores": (0,), "labels": (0,), "masks": (0, 50, 60)}
    assert {name: tuple(value.shape) for name, value in found.items()} == shapes


def test_detections_are_in_pixels_of_the_picture():
    model = build().eval()
    images, _ = samples()
    own = model.detect(images, [(70, 90), (33, 64)])
    larger = model.detect(images, [(140, 270), (33, 64)])
    assert own[0]["masks"].shape == (100, 70, 90) and larger[0]["masks"].shape == (100, 140, 270)
    assert own[0]["masks"].dtype == torch.bool and own[0]["labels"].min() >= 1 and own[0]["labels"].max() <= 3
    torch.testing.assert_close(larger[0]["boxes"], own[0]["boxes"] * torch.tensor([3.0, 2.0, 3.0, 2.0]))
    torch.testing.assert_close(larger[1], own[1])
    height, width = own[0]["boxes"][:, 3], own[0]["boxes"][:, 2]
    assert height.max() <= 70 and width.max() <= 90  # and not the padded 96


def test_a_hierarchical_backbone_is_trained_and_detects():
    torch.manual_seed(1)
    model = MaskRcnn(build_swin(), 3, SMALL)
    assert [block[0].in_channels for block in model.fpn.inner_blocks] == [8, 16, 32, 64]
    sum(model(*samples()).values()).backward()
    # the last level is exempt, since not every draw samples an anchor of it
    assert list_unreached(model, "layer_blocks.3.0.weight", "layer_blocks.3.0.bias") == []
    scales = {group["lr_scale"] for group in param_groups_layer_decay(model, layer_decay=0.5)}
    assert max(scales) == 1 and len(scales) > 4
    with torch.no_grad():
        (found,) = model.eval().detect([sample(64, 96, [])[0]], [(50, 60)])
    assert found["masks"].shape[1:] == (50, 60)
