"""The classification task for training and for `repro predict`. Imports nothing heavy at the top."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...core.errors import UserError
from ..spec import Datasets, Predictor, Sight, TaskSpec
from .params import ClassifierParams

TOP = 5  # classes that a prediction lists
_BATCH = 32  # pictures per batch of a prediction


class Classify(TaskSpec):
    """Image classification."""

    name = "classify"
    params = ClassifierParams
    scores: ClassVar[Mapping[str, str]] = {"top1_percent": "top-1", "top5_percent": "top-5"}

    def open_datasets(self, data: Any, params: ClassifierParams, held_out: Sequence[str]) -> Datasets:
        from ...data.classification import ImageFolder, eval_transform, train_transform

        tree, seed = data.open_tree(), params.seeds[0]
        train = ImageFolder(
            tree, "train", train_transform(params.transform), seed=seed, max_unreadable=params.max_unreadable
        )
        others = {split: ImageFolder(tree, split, eval_transform(params.transform)) for split in held_out}
        return Datasets(train=train, held_out=others, classes=tuple(tree.classes), groups=data.groups(tree))

    def build_model(
        self, params: ClassifierParams, classes: Sequence[str], init: Path | None, where: str
    ) -> tuple[Any, Mapping[str, str]]:
        from ...models.registry import build_model

        try:
            model = build_model(params.model, **self._options(params, classes), drop_path_rate=params.drop_path)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
        if init is None:
            return model, {}
        from ...models.checkpoints import initialise, open_weights

        return model, initialise(model, open_weights(init, model=params.model), classes)

    def build_task(self, datasets: Datasets, params: ClassifierParams, **parts: Any) -> Any:
        from .task import Classification

        return Classification(params=params, num_classes=len(datasets.classes), **parts)

    def describe(self, model: Any, params: ClassifierParams, classes: Sequence[str]) -> dict[str, Any]:
        options, preprocessing = self._options(params, classes), params.transform.preprocessing()
        return {"name": params.model, "options": options, "preprocessing": preprocessing, "classes": list(classes)}

    def summarise(self, task: Any, last: Mapping[str, float]) -> dict[str, Any]:
        # `top5_percent` is absent for five classes or fewer
        names = ("top1_percent", "top5_percent", "held_out_loss", "held_out_images")
        found = {name: last[name] for name in names if name in last}
        if not math.isfinite(found["held_out_loss"]):
            found |= {"held_out_loss": None, "held_out_loss_reason": "not finite"}
        return found | {"unreadable_images": len(task.train.dataset.unreadable())}

    def count_flop_per_image(self, task: Any) -> float | None:
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        image = task.eval_input(task.train.dataset[(0, 0)][0].unsqueeze(0))  # the key is (epoch, index)
        model = task.model.eval()
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            model(image)
        return counter.get_total_flops()

    def open_predictor(self, checkpoint: Any, device: Any, min_score: float) -> Predictor:
        import torch
        from torchvision.transforms.functional import to_pil_image

        from ...data.classification import ToInput, eval_transform
        from ...data.settings import TransformSettings
        from ...models.weights import require_finite_outputs

        model, settings = checkpoint.build().to(device), TransformSettings.from_preprocessing(checkpoint.preprocessing)
        transform, to_input = eval_transform(settings), ToInput(settings, device)
        require_finite_outputs(model, checkpoint.where)

        @torch.inference_mode()
        def look(pictures: Sequence[Any]) -> list[Sight]:
            """List the `TOP` likeliest classes of prepared pictures, uint8 (3, S, S), with their probabilities."""
            ranked = model(to_input(torch.stack(list(pictures)))).float().softmax(1).cpu().sort(descending=True)
            seen = []
            for shares, indices in zip(ranked.values[:, :TOP].tolist(), ranked.indices[:, :TOP].tolist(), strict=True):
                best = [
                    {"class": checkpoint.classes[i], "share": round(share, 4)}
                    for share, i in zip(shares, indices, strict=True)
                ]
                seen.append(
                    Sight(", ".join(f"{each['class']} {100 * each['share']:.1f} %" for each in best), best, None)
                )
            return seen

        return Predictor(
            prepare=lambda picture: transform(to_pil_image(picture)), look=look, batch_size=_BATCH, draws=False
        )

    @staticmethod
    def _options(params: ClassifierParams, classes: Sequence[str]) -> dict[str, Any]:
        """Return the arguments that build the model again from a weights file, thus without `drop_path_rate`."""
        return {**params.options, "num_classes": len(classes), "img_size": params.transform.image_size}


SPEC = Classify()
