"""Probes of a trained model: the same weights with a changed inner loop, for `repro explain --probe` and
`repro visualize`.

They follow Liu et al., "Test-Time Training with KV Binding Is Secretly Linear Attention" (sections 4.1, 4.2 and 4.4). A
probe changes only the inner loop, in every layer and direction. Liu et al. changed the number of steps in this way too.
For ascent and q = k, however, they trained models with the change, which could adapt to it.

Vittt's operator is intercepted; a model of an ablation chain, or LaCT, is rebuilt with the probe's options.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kernels.ttt_linear.reference import Arguments, ttt_linear_dual

from ..core.errors import UserError
from ..core.paths import Paths
from ..core.record import make_identity, write_record
from ..core.runtime import Runtime, choose_device, device_label, device_slug
from ..data.cells import DataCell
from ..data.tree import Tree
from ..models import inner
from ..models.registry import build_model
from .classifier import Classifier, require_same_classes
from .inner import OverrideTTTLinear, Run

_KNOWN = "steps=K, ascent, q_is_k, distributions"  # for an error message; the last one is that of `distributions`
# kind -> change of the operator's arguments besides the number of steps, and the result of Liu et al.
_KINDS: dict[str, tuple[Callable[[Arguments], Arguments], str]] = {
    "steps": (
        lambda o: o,
        "more inner steps at inference fit the inner loss better and make the task's score worse (LaCT, Fig. 1)",
    ),
    "ascent": (
        lambda o: o._replace(lr=-o.lr),
        "top-1 on ImageNet-1K 79.61 % with ascent, 79.34 % with descent (ViT3, Table 1), both trained that way; we do not retrain",
    ),
    "q_is_k": (
        lambda o: o._replace(q=o.k),
        "top-1 on ImageNet-1K 79.18 % with k for q, 79.34 % without (ViT3, Table 1), both trained that way; we do not retrain",
    ),
}


def _parse_probe(name: str) -> tuple[str, int]:
    """Parse a probe's name into its kind and number of inner steps; raises ValueError for an unknown name."""
    kind, _, count = name.partition("=")
    if kind not in _KINDS or (kind == "steps") != (count.isdecimal() and int(count) > 0) or (count and kind != "steps"):
        raise ValueError(f"probe {name}: no such probe; known: {_KNOWN}")
    return kind, int(count or 1)


class Probe:
    """Replacement for `repro.inference.inner.OverrideTTTLinear` that runs a changed inner loop and adds to `losses`.

    Args:
        name: `steps=K` for K >= 1 inner steps per chunk, `ascent` for steps along the gradient, `q_is_k` for k instead
            of q (also in the residual of f(q) = q + LN(qW + β)). `steps=1` is the unchanged model.

    Raises:
        ValueError: an unknown name.
    """

    def __init__(self, name: str):
        kind, self.steps = _parse_probe(name)
        self._change, _ = _KINDS[kind]
        self.losses = InnerLosses()

    def __call__(self, arguments: Arguments, run: Run) -> Tensor:
        """Compute the changed output of one call of the operator, instead of `run`."""
        out, before, after = inner_loop(self._change(arguments), self.steps)
        sums = (float(losses.sum(dtype=torch.float64)) for losses in (before, after))
        self.losses.add(*sums, before.numel())
        return out


