"""How fast a model trains on one GPU: as the user says, as a record says, or as its multiply-adds suggest."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any, Literal

from ..core.errors import UserError

PASSES = 3  # a training step computes about three forward passes: one forward, and two for the gradients
FLOPS_PER_MAC = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSpeed:
    """Training images per second on one GPU; `note` says where they come from, and is empty where the user gave them."""

    img_per_s: float
    source: Literal["given", "measured", "estimated"]
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """What one GPU is assumed to achieve.

    Args:
        given: `model` or `model[option=value]` -> training images per second.
        tflops: the GPU's peak in TFLOP/s, for models of unknown speed.
        utilisation: the share of that peak, in (0, 1], that training reaches.

    Raises:
        UserError: a number out of range.
    """

    given: dict[str, float] = dataclasses.field(default_factory=dict)
    tflops: float = 312.0
    utilisation: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.tflops < math.inf:
            raise UserError(f"plan: --tflops {self.tflops}: expected a number above 0")
        if not 0 < self.utilisation <= 1:
            raise UserError(f"plan: --utilisation {self.utilisation}: expected a share above 0 and at most 1")

    def find_given(self, model: str, key: str) -> TrainingSpeed | None:
        """The speed that the user gave for a model, named with or without its options; None without one."""
        rate = self.given.get(key, self.given.get(model))
        return None if rate is None else TrainingSpeed(img_per_s=rate, source="given")

    def estimate(self, macs: int) -> TrainingSpeed:
        """The speed that follows from the multiply-adds of the forward pass of one image."""
        rate = self.tflops * 1e12 * self.utilisation / (PASSES * FLOPS_PER_MAC * macs)
        peak = f"{self.tflops:g} TFLOP/s and {100 * self.utilisation:g} % utilisation"
        note = f"estimated: not measured; from multiply-adds at {peak}, with {PASSES} forward passes per training step"
        return TrainingSpeed(img_per_s=rate, source="estimated", note=note)


def find_measured(results: Any, key: str, stages: Collection[str]) -> TrainingSpeed | None:
    """The speed of a model in the records of training; the slowest of several, None without one.

    Args:
        results: the records, a `repro.report` Results; those of training lie at results/measured/<device>/<stage>/<cell>.json.
        key: the model's name with its options, see `Results.model_key`.
        stages: those whose records count. Records of a CPU never do: they say nothing about GPU-hours.
    """
    found = []
    for record in results.sources:
        rate, processes = record.metrics.get("throughput_img_per_s"), record.metrics.get("processes")
        # only records of training state their processes
        if not rate or not processes or not record.device.startswith("cuda") or record.path.split("/")[-2] not in stages:
            continue
        if results.model_key(record.metrics, record.path) == key:
            each = rate / processes
            note = f"measured: {key}, {each:,.0f} img/s in training on {record.device} ({record.path})"
            found.append(TrainingSpeed(img_per_s=each, source="measured", note=note))
    return min(found, key=lambda speed: speed.img_per_s, default=None)


def parse_rates(texts: Sequence[str]) -> dict[str, float]:
    """Read `MODEL=NUMBER` texts as images per second by model; anything else is a `UserError`."""
    rates = {}
    for text in texts:
        model, _, number = text.rpartition("=")
        try:
            rates[model] = float(number)
        except ValueError:
            rates[model] = math.nan
        if not model or not 0 < rates[model] < math.inf:
            raise UserError(f"plan: --img-per-s {text}: expected MODEL=NUMBER with a number above 0")
    return rates
