"""Segmentation for the training frame and for `repro predict`. Imports nothing heavy at the top."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...core.config import build
from ...core.record import atomic
from ..spec import Datasets, Predictor, Setting, Sight, TaskSpec
from .params import SegmentationTransformSettings, SegmentParams, UperNetParams


class Segment(TaskSpec):
    """Semantic segmentation with UperNet."""

    name = "segment"
    params = SegmentParams
    scores: ClassVar[Mapping[str, str]] = {"miou_percent": "mIoU", "aacc_percent": "pixels"}

    def open_datasets(self, data: Any, params: SegmentParams) -> Datasets:
        from .data import AdeSegmentation

        splits = {split: data.open_pairs(split) for split in ("train", "val")}
        train = AdeSegmentation(splits["train"], params.transform, training=True, seed=params.seeds[0])
        val = AdeSegmentation(splits["val"], params.transform, training=False)
        return Datasets(train=train, val=val, classes=tuple(splits["train"].classes), alone=True)

    def build_model(self, params: SegmentParams, classes: Sequence[str], init: Path | None, where: str) -> tuple[Any, Mapping[str, str]]:
        from ..dense.backbone import build_backbone
        from .upernet import build_upernet

        backbone, report = build_backbone(params, init, where, "each")
        crop, stride = params.transform.crop_size, params.transform.stride
        return build_upernet(backbone, params.upernet, num_classes=len(classes), window=crop, stride=stride), report

    def build_task(self, model: Any, train: Any, val: Any, datasets: Datasets, params: SegmentParams, setting: Setting) -> Any:
        from .task import Segmentation

        return Segmentation(
            model,
            train,
            val,
            batch_size=params.batch_size,
            transform=params.transform,
            classes=datasets.classes,
            device=setting.device,
            ranks=setting.ranks,
        )

    def describe(self, model: Any, params: SegmentParams, classes: Sequence[str]) -> dict[str, Any]:
        from ..dense.backbone import describe_dense

        return describe_dense(self.name, model.backbone, {"upernet": params.upernet, "transform": params.transform}, classes)

    def summarise(self, task: Any, last: Mapping[str, float]) -> dict[str, Any]:
        scores = {name: last[name] for name in ("miou_percent", "macc_percent", "aacc_percent", "val_images")}
        reasons = {f"{name}_reason": "neither labelled nor predicted" for name, iou in task.class_iou_percent.items() if iou is None}
        return scores | {"class_iou_percent": {**task.class_iou_percent, **reasons}}

    def score_without_learning(self, task: Any, data: Any) -> dict[str, float] | None:
        """The scores of Otsu's threshold with the class of the most similar training example, and the commonest other class elsewhere."""
        if data.manifest.generated is None:
            return None
        import numpy as np
        import torch

        from ..dense.backbone import read_examples
        from ..dense.otsu import OtsuBaseline
        from .data import IGNORED
        from .task import measure

        annotations = data.open_instances("train")
        train, val = task.train.dataset.pairs, task.val.dataset.pairs
        baseline, objects = OtsuBaseline(read_examples(annotations)), len(annotations.classes)
        counts = sum(np.bincount(train.read(index)[1].ravel(), minlength=IGNORED + 1) for index in range(len(train)))
        background = int(counts[objects + 1 :].argmax()) + objects  # the first classes are the objects

        def label_map(image: Any, size: tuple[int, int]) -> Any:
            return baseline.label_map(image[0], background + 1) - 1

        def batches() -> Iterator[Any]:
            for pixels, values in map(val.read, range(len(val))):  # at their own size
                yield torch.from_numpy(pixels).permute(2, 0, 1)[None], torch.from_numpy(values - np.uint8(1))[None]

        return measure(label_map, batches(), len(task.classes))[0]

    def draw_examples(self, task: Any, model: Any, params: SegmentParams, folder: Path) -> None:
        from ..dense.backbone import EXAMPLES
        from .draw import draw, predict

        dataset = task.val.dataset
        for index in range(min(EXAMPLES, len(dataset))):
            image, _ = dataset[(0, index)]
            labels = predict(model, image, params.transform, task.device)
            with atomic(folder / f"{dataset.name(index).rpartition('.')[0]}.png") as temporary:
                draw(image, labels, task.classes).save(temporary, "PNG")

    def open_predictor(self, checkpoint: Any, device: Any, min_score: float) -> Predictor:
        from ..dense.backbone import load_dense
        from .draw import draw, predict
        from .upernet import build_upernet

        names = checkpoint.classes
        settings = build(SegmentationTransformSettings, checkpoint.task["transform"], f"{checkpoint.path}: transform")
        widths = build(UperNetParams, checkpoint.task["upernet"], f"{checkpoint.path}: upernet")
        window = {"window": settings.crop_size, "stride": settings.stride}
        model = load_dense(checkpoint, "each", lambda backbone: build_upernet(backbone, widths, num_classes=len(names), **window)).to(
            device
        )

        def look(pictures: Sequence[Any]) -> list[Sight]:
            return [look_at(picture) for picture in pictures]

        def look_at(picture: Any) -> Sight:
            labels = predict(model, picture, settings, device)
            shares = {names[index]: round(float((labels == index).float().mean()), 4) for index in labels.unique().tolist()}
            shares = dict(sorted(shares.items(), key=lambda item: -item[1]))
            return Sight(", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items()), shares, draw(picture, labels, names))

        return Predictor(prepare=lambda picture: picture, look=look)


SPEC = Segment()
