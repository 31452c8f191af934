"""What the cost functions of the stages share: the rows that they return, and what they may ask."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..core.errors import UserError, did_you_mean
from ..core.paths import Paths
from ..data.cells import manifest_path
from ..data.manifest import Manifest, read_manifest
from ..report.demands import Measurement
from ..report.sources import Results
from .rates import Rates, TrainingSpeed, find_measured

CLASSIFIERS = ("pretrain", "baselines", "ablate")  # the stages that train classifiers, all of them alike


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRow:
    """What a stage or one of its cells costs.

    Args:
        command: what would run it.
        gpu_hours: hours of one GPU; None where unknown.
        disk_gb: the most disk that it occupies, in units of 1e9 bytes; None where unknown.
        basis: how the hours come about.
        note: where a number in `basis` is known from.
        gives: the measurements that it yields, see `repro.report.demands`.
    """

    command: str
    gpu_hours: float | None
    disk_gb: float | None
    basis: str
    note: str = ""
    gives: frozenset[Measurement] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What a training reads: the kind of the data set, its classes and its training images."""

    kind: str
    classes: int
    images: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planner:
    """What the cost function of a stage may ask.

    Args:
        stage: the stage whose cost is asked for.
        paths: the checkout.
        rates: what one GPU is assumed to achieve.
        results: the records of the checkout.
        data: cell of prepare_data -> its params.
        trained: collects the names of the models whose speed was asked for.
    """

    stage: str
    paths: Paths
    rates: Rates
    results: Results
    data: Mapping[str, Any]
    trained: set[str] = dataclasses.field(default_factory=set)

    def command(self, cell: str | None = None) -> str:
        """The command that runs the stage, or one of its cells."""
        return f"dvc repro {self.stage}@{cell}" if cell else f"dvc repro {self.stage}"

    def model_key(self, model: str, options: Mapping[str, Any]) -> str:
        """The name of a model in the ledger: `model[option=value]` without the default options."""
        return self.results.model_key({"model": model, "options": options}, model)

    def find_manifest(self, cell: str) -> Manifest | None:
        """The manifest of a cell of prepare_data; None before it is written."""
        file = manifest_path(self.paths, cell)
        return read_manifest(file) if file.is_file() else None

    def find_data(self, cell: str, name: str) -> TrainingData:
        """What the params of a cell of this stage name as `data`: counts from the manifest, or the expected ones before it is written.

        Raises:
            UserError: prepare_data has no cell of that name.
        """
        if name not in self.data:
            raise UserError(f"{self.stage}.{cell}.data: {name}: prepare_data has no such cell{did_you_mean(name, self.data)}")
        manifest, expected = self.find_manifest(name), self.data[name].expected
        if manifest is None:
            return TrainingData(kind=self.data[name].kind, classes=expected.classes, images=expected.train)
        return TrainingData(kind=self.data[name].kind, classes=len(manifest.classes), images=manifest.splits["train"].images)

    def find_classifier_speed(self, params: Any, macs: int) -> TrainingSpeed:
        """How fast a classifier trains: as given, else as measured, else as `macs`, of one image's forward pass, suggest."""
        key = self.model_key(params.model, params.options)
        self.trained.update((params.model, key))
        given = self.rates.find_given(params.model, key)
        return given or find_measured(self.results, key, CLASSIFIERS) or self.rates.estimate(macs)

    def find_dense_speed(self, params: Any, macs: int) -> TrainingSpeed:
        """How fast this stage trains a detector or segmenter: as measured, else as `macs` suggest; given speeds are of classifiers."""
        key = self.model_key(params.model, params.options)
        return find_measured(self.results, key, (self.stage,)) or self.rates.estimate(macs)

    def count(self, cell: str, counter: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that counts a model's cost; what it refuses is a UserError that names the cell."""
        try:
            return counter(*arguments)
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(f"{self.stage}.{cell}: {error}") from None
