"""How fast a model trains on one GPU: as the user says, as a record says, or as its multiply-adds suggest."""

import dataclasses
import math
from collections.abc import Sequence

from ..core.errors import UserError
from .results import Results

PASSES = 3  # a training step computes about three forward passes: one forth, two back
FLOPS_PER_MAC = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """Training images per second on one GPU; `how`: given, measured or estimated; `note`: the sentence that says where from."""

    img_per_s: float
    how: str
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """What one GPU is taken to do.

    Args:
        given: `model` or `model[option=value]` -> training images per second.
        tflops: for all other models, the GPU's peak in TFLOP/s.
        utilisation: share of that peak, in (0, 1], that training reaches.

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

    def speed(self, results: Results, model: str, key: str, macs: int) -> Speed:
        """Given before measured before estimated.

        Of several measurements the slowest counts; one on a CPU says nothing about GPU-hours and is left out.

        Args:
            results: the records; those of training are results/measured/<device>/pretrain/<cell>.json.
            model, key: its name, and its name with options, see `Results.model_key`.
            macs: multiply-adds of one image's forward pass.
        """
        given = self.given.get(key, self.given.get(model))
        if given is not None:
            return Speed(img_per_s=given, how="given")
        measured = []
        for source in results.sources:
            rate, device = source.metrics.get("throughput_img_per_s"), source.device
            processes = source.metrics.get("processes")  # only records of training have it
            if rate and processes and device.startswith("cuda") and results.model_key(source.metrics, source.path) == key:
                each = rate / processes
                note = f"measured: {key}, {each:,.0f} img/s in training on {device} ({source.path})"
                measured.append(Speed(img_per_s=each, how="measured", note=note))
        if measured:
            return min(measured, key=lambda speed: speed.img_per_s)
        peak = f"{self.tflops:g} TFLOP/s and {100 * self.utilisation:g} % utilisation"
        note = f"estimated: from multiply-adds at {peak}, a training step taken for {PASSES} forward passes; no measurement"
        rate = self.tflops * 1e12 * self.utilisation / (PASSES * FLOPS_PER_MAC * macs)
        return Speed(img_per_s=rate, how="estimated", note=note)


def parse_rates(texts: Sequence[str]) -> dict[str, float]:
    """`MODEL=NUMBER` texts -> images per second; anything else is a `UserError`."""
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
