"""Detection for the training frame and for `repro predict`. Imports nothing heavy at the top."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...core.config import build
from ...core.record import atomic
from ...data.settings import DetectionTransformSettings
from ..spec import Datasets, Predictor, Setting, Sight, TaskSpec
from .params import DetectParams, MaskRcnnParams


class Detect(TaskSpec):
    """Object detection and instance segmentation with Mask R-CNN."""

    name = "detect"
    params = DetectParams
    scores: ClassVar[Mapping[str, str]] = {
        "ap_box_percent": "box AP",
        "ap50_box_percent": "box AP50",
        "ap_mask_percent": "mask AP",
        "ap50_mask_percent": "mask AP50",
    }

    def open_datasets(self, data: Any, params: DetectParams) -> Datasets:
        from ...data.detection import CocoDetection

        splits = {split: data.open_instances(split) for split in ("train", "val")}
        train = CocoDetection(splits["train"], params.transform, training=True, seed=params.seeds[0])
        val = CocoDetection(splits["val"], params.transform, training=False)
        return Datasets(train=train, val=val, classes=tuple(splits["train"].classes), groups=train.groups, alone=True)

    def build_model(self, params: DetectParams, classes: Sequence[str], init: Path | None, where: str) -> tuple[Any, Mapping[str, str]]:
        from ..dense.backbone import build_backbone
        from .mask_rcnn import MaskRcnn

        backbone, report = build_backbone(params, init, where, "last")
        return MaskRcnn(backbone, len(classes), params.mask_rcnn), report

    def build_task(self, model: Any, train: Any, val: Any, datasets: Datasets, params: DetectParams, setting: Setting) -> Any:
        from .task import Detection

        truth = datasets.val.instances
        return Detection(
            model,
            train,
            val,
            batch_size=params.batch_size,
            annotations=truth.file,
            category_ids=truth.category_ids,
            device=setting.device,
            ranks=setting.ranks,
        )

    def describe(self, model: Any, params: DetectParams, classes: Sequence[str]) -> dict[str, Any]:
        from ..dense.backbone import describe_dense

        return describe_dense(self.name, model.backbone, {"mask_rcnn": params.mask_rcnn, "transform": params.transform}, classes)

    def summarise(self, task: Any, last: Mapping[str, float]) -> dict[str, Any]:
        return {name: value for name, value in last.items() if name.endswith("_percent") or name == "val_images"}

    def score_without_learning(self, task: Any, data: Any) -> dict[str, float] | None:
        """The scores of Otsu's threshold, with the class of the most similar training example."""
        if data.manifest.generated is None:
            return None
        import torch

        from ...data.pixels import read_pixels
        from ..dense.backbone import read_examples
        from ..dense.otsu import OtsuBaseline
        from .evaluate import coco_metrics, to_results

        baseline, val = OtsuBaseline(read_examples(task.train.dataset.instances)), task.val.dataset.instances
        results = []
        for place, image_id in enumerate(val.image_ids.tolist()):
            image = torch.from_numpy(read_pixels(val.path(place))).permute(2, 0, 1)  # at its own size, as the annotations are
            results += to_results(image_id, baseline.detect(image), task.category_ids)
        scores = coco_metrics(task.annotations, results)
        return {name: value for name, value in scores.items() if value is not None}

    def draw_examples(self, task: Any, model: Any, params: DetectParams, folder: Path) -> None:
        from ..dense.backbone import EXAMPLES
        from .draw import draw

        dataset = task.val.dataset
        for index in range(min(EXAMPLES, len(dataset))):
            image, target = dataset[(0, index)]
            (found,) = model.detect([image], [tuple(image.shape[1:])])
            with atomic(folder / f"{target['image_id']}.png") as temporary:
                draw(image, found, dataset.instances.classes).save(temporary, "PNG")

    def open_predictor(self, checkpoint: Any, device: Any, min_score: float) -> Predictor:
        from ...data.detection import resize
        from ..dense.backbone import load_dense
        from .draw import draw, predict
        from .mask_rcnn import MaskRcnn

        names = checkpoint.classes
        settings = build(DetectionTransformSettings, checkpoint.task["transform"], f"{checkpoint.path}: transform")
        sizes = build(MaskRcnnParams, checkpoint.task["mask_rcnn"], f"{checkpoint.path}: mask_rcnn")
        model = load_dense(checkpoint, "last", lambda backbone: MaskRcnn(backbone, len(names), sizes)).to(device)

        def look(pictures: Sequence[Any]) -> list[Sight]:
            return [look_at(picture) for picture in pictures]

        def look_at(picture: Any) -> Sight:
            (seen,) = predict(model, [picture], lambda image: resize(image, settings))
            kept = seen["scores"] >= min_score
            objects = [
                {"class": names[label - 1], "score": round(score, 4), "box_xyxy": [round(side, 1) for side in box]}
                for box, label, score in zip(*(seen[key][kept].tolist() for key in ("boxes", "labels", "scores")), strict=True)
            ]
            listed = ", ".join(f"{each['class']} {each['score']:.2f}" for each in objects)
            return Sight(listed or f"nothing with a score of {min_score} or more", objects, draw(picture, seen, names, min_score))

        return Predictor(prepare=lambda picture: picture, look=look)


SPEC = Detect()
