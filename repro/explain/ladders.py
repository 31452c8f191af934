"""Probes of the ladders: a trained ViT³ or LaCT with another inner loop, its weights unchanged, and the inner losses of
every layer.

See `repro.explain.probes` for those of Vittt, whose operator is observed instead.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..models import fast_weights, inner
from .probes import parse_probe

_PREFIXES = ("ladder_vit3_", "lact_")  # of registered names


def has_ladder(model: str) -> bool:
    """Whether a model of this registered name is probed here."""
    return model.startswith(_PREFIXES)


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
    def observe(self, model: nn.Module) -> Iterator[None]:
        """Note the losses of all inner loops of a model that run inside the context, but for those of convolutions."""
        layers = [layer for layer in model.modules() if hasattr(layer, "learn")]
        for layer in layers:
            layer.learn = functools.partial(self._learn, layer.learn)
        try:
            yield
        finally:
            for layer in layers:
                del layer.learn  # that of its class is there again

    @property
    def means(self) -> tuple[float, float]:
        """Before and after."""
        return self.before / self.count, self.after / self.count

    def _learn(
        self, run: Callable[..., Tensor], loop: Any, weights: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> Tensor:
        if isinstance(loop, fast_weights.FastLoop):
            at_end = dataclasses.replace(loop, order="end")
            self._note(fast_weights.read_out(weights, k), run(at_end, weights, k, k, v, *rest), v)
        elif not inner.MODELS[loop.model].on_grid:
            self._note(inner.read_out(loop, weights, k, *rest), run(loop, weights, k, k, v, *rest), v)
        return run(loop, weights, q, k, v, *rest)

    def _note(self, before: Tensor, after: Tensor, v: Tensor) -> None:
        self.before -= (before * v).sum(dtype=torch.float64).item()
        self.after -= (after * v).sum(dtype=torch.float64).item()
        self.count += v[..., 0].numel()
