"""Probes of the ladders: a trained ViT³ or LaCT with another inner loop, its weights unchanged, and the inner losses of every layer.

See `repro.explain.probes` for those of Vittt, whose operator is observed instead.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..models import fast_weights, inner, lact, vit3
from .probes import parse_probe

# the beginning of a registered name -> the module whose layers call `learn`
_MODULES: Mapping[str, ModuleType] = {"ladder_vit3_": vit3, "lact_": lact}


def has_ladder(model: str) -> bool:
    """Whether a model of this registered name is probed here."""
    return model.startswith(tuple(_MODULES))


def change_options(options: Mapping[str, Any], probe: str) -> dict[str, Any]:
    """The options that build the model with the probe's inner loop.

    Raises:
        ValueError: an unknown probe, or one that would undo the step that the model was trained with.
    """
    kind, steps = parse_probe(probe)
    if kind == "steps":
        return {**options, "inner_steps": steps}
    if (step := options.get("step", "own")) != "own":
        raise ValueError(f"probe {probe}: the model was trained with step {step}; probe one of step own, or the steps")
    return {**options, "step": kind}


@dataclasses.dataclass
class InnerLosses:
    """Means over images, heads, tokens and layers of −⟨F(k), v⟩, before and after the inner steps."""

    before: float = 0.0
    after: float = 0.0
    count: int = 0

    @contextlib.contextmanager
    def observe(self, model: str) -> Iterator[None]:
        """While it lasts, note the losses of all layers of the model of this registered name that run; convolutions do not count.

        The function `learn` that these layers call is replaced, and put back at the end.
        """
        module = next(module for prefix, module in _MODULES.items() if model.startswith(prefix))
        run = module.learn

        def learn(loop: Any, weights: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
            if isinstance(loop, fast_weights.FastLoop):
                at_end = dataclasses.replace(loop, order="end")
                self._note(fast_weights.read_out(weights, k), run(at_end, weights, k, k, v, *rest), v)
            elif not inner.MODELS[loop.model].on_grid:
                self._note(inner.read_out(loop, weights, k, *rest), run(loop, weights, k, k, v, *rest), v)
            return run(loop, weights, q, k, v, *rest)

        module.learn = learn
        try:
            yield
        finally:
            module.learn = run

    @property
    def means(self) -> tuple[float, float]:
        """Before and after."""
        return self.before / self.count, self.after / self.count

    def _note(self, before: Tensor, after: Tensor, v: Tensor) -> None:
        self.before -= (before * v).sum(dtype=torch.float64).item()
        self.after -= (after * v).sum(dtype=torch.float64).item()
        self.count += v[..., 0].numel()
