"""Similarity of an inner learner's distributions: its queries and keys, and its outputs and values.

Fig. 2 of Liu et al., "Test-Time Training with KV Binding Is Secretly Linear Attention", shows them in two dimensions;
here each pair gives one number. A Gaussian is fitted to each of two sets of vectors on half of the images, and
classifies the vectors of the other half. Equal distributions give 50 %.
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kernels.ttt_linear.reference import Arguments

from ..core.errors import UserError
from ..core.paths import Paths
from ..core.runtime import Runtime, choose_device
from ..data.cells import DataCell
from ..models.inner_models import MODELS
from ..models.registry import build_model, kernel_backend
from .classifier import Classifier, require_same_classes
from .inner import OverrideTTTLinear, Run
from .probes import BATCH_SIZE, ProbeParams, record_probe, replace_learners

NAME = "distributions"  # of this probe, for `repro explain --probe`
VECTORS = ("q", "k", "v", "out")  # queries, keys, values and outputs of a learner


def tell_apart(first: Tensor, second: Tensor) -> float:
    """Compute the accuracy of classifying vectors of two sets (N,n,h,d), a mean over the two sets and h heads.

    One Gaussian for each set, with its own mean and covariance, is fitted on the images of even index; vectors of the
    others are assigned by likelihood. Computes in fp64.
    """
    shares = []
    for one, other in zip(first.double().unbind(2), second.double().unbind(2), strict=True):
        fitted = [_fit(each[::2].flatten(0, 1)) for each in (one, other)]
        for own, vectors in enumerate((one, other)):
            likelihoods = [likelihood(vectors[1::2].flatten(0, 1)) for likelihood in fitted]
            difference = likelihoods[own] - likelihoods[1 - own]
            # a tie is a guess
            shares.append((difference > 0).double().mean() + 0.5 * (difference == 0).double().mean())
    return float(torch.stack(shares).mean())


def _fit(vectors: Tensor) -> Callable[[Tensor], Tensor]:
    """Fit a Gaussian to vectors (n,d), and return its log-likelihood up to a constant."""
    mean, covariance = vectors.mean(0), torch.cov(vectors.T)
    # directions without variance, e.g. of normalised vectors, would have an infinite density
    covariance.diagonal().add_(1e-6 * covariance.diagonal().mean())
    factor = torch.linalg.cholesky(covariance)

    def likelihood(given: Tensor) -> Tensor:
        """Map vectors (n,d) to their log-likelihoods (n,)."""
        scaled = torch.linalg.solve_triangular(factor, (given - mean).T, upper=False)
        return -0.5 * scaled.square().sum(0) - factor.diagonal().log().sum()

    return likelihood


@contextlib.contextmanager
def observe_vectors(model: nn.Module) -> Iterator[list[dict[str, Tensor]]]:
    """Collect `VECTORS` of inner learners except convolutions, in the order of the calls.

    Each is (B, vectors per image, heads, d). Observed are TTT-Linear and the layers that `replace_learners` finds, not
    those of `InnerMixer`.
    """
    calls: list[dict[str, Tensor]] = []

    def note_learner(run: Callable[..., Tensor], loop: Any, weights: Any, *given: Any) -> Tensor:
        """Note the vectors of a learner, (B,heads,n,d), and return its output; see `replace_learners`."""
        out = run(loop, weights, *given)
        if not MODELS[loop.model].on_grid:
            calls.append({name: x.transpose(1, 2) for name, x in zip(VECTORS, (*given[:3], out), strict=True)})
        return out

    def note_operator(arguments: Arguments, run: Run) -> Tensor:
        """Note the vectors of TTT-Linear, (B,T,R,H,D); each direction counts as heads of its own."""
        out = run(arguments)
        calls.append({name: x.flatten(2, 3) for name, x in zip(VECTORS, (*arguments[:3], out), strict=True)})
        return out

    with OverrideTTTLinear(note_operator), replace_learners(model, note_learner):
        yield calls


def _measure_layers(classifier: Classifier, cell: DataCell, workers: int) -> list[dict[str, float]]:
    """Compute `tell_apart` in percent for each pair of vectors, layer by layer, on the reported split.

    Raises:
        UserError: the model has no inner learner.
    """
    with observe_vectors(classifier.model) as calls:
        scores = classifier.measure_accuracy(cell.open_tree(), batch_size=BATCH_SIZE, workers=workers)
    if not calls:
        raise UserError(f"explain: --probe {NAME}: {classifier.checkpoint.model} has no inner learner that is observed")
    # each batch adds one call per layer, in the order of the layers; a reading with a learning rate per direction adds
    # two, and each direction counts as a layer
    depth, found = len(calls) // -(-scores["held_out_images"] // BATCH_SIZE), []
    for layer in range(depth):
        q, k, v, out = (torch.cat([call[name] for call in calls[layer::depth]]) for name in VECTORS)
        # a control for the other pairs: queries of the same distribution, split by image pairs since images are sorted
        # by class
        side = torch.arange(len(q)) // 2 % 2
        halves = q[side == 0], q[side == 1]
        pairs = {"queries_keys": (q, k), "outputs_values": (out, v), "queries_queries": halves}
        found.append({pair: 100 * tell_apart(*sets) for pair, sets in pairs.items()})
    return found


def record_distributions(classifier: Classifier, cell: DataCell, paths: Paths, runtime: Runtime) -> None:
    """Print and record `_measure_layers` for a trained model, and for the same model with random weights.

    For the file of the record see `record_probe`.

    Raises:
        UserError: as `_measure_layers`; or the data have other classes than the model, or fewer than four images.
    """
    started, device, checkpoint = time.monotonic(), choose_device(runtime.device), classifier.checkpoint
    tree = cell.open_tree()
    require_same_classes(checkpoint, tree.classes, cell.name)
    # two halves of the queries, each fitted on one image and tried on another
    if (images := len(tree.splits[tree.kind.reported_split].targets)) < 4:
        raise UserError(
            f"explain: --probe {NAME}: {cell.name} has {images} held-out images, and four are needed; add some"
        )
    torch.manual_seed(0)
    untrained = build_model(checkpoint.model, **checkpoint.options).to(device).eval().requires_grad_(False)
    layers = {
        state: _measure_layers(dataclasses.replace(classifier, model=model), cell, runtime.workers)
        for state, model in (("trained", classifier.model), ("untrained", untrained))
    }
    metrics: dict[str, Any] = {
        "model": checkpoint.model,
        "options": checkpoint.options,
        "data": cell.name,
        "split": tree.kind.reported_split,
        "weights_hash": checkpoint.hash,
        "probe": NAME,
        "told_apart_percent": {
            state: {pair: statistics.mean(layer[pair] for layer in found) for pair in found[0]}
            for state, found in layers.items()
        },
        "by_layer": layers,
    }
    for state, means in metrics["told_apart_percent"].items():
        shown = ", ".join(f"{pair.replace('_', ' and ')} {value:.1f} %" for pair, value in means.items())
        print(f"{classifier.name} on {cell.name}, {state}: told apart {shown} (50 %: the same distribution)")
    params = ProbeParams(model=classifier.name, weights_hash=checkpoint.hash, probe=NAME)
    # the operators are watched, not replaced
    backend = kernel_backend(classifier.model, torch.float32)
    record_probe(classifier, cell, params, metrics, paths, device, started, backend)
