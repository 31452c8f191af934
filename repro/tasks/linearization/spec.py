"""The linearisation task for training: a classifier that starts from a softmax ViT's weights. Imports nothing heavy."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import UserError
from ..classification.spec import Classify
from ..spec import Datasets
from .params import LinearizeParams


class Linearize(Classify):
    """Image classification by a student of a softmax ViT; its weights file is like any classifier's."""

    name = "linearize"
    params = LinearizeParams

    def build_model(
        self, params: LinearizeParams, classes: Sequence[str], init: Path | None, where: str
    ) -> tuple[Any, Mapping[str, str]]:
        from ...models.checkpoints import has_classes, open_weights
        from ...models.linearize import freeze_inherited, inherit, read_shell
        from ...models.t5 import T5

        teacher = open_weights(init, model=params.teacher).require_classifier()
        # all of the ViT but its attention: sizes, and the weights that the student inherits
        shell = read_shell(teacher.build(), str(init))
        if not has_classes(teacher, classes):
            shell = dataclasses.replace(shell, num_classes=0)  # of other classes: the student gets a new head
        student, _ = super().build_model(params, classes, None, where)
        if not isinstance(student, T5) or student.inner == "softmax":
            raise UserError(
                f"{where}.model: {params.model} has softmax attention or none; expected a t5 with another inner model"
            )
        report = inherit(student, shell, f"{init} as {params.model}")
        if params.freeze:
            try:
                freeze_inherited(student, shell)
            except ValueError as error:
                raise UserError(f"{where}: {error}") from None
        return student, report

    def build_task(self, datasets: Datasets, params: LinearizeParams, **parts: Any) -> Any:
        from .task import Linearization

        # the model has its initial weights here even when a run resumes: the saved state is loaded later
        start = copy.deepcopy(parts["model"]).cpu()
        return Linearization(start=start, params=params, num_classes=len(datasets.classes), **parts)

    def summarise(self, task: Any, last: Mapping[str, float]) -> dict[str, Any]:
        """Return the metrics of a classifier, and `untrained_top1_percent` of the student before its first step."""
        untrained = task.evaluate(task.start.to(task.device).eval(), task.reported_split)
        return super().summarise(task, last) | {"untrained_top1_percent": untrained["top1_percent"]}


SPEC = Linearize()
