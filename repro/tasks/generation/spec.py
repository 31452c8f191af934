"""The generation task for training and for `repro generate`. Imports nothing heavy at the top."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...core.errors import UserError
from ..spec import Datasets, Predictor, TaskSpec
from .params import GenerateParams

SHOWN_CLASSES, SHOWN_OF_EACH = 10, 8  # rows (one for each class) and columns of the picture of examples


class Generate(TaskSpec):
    """Class-conditional image generation; a lower held-out loss is better."""

    name = "generate"
    params = GenerateParams
    scores: ClassVar[Mapping[str, str]] = {"held_out_mse": "held-out MSE of the noise"}

    def open_datasets(self, data: Any, params: GenerateParams, held_out: Sequence[str]) -> Datasets:
        from .data import open_split

        if (data.kind == "latents") != (params.transform.latents is not None):
            what = (
                "holds latents; set transform.latents"
                if data.kind == "latents"
                else f"holds pictures ({data.kind}); leave it out"
            )
            raise UserError(f"transform.latents: {params.data} {what}")
        tree, seed = data.open_tree(), params.seeds[0]
        train = open_split(
            tree, "train", params.transform, training=True, seed=seed, max_unreadable=params.max_unreadable
        )
        others = {split: open_split(tree, split, params.transform) for split in held_out}
        return Datasets(train=train, held_out=others, classes=tuple(tree.classes), groups=data.groups(tree))

    def build_model(
        self, params: GenerateParams, classes: Sequence[str], init: Path | None, where: str
    ) -> tuple[Any, Mapping[str, str]]:
        from ...models.registry import build_denoiser

        try:
            model = build_denoiser(params.model, **params.model_options, num_classes=len(classes))
            model.grid_of(*params.transform.shape[1:])
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
        if init is None:
            return model, {}
        from .data import fill

        return model, fill(model, init, params.model)

    def build_task(self, datasets: Datasets, params: GenerateParams, **parts: Any) -> Any:
        from .task import Generation

        judge = None
        if params.judge is not None:
            from .data import open_judge

            # this draws random numbers after the seed was set; results of cells with a judge depend on it
            judge = open_judge(params, datasets.classes, parts["device"])
        return Generation(params=params, num_classes=len(datasets.classes), judge=judge, **parts)

    def describe(self, model: Any, params: GenerateParams, classes: Sequence[str]) -> dict[str, Any]:
        transform = dataclasses.asdict(params.transform)
        preprocessing = {"input_size": [params.transform.channels, *[params.transform.image_size] * 2]}
        options = {**params.model_options, "num_classes": len(classes)}
        described = {"name": params.model, "options": options, "preprocessing": preprocessing, "classes": list(classes)}
        # `inference.generate.open_drawer` reads these; without `sampling` it would take the defaults, without an error
        return described | {
            "task": {"name": self.name, "transform": transform, "sampling": dataclasses.asdict(params.sampling)}
        }

    def summarise(self, task: Any, last: Mapping[str, float]) -> dict[str, Any]:
        # those that the training has: `held_out_vb` is of a learned variance, and the percentages are of a judge
        kept = ("held_out_mse", "held_out_vb", "judged_percent", "real_judged_percent", "held_out_images")
        found: dict[str, Any] = {name: last[name] for name in kept if name in last}
        if not math.isfinite(found["held_out_mse"]):
            raise UserError("held_out_mse: not finite")
        if task.judge is None:
            found |= {"judged_percent": None, "judged_percent_reason": "no judge is named"}
        else:
            found |= {"judge_hash": task.judge.weights_hash, "judged_samples": task.params.judge.samples}
        sampling = dataclasses.asdict(task.params.sampling)
        return found | {"sampling": sampling, "unreadable_images": len(task.train.dataset.unreadable())}

    def draw_examples(
        self, task: Any, model: Any, params: GenerateParams, classes: Sequence[str], folder: Path
    ) -> None:
        if params.transform.latents is not None:  # no decoder is at hand
            return
        import torch

        from .data import save_grid

        rows = min(SHOWN_CLASSES, len(classes))
        labels = torch.arange(rows, device=task.device).repeat_interleave(SHOWN_OF_EACH)
        save_grid(task.draw(model, labels, range(len(labels))), SHOWN_OF_EACH, folder / "samples.png")

    def open_predictor(self, checkpoint: Any, device: Any, min_score: float) -> Predictor:
        raise UserError(
            f"{checkpoint.path}: holds a denoiser, which sees nothing in pictures; `repro generate --weights` draws with it"
        )


SPEC = Generate()
