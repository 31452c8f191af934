"""The segmentation task: metrics by hand, training and evaluation through the loaders, drawings, mmsegmentation."""

import re

import numpy as np
import pytest
import torch

from repro.core.errors import UserError
from repro.core.ranks import Ranks
from repro.data.ade20k import AdePairs
from repro.data.loader import EvalLoader, TrainLoader
from repro.tasks.segmentation.data import IGNORED, AdeSegmentation
from repro.tasks.segmentation.draw import draw, predict
from repro.tasks.segmentation.params import SegmentationTransformSettings
from repro.tasks.segmentation.spec import Segment
from repro.tasks.segmentation.task import Segmentation, score_areas
from repro.tasks.segmentation.upernet import build_upernet
from tests.conftest import ROOT, run_python
from tests.tasks.backbones import NARROW, Pyramid, fit

CPU = torch.device("cpu")
SETTINGS = SegmentationTransformSettings(scale=(64, 32), ratio=(1.0, 2.0), crop_size=32, stride=21)


def test_areas_are_added_up_over_images_before_any_quotient():
    """First image: 0 and 1 part at column 20, predicted at 16; second: all 1, eight columns predicted as 2."""
    labels, predicted = torch.zeros(2, 2, 32, 32, dtype=torch.int64)
    labels[0, :, 20:], predicted[0, :, 16:] = 1, 1
    labels[1], predicted[1] = 1, 1
    predicted[1, :, :8] = 2
    labels[:, 0] = IGNORED
    batches = zip(predicted[:, None], labels[:, None])
    metrics, iou, confusion = score_areas(lambda image, size: image[0], batches, 4)
    # in columns: class 0 meets 16 of 20; class 1 meets 12 + 24 of 16 + 24 predicted and 12 + 32 labelled; class 2 has
    # no label
    assert iou[:3] == pytest.approx([100 * 16 / 20, 100 * 36 / 48, 0]) and iou[3] is None
    assert metrics["miou_percent"] == pytest.approx(100 * (16 / 20 + 36 / 48 + 0) / 3)
    assert metrics["macc_percent"] == pytest.approx(100 * (16 / 20 + 36 / 44) / 2)
    assert metrics["aacc_percent"] == pytest.approx(100 * 52 / 64)
    # 31 labelled rows of each column
    assert confusion == [[31 * n for n in row] for row in ([16, 4, 0, 0], [0, 36, 8, 0], [0, 0, 0, 0], [0, 0, 0, 0])]


def test_more_pixels_than_fp32_counts_are_counted():
    """Of 4100 columns of one class, one is taken for another."""
    label = torch.zeros(1, 4100, 4100, dtype=torch.uint8)
    predicted = label[0].clone()
    predicted[:, 0] = 1
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # each thread would have a counter of its own
    metrics, iou, _ = score_areas(lambda image, size: predicted, [(None, label)], 2)
    torch.set_num_threads(threads)
    assert metrics["aacc_percent"] == pytest.approx(100 * 4099 / 4100, abs=1e-9) == iou[0]


def open_pairs(root, split="train", training=False):
    return AdeSegmentation(AdePairs(root, split), SETTINGS, training=training)


def make_task(root, model=None, held_out="val", **rank):
    torch.manual_seed(0)
    train, val = open_pairs(root, training=True), open_pairs(root, held_out)
    model = model or build_upernet(Pyramid(), NARROW, num_classes=5, window=32, stride=21)
    loaders = TrainLoader(train, batch_size=2, seed=0), {"val": EvalLoader(val, batch_size=1, **rank)}
    return Segmentation(model, *loaders, batch_size=2, transform=SETTINGS, classes=train.pairs.classes, device=CPU)


@pytest.fixture
def task(ade20k):
    return make_task(ade20k)


def test_a_batch_can_be_learned_by_heart(task):
    batch = next(task.batches(0, 0))
    first, *_, last = fit(task, batch, lr=0.02, steps=61)
    assert set(first) == {"loss", "loss_decode", "loss_aux", "accuracy_percent"}
    assert first["loss"] == pytest.approx(first["loss_decode"] + first["loss_aux"])
    labelled = (batch[1] != IGNORED).float().mean().item()
    assert first["loss_decode"] == pytest.approx(labelled * np.log(5), rel=0.1)  # the classifiers start small
    assert all(p.grad is not None for p in task.model.parameters())
    assert last["loss"] < 0.7 * first["loss"] and last["accuracy_percent"] > first["accuracy_percent"] + 15


def test_every_held_out_image_counts_once_and_at_its_own_size(task, ade20k):
    task.model.eval()
    metrics = task.evaluate(task.model, "val")
    assert metrics["held_out_images"] == 3 and set(task.class_iou_percent) == {f"class {k}" for k in range(1, 6)}
    right = labelled = 0
    for index in range(3):
        pixels, values = task.held_out["val"].dataset.pairs.read(index)
        predicted = predict(task.model, torch.from_numpy(pixels).permute(2, 0, 1), SETTINGS)
        right += (predicted.numpy() + 1 == values).sum()
        labelled += (values > 0).sum()
    assert metrics["aacc_percent"] == pytest.approx(100 * right / labelled)
    parts = [make_task(ade20k, rank=rank, world_size=2) for rank in range(2)]
    assert [part.evaluate(part.model.eval(), "val")["held_out_images"] for part in parts] == [2, 1]


