"""The detection task for training and for `repro predict`. Imports nothing heavy at the top."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..dense.base import EXAMPLES_MIN_SCORE, DenseSpec, describe_confusion
from ..spec import Datasets, Sight
from .params import DetectParams


class Detect(DenseSpec):
    """Object detection and instance segmentation with Mask R-CNN."""

    name = "detect"
    params = DetectParams
    head = "mask_rcnn"
    features = "last"
    scores: ClassVar[Mapping[str, str]] = {
        "ap_box_percent": "box AP",
        "ap50_box_percent": "box AP50",
        "ap_mask_percent": "mask AP",
        "ap50_mask_percent": "mask AP50",
    }

    def open_datasets(self, data: Any, params: DetectParams, held_out: Sequence[str]) -> Datasets:
        from ...data.detection import CocoDetection

        instances = data.open_instances("train")
        train = CocoDetection(instances, params.transform, training=True, seed=params.seeds[0])
        others = {
            split: CocoDetection(data.open_instances(split), params.transform, training=False) for split in held_out
        }
        return Datasets(train=train, held_out=others, classes=tuple(instances.classes), groups=train.groups, alone=True)

    def build_head(self, backbone: Any, params: Any, num_classes: int) -> Any:
        from .mask_rcnn import MaskRcnn

        return MaskRcnn(backbone, num_classes, params.mask_rcnn)

    def build_task(self, datasets: Datasets, params: DetectParams, **parts: Any) -> Any:
        from .task import Detection

        return Detection(**parts)

    def summarise(self, task: Any, last: Mapping[str, float]) -> dict[str, Any]:
        scores = {name: value for name, value in last.items() if name.endswith("_percent") or name == "held_out_images"}
        classes = [*task.held_out[task.reported_split].dataset.instances.classes, "nothing"]
        return scores | describe_confusion(
            classes, task.confusion or [], f"objects with a score of at least {EXAMPLES_MIN_SCORE}"
        )

    def score_baseline(self, baseline: Any, task: Any, instances: Any) -> dict[str, float]:
        import torch

        from ...data.pixels import read_pixels
        from .evaluate import coco_metrics, to_results

        truth, results = task.held_out[task.reported_split].dataset.instances, []
        for place, image_id in enumerate(truth.image_ids.tolist()):
            image = torch.from_numpy(read_pixels(truth.path(place), truth.max_pixels)).permute(2, 0, 1)
            results += to_results(image_id, baseline.detect(image), truth.category_ids)
        return coco_metrics(truth, results)

    def name_example(self, dataset: Any, index: int, target: Any) -> str:
        return str(target["image_id"])

    def draw_truth(self, picture: Any, target: Any, names: Sequence[str]) -> Any:
        from .draw import draw

        return draw(picture, {**target, "masks": target["masks"].bool()}, names)

    def look(self, model: Any, settings: Any, names: Sequence[str], min_score: float, picture: Any) -> Sight:
        from ...data.detection import resize
        from .draw import draw

        # boxes and masks in pixels of the picture as it came, which is also what is drawn on
        (seen,) = model.detect([resize(picture, settings)], [tuple(picture.shape[1:])])
        kept = seen["scores"] >= min_score
        objects = [
            {"class": names[label - 1], "score": round(score, 4), "box_xyxy": [round(side, 1) for side in box]}
            for box, label, score in zip(
                *(seen[key][kept].tolist() for key in ("boxes", "labels", "scores")), strict=True
            )
        ]
        listed = ", ".join(f"{each['class']} {each['score']:.2f}" for each in objects)
        return Sight(
            listed or f"nothing with a score of {min_score} or more", objects, draw(picture, seen, names, min_score)
        )


SPEC = Detect()
