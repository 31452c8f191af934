"""COCO's numbers by hand, on hand-made annotation files; the task that trains, evaluates and draws."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from repro.core.errors import UserError
from repro.core.ranks import Ranks
from repro.data.coco import read_instances
from repro.tasks.detection.draw import draw
from repro.tasks.detection.evaluate import coco_metrics, count_confusion, to_results
from repro.tasks.detection.mask_rcnn import MaskRcnn
from repro.tasks.detection.params import MaskRcnnParams
from repro.tasks.detection.spec import Detect
from repro.tasks.detection.task import Detection
from tests.conftest import ROOT, run_python
from tests.data_sets.made import annotation, block, compressed, image, write_coco
from tests.tasks.backbones import Pyramid, fit
from tests.tasks.test_detection_model import sample

IDS = (7, 9)  # the file's ids of label 1 and 2


def write(root, objects, size=100):
    """What is read of two images; objects are (image id from 1, category id, x, y, w, h, iscrowd), masks full boxes."""
    annotations = []
    for number, (image_id, category, x, y, w, h, crowd) in enumerate(objects, 1):
        mask = compressed(block(x, y, x + w, y + h, size, size)) if crowd else None
        annotations.append(annotation(number, image_id, category, [x, y, w, h], mask, iscrowd=crowd))
    images = [image(number, size, size) for number in (1, 2)]
    categories = [{"id": number, "name": f"kind {number}"} for number in sorted(IDS)]
    write_coco(root, {"images": images, "annotations": annotations, "categories": categories}, "val2017")
    return read_instances(root, "val")


def detections(*found, size=(100, 100)):
    """What a model gives for one image; found are (label, score, x, y, w, h)."""
    boxes = [(x, y, x + w, y + h) for _, _, x, y, w, h in found]
    masks = np.array([block(*box, *size) for box in boxes], dtype=bool).reshape(-1, *size)
    labels, scores = torch.tensor([each[0] for each in found]).long(), torch.tensor([each[1] for each in found])
    boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    return {"boxes": boxes, "labels": labels, "scores": scores, "masks": torch.from_numpy(masks)}


def of_both(metrics, name):
    return [metrics[f"{name}_{kind}_percent"] for kind in ("box", "mask")]


TRUTH = [(1, 7, 10, 10, 20, 20, 0), (1, 9, 40, 40, 50, 50, 0), (2, 7, 10, 10, 20, 20, 0)]


# 20 x 20 pixels are small and 50 x 50 medium; nothing is large
KNOWN = ("ap", "ap50", "ap75", "ap_small", "ap_medium")
RIGHT = [(1, 0.9, 10, 10, 20, 20), (2, 0.8, 40, 40, 50, 50)], [(1, 0.7, 10, 10, 20, 20)]
# objects, detections in each image, and the metrics of boxes and of masks
BY_HAND = {
    "all are right": (TRUTH, RIGHT, dict.fromkeys(KNOWN, (100, 100))),
    "nothing is found": (TRUTH, [[], []], dict.fromkeys(KNOWN, (0, 0))),
    # IoU 320 / 480, right up to 0.65, and then half the recall: 51 of 101 points
    "one of two is shifted by 4 of 20 pixels": (
        [TRUTH[0], TRUTH[2]],
        [[(1, 0.9, 10, 10, 20, 20)], [(1, 0.8, 14, 10, 20, 20)]],
        {"ap": [100 * (4 * 1 + 6 * 51 / 101) / 10] * 2, "ap50": [100, 100], "ap75": [5100 / 101, 5100 / 101]},
    ),
    # the object is missed, and the other class gets a false detection before its right one: precision 1/2
    "a wrong class counts in both": (
        TRUTH[:2],
        [[(2, 0.9, 10, 10, 20, 20), (2, 0.8, 40, 40, 50, 50)]],
        {"ap50": [25, 25]},
    ),
}


@pytest.mark.parametrize(("objects", "found", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_metrics_by_hand(tmp_path, capfd, objects, found, expected):
    """Of results in plain types, for JSON; what has no objects is unknown, and nothing is printed."""
    shown = [(number, detections(*of_image)) for number, of_image in enumerate(found, 1)]
    results = [row for number, each in shown for row in to_results(number, each, IDS)]
    assert json.loads(json.dumps(results)) == results
    metrics = coco_metrics(write(tmp_path, objects), results)
    assert "ap_large_box_percent" not in metrics and capfd.readouterr().out == ""
    for name, numbers in expected.items():
        assert of_both(metrics, name) == pytest.approx(numbers), name


def test_confusion_by_hand(tmp_path):
    """Label 1 found as 2 and missed once, label 2 found twice, once wrongly; what lies in a crowd counts nowhere."""
    crowd = (2, 7, 50, 50, 50, 50, 1)
    truth = write(tmp_path, [*TRUTH, crowd])
    right = (2, 0.8, 40, 40, 50, 50), (2, 0.7, 42, 40, 50, 50)
    first = detections((2, 0.9, 12, 10, 20, 20), *right, (1, 0.4, 10, 10, 20, 20))
    second = detections((1, 0.9, 60, 60, 30, 30), (1, 0.9, 20, 10, 20, 20))  # half of the object, an IoU of a third
    results = to_results(1, first, IDS) + to_results(2, second, IDS)
    assert count_confusion(truth, results, 0.5) == [[0, 1, 1], [0, 1, 0], [1, 1, 0]]
    assert count_confusion(truth, [], 0.5) == [[0, 0, 2], [0, 0, 1], [0, 0, 0]]


def test_each_detection_takes_the_free_object_that_it_overlaps_most(tmp_path):
    truth = write(tmp_path, [(1, 7, 10, 10, 20, 20, 0), (1, 9, 14, 10, 20, 20, 0)])
    # IoU with the first and the second: 16/24 and 1 for the better one; then 18/22 and 18/22, of which one is taken
    results = to_results(1, detections((2, 0.8, 12, 10, 20, 20), (2, 0.9, 14, 10, 20, 20)), IDS)
    assert count_confusion(truth, results, 0.5) == [[0, 1, 0], [0, 1, 0], [0, 0, 0]]


def test_a_mask_is_as_large_as_itself(tmp_path):
    """A false detection of a small mask in a medium box: among small objects it counts for masks, and not for boxes."""
    truth = write(tmp_path, TRUTH[:1])
    found = detections((1, 0.9, 35, 35, 60, 60), (1, 0.8, 10, 10, 20, 20))
    found["masks"][0, 45:] = False
    metrics = coco_metrics(truth, to_results(1, found, IDS))
    assert of_both(metrics, "ap_small") == pytest.approx([100, 50])


@pytest.mark.parametrize("image_id, ids, said", [(9, IDS, "image_id 9"), (1, (99, 9), "category_id 99")])
def test_results_of_other_images_are_refused(tmp_path, image_id, ids, said):
    truth = write(tmp_path, TRUTH)
    with pytest.raises(UserError, match=said):
        coco_metrics(truth, to_results(image_id, detections((1, 0.9, 10, 10, 20, 20)), ids))


TINY = {"fpn_channels": 16, "box_channels": 64, "mask_channels": 16, "mask_layers": 1, "anchor_scale": 4}
TINY |= {"rpn_samples": 64, "roi_samples": 32, "train_candidates": 100, "test_candidates": 100}
TINY = MaskRcnnParams(**TINY, train_proposals=50, test_proposals=50, min_score=0.0)
PICTURES = [(1, [(1, 8, 8, 28, 24), (2, 34, 30, 60, 58)]), (2, [(2, 4, 30, 32, 60)])]


class Batches(list):
    """One batch of the two pictures of 64 x 64, on a rank its own one; annotated at twice their size in a file."""

    def __init__(self, truth, ranks):
        self.dataset = SimpleNamespace(instances=truth)
        batch = []
        for image_id, objects in PICTURES[ranks.rank :: ranks.world_size]:
            image, target = sample(64, 64, objects, seed=image_id)
            shade = torch.tensor([0, 80, 200])[(target["masks"] * target["labels"][:, None, None]).amax(0)]
            image = (image // 8 + shade).byte()
            batch.append((image, {**target, "image_id": image_id, "original_size": (128, 128)}))
        super().__init__([tuple(map(list, zip(*batch)))])

    def batches(self, epoch, start=0):
        yield from self[start:]

    def files(self, epoch, number):
        return [f"{target['image_id']}.png" for target in self[number][1]]


def annotated(root):
    objects = [(image_id, *shown) for image_id, of_image in PICTURES for shown in of_image]
    doubled = [(n, IDS[k - 1], 2 * x, 2 * y, 2 * (right - x), 2 * (low - y), 0) for n, k, x, y, right, low in objects]
    return write(root, doubled, size=128)


def make_task(truth, ranks=Ranks()):
    torch.manual_seed(0)
    model, batches = MaskRcnn(Pyramid(16), 2, TINY), Batches(truth, ranks)
    return Detection(model, batches, {"val": batches}, batch_size=2, device=torch.device("cpu"), ranks=ranks)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """A task whose model has seen two pictures many times, and its losses."""
    task = make_task(annotated(tmp_path_factory.mktemp("task")))
    losses = fit(task, task.train[0], lr=3e-3, steps=60)
    task.model.eval()
    return task, losses


def test_two_pictures_are_learnt(learnt):
    """All losses fall, and the objects are found with their masks, in pixels of the annotation file."""
    task, losses = learnt
    assert losses[0]["loss"] == pytest.approx(sum(value for name, value in losses[0].items() if name != "loss"))
    # that of boxes begins where none was proposed
    for name in ("loss", "loss_rpn_cls", "loss_rpn_box", "loss_cls", "loss_mask"):
        assert np.mean([step[name] for step in losses[-10:]]) < 0.8 * losses[0][name], name
    metrics = task.evaluate(task.model, "val")
    assert metrics["held_out_images"] == 2 and "ap_large_box_percent" not in metrics
    assert metrics["ap50_box_percent"] > 90 and metrics["ap50_mask_percent"] > 90


@pytest.fixture
def shown():
    """Two objects that lie side by side."""
    return detections((1, 0.9, 8, 34, 22, 26), (2, 0.4, 36, 36, 24, 24), size=(64, 64))


def test_a_drawing_shows_detections(shown):
    """Masks above the score colour their pixels and no others; the picture is enlarged."""
    grey = torch.randint(0, 256, (1, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    drawn = draw(grey.expand(3, -1, -1), shown, ["square", "disc"], min_score=0.5)
    assert drawn.size == (512, 512)
    coloured = np.ptp(np.asarray(drawn)[4::8, 4::8].astype(int), axis=2) > 40  # the picture itself is grey
    # the labels are written at the upper edges of the boxes
    assert coloured[36:60, 10:30].all() and not coloured[36:, 36:].any()
    plain = np.asarray(draw(grey.expand(3, -1, -1), shown, ["square", "disc"], min_score=1.01))
    np.testing.assert_array_equal(plain[::8, ::8, 0], grey[0].numpy())


def test_of_masks_that_overlap_the_one_with_the_highest_score_is_on_top(shown):
    shown["masks"][:] = False
    shown["masks"][0, 20:60, 20:60] = shown["masks"][1, 40:60, 10:60] = True
    drawn = np.asarray(draw(torch.full((3, 64, 64), 90, dtype=torch.uint8), shown, ["square", "disc"], min_score=0.3))
    above, both, below = drawn[8 * 30 + 4, 8 * 50 + 4], drawn[8 * 56 + 4, 8 * 50 + 4], drawn[8 * 56 + 4, 8 * 14 + 4]
    assert np.array_equal(above, both) and not np.array_equal(both, below) and np.ptp(below.astype(int)) > 40


class Largest(TorchDispatchMode):
    """Record the bytes of the largest tensor that is made."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, made.nbytes if isinstance(made, torch.Tensor) else 0)
        return made