def test_batches_are_split_and_named(task):
    batch, data = next(task.batches(0, 1)), task.train.dataset
    names = task.describe(0, 1)
    for image, labels, name in zip(*batch, names, strict=True):
        (index,) = [index for index in range(len(data)) if data.name(index) == name]
        assert all(map(torch.equal, (image, labels), data[0, index]))
    doubled = tuple(torch.cat([part, part]) for part in batch)
    halves = task.split(doubled, 2)
    assert [len(images) for images, _ in halves] == [2, 2] and torch.equal(halves[1][1], batch[1])
    with pytest.raises(UserError, match="two images in a forward pass"):
        task.split(batch, 2)
    task.ranks = Ranks(world_size=2)
    with pytest.raises(UserError, match="two images in a forward pass"):
        task.split(batch, 2)
    task.device = torch.device("cuda")
    assert len(task.split(batch, 2)) == 2  # batch norm then sees all ranks


def test_a_drawing_has_the_colours_and_a_legend_of_what_is_there():
    image = torch.full((3, 40, 60), 200, dtype=torch.uint8)
    labels = torch.zeros(40, 60, dtype=torch.int64)
    labels[:, 40:] = 2
    picture = draw(image, labels, ["wall", "building", "sky", *map(str, range(147))])
    # thirteen times as large, so that the short side has 512 pixels; ADE20K's wall is (120, 120, 120) and its sky (6,
    # 230, 230)
    assert picture.height == 520 and picture.width > 13 * 60
    for x, colour in ((100, (120, 120, 120)), (700, (6, 230, 230))):
        mixed = [0.45 * 200 + 0.55 * part for part in colour]
        assert np.abs(np.array(picture.getpixel((x, 260))) - mixed).max() <= 1
    legend = np.asarray(picture)[:, 13 * 60 :].reshape(-1, 3)
    shown = [(legend == colour).all(1).sum() > 100 for colour in ((120, 120, 120), (180, 120, 120), (6, 230, 230))]
    assert shown == [True, False, True]


def test_few_classes_have_colours_that_no_grey_picture_has():
    image = torch.full((3, 32, 36), 128, dtype=torch.uint8)
    labels = torch.arange(18).repeat_interleave(2).expand(32, 36)
    pixels = np.asarray(draw(image, labels, [str(number) for number in range(18)]))[100, : 36 * 16].astype(int)
    colours = {tuple(pixel) for pixel in pixels}
    assert len(colours) == 18 and all(max(colour) - min(colour) > 5 for colour in colours)


def test_the_truth_leaves_unlabelled_pixels_as_they_are():
    """The picture is brought to the size of its label map."""
    image = torch.full((3, 64, 64), 200, dtype=torch.uint8)
    target = torch.zeros(32, 32, dtype=torch.uint8)
    target[:, 16:] = IGNORED
    drawn = Segment().draw_truth(image, target, ["wall", "building", *map(str, range(148))])
    assert drawn.height == 512 and np.array_equal(np.asarray(drawn)[:, 256:512], np.full((512, 256, 3), 200))
    assert np.abs(np.asarray(drawn)[:, :256] - (0.45 * 200 + 0.55 * 120)).max() <= 1


def test_a_picture_without_labels_is_drawn_as_it_is():
    image = torch.full((3, 512, 512), 200, dtype=torch.uint8)
    drawn = np.asarray(draw(image, torch.full((512, 512), IGNORED), ["wall", "sky"]))
    assert drawn.shape[0] == 512 and (drawn[:, :512] == 200).all() and (drawn[:, 512:] == 255).all()


@pytest.mark.slow
def test_mmsegmentations_runner_trains_and_tests_with_the_example(ade20k, tmp_path):
    """The documented configuration at a small size: one step, then the evaluation."""
    program = f"""
from mmengine.config import Config
from mmengine.runner import Runner

config = Config.fromfile({str(ROOT / "docs/examples/upernet_vittt_tiny_ade20k.py")!r})
config.merge_from_dict({{
    "work_dir": {str(tmp_path / "work")!r}, "model.backbone.name": "vittt_nano_patch16_144", "model.backbone.weights": None,
    "model.decode_head.in_channels": [64] * 4, "model.auxiliary_head.in_channels": 64,
    "model.decode_head.channels": 8, "model.auxiliary_head.channels": 8,
    "model.data_preprocessor.size": (64, 64), "model.test_cfg.crop_size": (64, 64), "model.test_cfg.stride": (43, 43),
    "train_cfg.max_iters": 1, "train_cfg.val_interval": 1, "optim_wrapper.type": "OptimWrapper",
    "train_dataloader.dataset.pipeline.2.scale": (128, 64), "train_dataloader.dataset.pipeline.3.crop_size": (64, 64),
    "val_dataloader.dataset.pipeline.1.scale": (128, 64), "param_scheduler.0.start_factor": 1.0,
}}, allow_list_keys=True)
config.optim_wrapper.pop("loss_scale")
for loader in (config.train_dataloader, config.val_dataloader, config.test_dataloader):
    loader.update(num_workers=0, persistent_workers=False)
    loader.dataset.data_root = {str(ade20k)!r}
runner = Runner.from_cfg(config)
before = runner.model.backbone.adapter.level_embed.detach().clone()
runner.train()
assert runner.iter == 1 and type(runner.model.backbone).__name__ == "VitttAdapter"
assert (runner.model.backbone.adapter.level_embed != before).any()
"""
    done = run_python("-c", program, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"Iter\(val\) .*mIoU: \d", done.stdout)
