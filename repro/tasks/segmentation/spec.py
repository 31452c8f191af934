"""The segmentation task for training and for `repro predict`. Imports nothing heavy at the top."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ..dense.base import DenseSpec, describe_confusion
from ..spec import Datasets, Sight
from .params import SegmentParams


class Segment(DenseSpec):
    """Semantic segmentation with UperNet."""

    name = "segment"
    params = SegmentParams
    head = "upernet"
    features = "each"
    scores: ClassVar[Mapping[str, str]] = {"miou_percent": "mIoU", "aacc_percent": "pixels"}

    def open_datasets(self, data: Any, params: SegmentParams, held_out: Sequence[str]) -> Datasets:
        from .data import AdeSegmentation

        pairs = data.open_pairs("train")
        train = AdeSegmentation(pairs, params.transform, training=True, seed=params.seeds[0])
        others = {
            split: AdeSegmentation(data.open_pairs(split), params.transform, training=False) for split in held_out
        }
        return Datasets(train=train, held_out=others, classes=tuple(pairs.classes), alone=True)

    def build_head(self, backbone: Any, params: Any, num_classes: int) -> Any:
        from .upernet import build_upernet

        windows = {"window": params.transform.crop_size, "stride": params.transform.stride}
        return build_upernet(backbone, params.upernet, num_classes=num_classes, **windows)

    def build_task(self, datasets: Datasets, params: SegmentParams, **parts: Any) -> Any:
        from .task import Segmentation

        return Segmentation(transform=params.transform, classes=datasets.classes, **parts)

    def summarise(self, task: Any, last: Mapping[str, float]) -> dict[str, Any]:
        scores = {name: last[name] for name in ("miou_percent", "macc_percent", "aacc_percent", "held_out_images")}
        reasons = {
            f"{name}_reason": "neither labelled nor predicted"
            for name, iou in task.class_iou_percent.items()
            if iou is None
        }
        iou = {"class_iou_percent": {**task.class_iou_percent, **reasons}}
        return scores | iou | describe_confusion(task.classes, task.confusion, "pixels")

    def score_baseline(self, baseline: Any, task: Any, instances: Any) -> dict[str, float]:
        """Score the baseline; pixels outside the objects get the most frequent other class of the training images."""
        import numpy as np
        import torch

        from .data import IGNORED
        from .task import score_areas

        train, judged = (loader.dataset.pairs for loader in (task.train, task.held_out[task.reported_split]))
        objects = len(instances.classes)
        # values of the label maps, from 0 for no label on
        counts = sum(np.bincount(train.read(index)[1].ravel(), minlength=IGNORED + 1) for index in range(len(train)))
        background = int(counts[objects + 1 :].argmax()) + objects  # the objects are the first classes

        # as `score_areas` calls a model: of an image (1, 3, H, W); here `size` is the image's own
        def label_map(image: Any, size: tuple[int, int]) -> Any:
            # the baseline's labels begin at 1, and those of a label map at 0
            return baseline.label_map(image[0], background + 1) - 1

        def batches() -> Iterator[Any]:
            for pixels, values in map(judged.read, range(len(judged))):
                # as in `AdeSegmentation`, value 1 is class 0, and 0 wraps around to IGNORED
                yield torch.from_numpy(pixels).permute(2, 0, 1)[None], torch.from_numpy(values - np.uint8(1))[None]

        return score_areas(label_map, batches(), len(task.classes))[0]

    def name_example(self, dataset: Any, index: int, target: Any) -> str:
        return dataset.name(index).rpartition(".")[0]

    def draw_truth(self, picture: Any, target: Any, names: Sequence[str]) -> Any:
        from torchvision.transforms.functional import resize

        from .draw import draw

        return draw(resize(picture, list(target.shape)), target.long(), names)

    def look(self, model: Any, settings: Any, names: Sequence[str], min_score: float, picture: Any) -> Sight:
        from .draw import draw, predict

        labels = predict(model, picture, settings)
        # share of the picture's pixels by class, the largest first
        shares = {names[index]: round(float((labels == index).float().mean()), 4) for index in labels.unique().tolist()}
        shares = dict(sorted(shares.items(), key=lambda item: -item[1]))
        return Sight(
            ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items()),
            shares,
            draw(picture, labels, names),
        )


SPEC = Segment()