def test_a_drawing_takes_no_more_memory_than_the_masks():
    rows = [(1, 0.9 - 0.01 * place, 20 * place, 8, 22, 26) for place in range(20)]
    found = detections(*rows, size=(512, 512))
    with Largest() as largest:
        draw(torch.zeros(3, 512, 512, dtype=torch.uint8), found, ["square"])
    assert largest.bytes <= found["masks"].nbytes


def test_the_truth_is_drawn_whole(shown):
    grey = torch.full((3, 64, 64), 90, dtype=torch.uint8)
    del shown["scores"]
    target = {**shown, "masks": shown["masks"].byte(), "image_id": 3, "original_size": (64, 64)}
    drawn = np.asarray(Detect().draw_truth(grey, target, ["square", "disc"]))[4::8, 4::8].astype(int)
    assert (np.ptp(drawn, axis=2) > 40)[shown["masks"].any(0).numpy()].mean() > 0.9


def test_parts_of_a_batch_and_what_is_said_of_one(tmp_path):
    task = make_task(annotated(tmp_path))
    (batch,) = task.batches(0, 0)
    first, second = task.split(batch, 2)
    assert [target["image_id"] for _, targets in (first, second) for target in targets] == [1, 2]
    assert torch.equal(second[0][0], batch[0][1])
    assert task.describe(0, 0) == ["1.png", "2.png"]


ON_RANKS = """
import sys, torch
from pathlib import Path
from repro.core.ranks import Ranks, joined
from repro.data.coco import read_instances
from tests.tasks.test_detection_task import make_task

folder, found = Path(sys.argv[1]), []
with joined("cpu") as ranks:
    for own in (Ranks(), ranks):
        task = make_task(read_instances(folder, "val"), own)
        task.model.load_state_dict(torch.load(folder / "weights.pt"))
        found.append(task.evaluate(task.model.eval(), "val"))
assert ranks.world_size == 2 and found[0] == found[1], found
assert found[0]["held_out_images"] == 2 and found[0]["ap_box_percent"] > 10, found
"""


@pytest.mark.slow
def test_two_ranks_evaluate_what_one_does(learnt, tmp_path):
    torch.save(learnt[0].model.state_dict(), tmp_path / "weights.pt")
    (tmp_path / "program.py").write_text(ON_RANKS)
    annotated(tmp_path)
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node=2".split()
    done = run_python(*torchrun, str(tmp_path / "program.py"), str(tmp_path), PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-3000:]