def inner_loop(arguments: Arguments, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute TTT-Linear with several inner gradient steps per chunk, each from the state that the previous one left.

    All steps but the last move the state of the whole chunk, W ← W − Kᵀ(c[n−1] lr ⊙ G), so that a token also learns
    from later tokens of its chunk; the last step is the unchanged dual form. A single step is the operator itself.

    Returns:
        out (B,T,R,H,D) in the dtype of q, and the loss (B,T,R,H) of each token at the start state and at the end state
        of its chunk.
    """
    # every direction reads the same `lr`: the operator has no rates per direction
    found = [_one_direction(arguments, r, steps) for r in range(len(arguments.reverse))]
    return tuple(torch.stack(parts, 2) for parts in zip(*found, strict=True))


def _one_direction(arguments: Arguments, r: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `inner_loop` of direction `r`, without the axis of directions; `reverse` is handled by flips."""
    B, T, _, H, D = arguments.q.shape
    # each image has its own state: fold images into the heads of a single image, whose states are separate
    tokens = *(x[:, :, r] for x in arguments[:3]), arguments.lr
    q, k, v, lr = (x.flip(1) if arguments.reverse[r] else x for x in tokens)
    q, k, v, lr = (x.transpose(0, 1).reshape(1, T, B * H, *x.shape[3:]) for x in (q, k, v, lr))
    c = arguments.token_scale[r]
    W, b, gamma, mu = (x[r].repeat(B, *[1] * (x.ndim - 2)) for x in arguments[5:9])
    outs, before, after = [], [], []
    for start in range(0, T, arguments.chunk_size):
        Q, K, V, rate = (x[:, start : start + arguments.chunk_size] for x in (q, k, v, lr))
        n = K.shape[1]
        learn = functools.partial(
            ttt_linear_dual, Q, K, V, rate, c[:n], chunk_size=n, eps=arguments.eps, return_inner=True
        )
        out, inner = learn(W, b, gamma, mu)
        before.append(inner.loss)
        for _ in range(steps):
            # the dual form takes a step itself: the output after K steps is computed at the state after K - 1
            last, change = out, (c[n - 1] * rate.unsqueeze(-1) * inner.gradient)[0]
            W = W - torch.einsum("nhi,nhj->hij", K[0], change)
            b = b - change.sum(0)
            out, inner = learn(W, b, gamma, mu)
        outs.append(last)
        after.append(inner.loss)
    joined = (torch.cat(parts, 1).view(T, B, H, *parts[0].shape[3:]).transpose(0, 1) for parts in (outs, before, after))
    return tuple(x.flip(1) if arguments.reverse[r] else x for x in joined)


_PREFIXES = ("ladder_vit3_", "lact_")  # of the registered names of models that are rebuilt for a probe


def is_rebuilt(model: str) -> bool:
    """Return whether a model of this registered name is rebuilt for a probe; Vittt's operator is intercepted."""
    return model.startswith(_PREFIXES)


def change_options(options: Mapping[str, Any], probe: str) -> dict[str, Any]:
    """Return the options that build the model with the probe's inner loop.

    Raises:
        ValueError: an unknown probe, or one that would undo the step rule that the model was trained with.
    """
    kind, steps = _parse_probe(probe)
    if kind == "steps":
        return {**options, "inner_steps": steps}
    if (step := options.get("step", "own")) != "own":
        raise ValueError(f"probe {probe}: the model was trained with step {step}; probe one of step own, or the steps")
    return {**options, "step": kind}


@contextlib.contextmanager
def replace_learners(model: nn.Module, replacement: Callable[..., Tensor]) -> Iterator[None]:
    """Within the context, compute every inner loop of an ablation chain, ViT³ or LaCT by a replacement.

    Its users only observe the loops, those of convolutions, too: the change of a probe is in the options by which the
    model was rebuilt. The replacement is called as `replacement(learn, loop, weights, q, k, v, ...)`, where `learn` is the original. Layers are found
    by a class attribute `learn`; `InnerMixer` has none, so its loops stay as they are.
    """
    layers = [layer for layer in model.modules() if hasattr(layer, "learn")]
    for layer in layers:
        layer.learn = functools.partial(replacement, layer.learn)
    try:
        yield
    finally:
        for layer in layers:
            del layer.learn  # uncovers the method of the class


@dataclasses.dataclass
class InnerLosses:
    """Inner losses before and after the inner steps: their sums, and the number of losses, over all calls of a model.

    Each token has a loss in each head of each layer. For Vittt it is that of `inner_loop`, for the rebuilt models
    −⟨F(k), v⟩.
    """

    before: float = 0.0
    after: float = 0.0
    count: int = 0

    def add(self, before: float, after: float, count: int) -> None:
        """Add the sums of `count` losses."""
        self.before += before
        self.after += after
        self.count += count

    def means(self) -> tuple[float, float]:
        """Return the mean loss before and after the inner steps; ValueError if there was no call."""
        if not self.count:
            raise ValueError("the model has no inner learner of Vision-TTT")
        return self.before / self.count, self.after / self.count

    def observe(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Add the losses of all inner loops of a rebuilt model, except those of convolutions, within the context."""
        return replace_learners(model, self._learn)

    def _learn(
        self,
        run: Callable[..., Tensor],
        loop: inner.InnerLoop,
        weights: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: Any,
        *rest: Any,
    ) -> Tensor:
        """Add the losses of one inner loop, and return its unchanged output; see `replace_learners`."""
        if not inner.MODELS[loop.model].on_grid:
            # run once more with k as the query: F(k) at the state after the steps
            at_end = dataclasses.replace(loop, order="end")
            read = inner.read_out(loop, weights, k, grid), run(at_end, weights, k, k, v, grid, *rest)
            self.add(*(-(out * v).sum(dtype=torch.float64).item() for out in read), v[..., 0].numel())
        return run(loop, weights, q, k, v, grid, *rest)


BATCH_SIZE = 64  # images per forward pass of a probe
UNCHANGED = "unchanged"  # the name that stands for no probe
_CHOICES = ("step", "inner_steps")  # options of an ablation chain that go into the record


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeParams:
    """The parameters that determine a probe's numbers besides the data; their hash is in the record's identity."""

    model: str
    weights_hash: str
    probe: str


def run_probe(classifier: Classifier, tree: Tree, name: str, workers: int) -> dict[str, float]:
    """Compute `top1_percent`, `held_out_images`, `inner_loss_before` and `inner_loss_after` with a changed inner loop.

    They are measured on the tree's reported split; records keep them by these names. `name` is a probe, or `UNCHANGED` for the model as it is.

    Raises:
        UserError: an unknown probe, or a model without an inner learner.
    """
    try:
        scores, (before, after) = (_run_inner_loop if is_rebuilt(classifier.checkpoint.model) else _run_operator)(
            classifier, tree, name, workers
        )
    except ValueError as error:
        raise UserError(f"explain: {error}") from None
    kept = {key: scores[key] for key in ("top1_percent", "held_out_images")}
    return kept | {"inner_loss_before": before, "inner_loss_after": after}


def compare_probe(classifier: Classifier, cell: DataCell, name: str, paths: Paths, runtime: Runtime) -> None:
    """Print and record a model's accuracy and inner losses on the reported split, unchanged and with a probe.

    For the file of the record see `record_probe`.

    Raises:
        UserError: as `run_probe`; or the data have other classes than the model.
    """
    started, device = time.monotonic(), choose_device(runtime.device)
    tree = cell.open_tree()
    require_same_classes(classifier.checkpoint, tree.classes, cell.name)
    found = run_probe(classifier, tree, name, runtime.workers)
    unchanged = run_probe(classifier, tree, UNCHANGED, runtime.workers)
    before, after = unchanged["top1_percent"], found["top1_percent"]
    print(
        f"{classifier.name} on {cell.name}, {found['held_out_images']} {tree.kind.reported_split} images: "
        f"top-1 {before:.2f} %, with {name} {after:.2f} % ({after - before:+.2f})"
    )
    for which, numbers in (("unchanged", unchanged), (f"with {name}", found)):
        losses = f"{numbers['inner_loss_before']:.3f}, {numbers['inner_loss_after']:.3f}"
        print(f"inner loss before and after its steps, {which}: {losses}")
    _, reported = _KINDS[_parse_probe(name)[0]]
    print(f"Liu et al. report: {reported}")

    checkpoint = classifier.checkpoint
    params = ProbeParams(model=classifier.name, weights_hash=checkpoint.hash, probe=name)
    metrics = {
        "model": checkpoint.model,
        "data": cell.name,
        "split": tree.kind.reported_split,
        "weights_hash": checkpoint.hash,
        "probe": name,
        "options": {key: checkpoint.options[key] for key in _CHOICES if key in checkpoint.options},
        "unchanged": unchanged,
        "probed": found,
    }
    record_probe(classifier, cell, params, metrics, paths, device, started)


def record_probe(
    classifier: Classifier,
    cell: DataCell,
    params: ProbeParams,
    metrics: Mapping[str, Any],
    paths: Paths,
    device: torch.device,
    started: float,
    backend: str = "torch",
) -> None:
    """Write probes/<model>_<data>_<weights>/<probe>.json into the folder of `DataCell.records`.

    `started` is the time of `time.monotonic` at the start of the probe.
    """
    identity = make_identity(
        paths.root, params, data_manifest=cell.manifest_path, device=device_label(device), dtype="fp32", backend=backend
    )
    name = f"{classifier.name}_{cell.name}_{params.weights_hash[:8]}"
    file = cell.records(paths, device_slug(device)) / "probes" / name / f"{params.probe.replace('=', '')}.json"
    write_record(file, metrics, identity, time.monotonic() - started)


def _run_operator(
    classifier: Classifier, tree: Tree, name: str, workers: int
) -> tuple[dict[str, float], tuple[float, float]]:
    """Run a probe of Vittt, whose operator is intercepted; return its scores and inner losses."""
    probe = Probe("steps=1" if name == UNCHANGED else name)
    with OverrideTTTLinear(probe):
        scores = classifier.measure_accuracy(tree, batch_size=BATCH_SIZE, workers=workers)
    return scores, probe.losses.means()


def _run_inner_loop(
    classifier: Classifier, tree: Tree, name: str, workers: int
) -> tuple[dict[str, float], tuple[float, float]]:
    """Run a probe of a model that is rebuilt with the probe's options and the same weights."""
    checkpoint = classifier.checkpoint
    options = checkpoint.options if name == UNCHANGED else change_options(checkpoint.options, name)
    model = build_model(checkpoint.model, **options).to(classifier.device).eval().requires_grad_(False)
    model.load_state_dict(classifier.model.state_dict())
    losses = InnerLosses()
    with losses.observe(model):
        scores = dataclasses.replace(classifier, model=model).measure_accuracy(
            tree, batch_size=BATCH_SIZE, workers=workers
        )
    return scores, losses.means()
