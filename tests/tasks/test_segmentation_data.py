"""Segmentation samples against mmsegmentation's own data set and pipeline, and by hand."""

import numpy as np
import pytest
import torch
from PIL import Image

from repro.data.ade20k import AdePairs
from repro.data.classification import ToInput
from repro.data.loader import own_randomness
from repro.tasks.segmentation.data import IGNORED, AdeSegmentation, resize
from repro.tasks.segmentation.openmmlab import mmengine, mmseg, transforms
from repro.tasks.segmentation.params import SegmentationTransformSettings
from tests.data_sets.made import write_ade20k
from tests.slow import first

SMALL = {"scale": (128, 64), "crop_size": 64, "stride": 43}


def samples(root, training=True, seed=0, split="train", **settings):
    settings = SegmentationTransformSettings(**SMALL | settings)
    return AdeSegmentation(AdePairs(root, split), settings, training=training, seed=seed)


LOAD, LABELS, PACK = ({"type": name} for name in ("LoadImageFromFile", "LoadAnnotations", "PackSegInputs"))
# the pipelines of mmsegmentation's configuration for ADE20K, at our sizes
TRAINING = [
    LOAD,
    LABELS,
    {"type": "RandomResize", "scale": SMALL["scale"], "ratio_range": (0.5, 2.0), "keep_ratio": True},
    {"type": "RandomCrop", "crop_size": (64, 64), "cat_max_ratio": 0.75},
    {"type": "RandomFlip", "prob": 0.5},
    {"type": "PhotoMetricDistortion"},
    PACK,
]
RESIZE = {"type": "Resize", "scale": SMALL["scale"], "keep_ratio": True}
EVALUATION = [LOAD, RESIZE, {"type": "ResizeToMultiple", "size_divisor": 32}, LABELS, PACK]


def theirs(root, split, pipeline):
    prefix = {"img_path": f"images/{split}", "seg_map_path": f"annotations/{split}"}
    with mmengine.registry.DefaultScope.overwrite_default_scope("mmseg"):
        return mmseg.datasets.ADE20KDataset(data_root=str(root), data_prefix=prefix, pipeline=pipeline)


@pytest.mark.parametrize("epoch", first([1, 0, 2]))
def test_training_samples_are_mmsegmentations_and_follow_from_seed_epoch_and_index(ade20k, epoch):
    ours, reference = samples(ade20k, seed=5), theirs(ade20k, "training", TRAINING)
    colours = {"mean": [123.675, 116.28, 103.53], "std": [58.395, 57.12, 57.375], "bgr_to_rgb": True}
    preprocessor = mmseg.models.SegDataPreProcessor(**colours, size=(64, 64), pad_val=0, seg_pad_val=255)
    padded = 0
    for index in range(len(ours)):
        image, labels = ours[epoch, index]
        with own_randomness(5, epoch, index):
            raw = reference[index]
        height, width = raw["inputs"].shape[1:]
        found = preprocessor({"inputs": [raw["inputs"]], "data_samples": [raw["data_samples"]]}, training=True)
        inputs = ToInput(SegmentationTransformSettings(), torch.device("cpu"))(image[None])
        shown = (..., slice(height), slice(width))
        torch.testing.assert_close(inputs[shown], found["inputs"][shown], rtol=0, atol=1e-5)
        # the recipe's padding is 0 behind the normalisation; half a grey level is at most 0.009 of a standard deviation
        torch.testing.assert_close(inputs, found["inputs"], rtol=0, atol=0.009)
        assert torch.equal(labels.long(), found["data_samples"][0].gt_sem_seg.data[0])
        padded += height < 64 or width < 64
    assert padded


def test_evaluation_samples_are_mmsegmentations(ade20k):
    ours, reference = samples(ade20k, training=False, split="val"), theirs(ade20k, "validation", EVALUATION)
    for index in range(len(ours)):
        image, labels = ours[0, index]
        found = reference[index]
        assert torch.equal(image, found["inputs"].flip(0))
        assert torch.equal(labels.long(), found["data_samples"].gt_sem_seg.data[0])
        pixels, _ = ours.pairs.read(index)
        resized = resize(torch.from_numpy(pixels).permute(2, 0, 1), SegmentationTransformSettings(**SMALL))
        assert torch.equal(resized, image)
    # 64x102 by the ratio, then up to 32s; and the file's size
    assert image.shape == (3, 64, 128) and labels.shape == (40, 64)


def test_colours_stay_where_they_are_not_to_change(ade20k):
    """Without a change of size, a flip or a crop either, a training sample is the picture itself."""
    still = {"ratio": (1.0, 1.0), "hflip": 0.0, "crop_size": 128, "stride": 128, "photometric": False}
    dataset, enlarge = samples(ade20k, **still), transforms.Resize(scale=SMALL["scale"], keep_ratio=True)
    for index in range(len(dataset)):
        expected = enlarge({"img": dataset.pairs.read(index)[0]})["img"]
        height, width = expected.shape[:2]
        np.testing.assert_array_equal(dataset[0, index][0][:, :height, :width].permute(1, 2, 0), expected)


def test_a_crop_that_one_class_fills_is_drawn_again(tmp_path):
    """On the left a quarter has many classes, the rest has one: most crops of a third of the width see that one alone."""
    write_ade20k(tmp_path, classes=20, pairs=1, size=(32, 192))
    path = tmp_path / "annotations/training/ADE_00000000.png"
    labels = np.array(Image.open(path))
    labels[:, 48:] = 1
    Image.fromarray(labels).save(path)
    still = {"scale": (192, 32), "ratio": (1.0, 1.0), "crop_size": 32, "stride": 32}

    def crowded(cat_max_ratio):
        dataset, count = samples(tmp_path, cat_max_ratio=cat_max_ratio, **still), 0
        for epoch in range(40):
            found = dataset[epoch, 0][1]
            counts = found[found != IGNORED].unique(return_counts=True)[1]
            count += len(counts) < 2 or counts.max() >= 0.75 * counts.sum()
        return count

    # 121 of 161 places are crowded; all of 11 draws are so in one case of 23
    assert crowded(1.0) > 20 and crowded(0.75) < 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": (512, 2048)}, "scale: expected [long, short]"),
        ({"ratio": (2.0, 0.5)}, "ratio: expected [smallest, largest]"),
        ({"stride": 65}, "leaves gaps"),
        ({"mean": (0.5,)}, "mean: expected three"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError) as error:
        SegmentationTransformSettings(**SMALL | settings)
    assert message in str(error.value)
